"""
Which instructions of generated code may fault, and where it goes on then.

A load of memory that may not be there costs nothing as long as it is: whoever sees the fault looks for the instruction
here, and lets the thread go on at its fix-up, as the kernel does with its own exception table.
"""

from __future__ import annotations

from dprobes.lazynamedtuple import NamedTuple

__all__ = ["Fixup"]


class Fixup(NamedTuple):
    """An instruction that may fault, and where the thread goes on if it does; both are addresses."""

    instruction: int
    target: int
