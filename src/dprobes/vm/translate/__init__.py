"""Translation of handlers to Python functions, once for each handler. Results are equal to the interpreter's."""

from __future__ import annotations

from dprobes.vm.translate.handler_translator import Translator

__all__ = ["Translator"]
