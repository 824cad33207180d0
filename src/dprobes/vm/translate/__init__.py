"""
A second back end for handlers: each is translated once into a Python function, and agrees with the interpreter.

======================  ==============================================================
``translator``          runs handlers; what the functions call, and where they end up
``function``            the text of a function: paths, blocks, ways out
``rows``                the text of an instruction, and which ones have none
``state``               what is known of a machine before it runs
======================  ==============================================================
"""

from __future__ import annotations

from dprobes.vm.translate.handler_translator import Translator

__all__ = ["Translator"]
