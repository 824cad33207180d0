"""
Extensions: instructions of your own, which handlers run with ``callk NAME`` (docs/extensions.md).

A package registers an ``Extension`` as an entry point in the group ``dprobes.extensions``; the name of the entry point
is the name that ``callk`` takes. Order of registration: packages by name, each with the order of its own list.
"""

from __future__ import annotations

from dprobes.extensions.extension import ENTRY_POINTS, Extension
from dprobes.extensions.view import View
from dprobes.rpn.isa import ExceptionCode
from dprobes.vm.context import AddressFault, SelectorFault
from dprobes.vm.machine import Raised

__all__ = ["ENTRY_POINTS", "AddressFault", "ExceptionCode", "Extension", "Raised", "SelectorFault", "View"]
