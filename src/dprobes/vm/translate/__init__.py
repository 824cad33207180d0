"""Translation of handlers to Python functions, once for each handler; results equal those of the interpreter."""

from __future__ import annotations

from dprobes.vm.translate.handler_translator import Translator

__all__ = ["Translator"]
