"""
The reference interpreter: the definition of what RPN instructions do.

It speaks to the world through a ``Context`` only. Every other back end must agree with it to the byte.
"""

from __future__ import annotations

from dprobes.vm.context import AddressFault, Context, SelectorFault
from dprobes.vm.interpreter import Interpreter
from dprobes.vm.machine import Ending, Outcome, Point

__all__ = ["AddressFault", "Context", "Ending", "Interpreter", "Outcome", "Point", "SelectorFault"]
