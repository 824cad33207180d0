"""
Extensions: user-defined instructions, which handlers run with ``callk NAME`` (docs/reference/extensions.md).

A package registers an ``Extension`` as an entry point in the group ``dprobes.extensions``; the name of the entry point
is the operand of ``callk``. Extensions are ordered by the names of their packages, and within a package by its own
list.
"""

from __future__ import annotations

from dprobes.extensions.extension import ENTRY_POINTS, Extension, View
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.vm.rpn_machine import Raised
from dprobes.vm.world_context import AddressFault, SelectorFault

__all__ = ["ENTRY_POINTS", "AddressFault", "ExceptionCode", "Extension", "Raised", "SelectorFault", "View"]
