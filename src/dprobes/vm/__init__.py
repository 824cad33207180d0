"""
The reference interpreter: the definition of what RPN instructions do.

It speaks to the world through a ``Context`` only. Every other back end must agree with it to the byte.
"""

from __future__ import annotations

from dprobes.vm.interpreter import Interpreter
from dprobes.vm.rpn_machine import Ending, Outcome, Point
from dprobes.vm.world_context import AddressFault, Context, SelectorFault

__all__ = ["AddressFault", "Context", "Ending", "Interpreter", "Outcome", "Point", "SelectorFault"]
