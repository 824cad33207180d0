"""A second back end for handlers: each is translated once into a Python function, and agrees with the interpreter."""

from __future__ import annotations

from dprobes.vm.translate.handler_translator import Translator

__all__ = ["Translator"]
