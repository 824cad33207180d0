"""
Reference interpreter: the definition of RPN instructions.

Its only interface to the outside is a ``Context``. Records of all other back ends must be equal to those of the
interpreter, byte by byte. The interpreter runs the *encoded bytes*, not the ``Program``. So hostile bytes from a
compiled file run through the same code as every probe program, and the offsets in stack traces are those of the
encoding.

Engines in Python run the *translation* (``translate``): a Python function for each handler, generated from its bytes at
the first hit. The function stops before a rare instruction, and the interpreter continues in the same state. Tests
compare translation and interpreter for every instruction and for random programs.
"""

from __future__ import annotations

from dprobes.vm.interpreter import Interpreter
from dprobes.vm.rpn_machine import Ending, Outcome, Point
from dprobes.vm.world_context import AddressFault, Context, SelectorFault

__all__ = ["AddressFault", "Context", "Ending", "Interpreter", "Outcome", "Point", "SelectorFault"]
