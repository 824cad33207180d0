"""
Processors as stubs name them: names of registers, breakpoint instructions, and what belongs to a call.

One row for each architecture of ours; its registers are named as in GDB's descriptions (GDB manual, appendix G.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.description import RegisterPlace, TargetDescription
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.arch import Architecture

__all__ = ["StubProcessor", "processor_of"]


@dataclass(frozen=True, slots=True)
class StubProcessor:
    """
    Say how a processor looks through a stub.

    ``descriptions`` are the names that descriptions give it, ``names`` those of our registers that have another one
    there, ``pc`` and ``sp`` its names of these. ``breakpoint`` is the instruction; behind it the pc is ``moved`` bytes
    on, where a stub does not correct that. ``order`` is what GDB takes for the registers without a description, with
    their sizes in bytes.
    """

    descriptions: frozenset[str]
    names: Mapping[str, str]
    pc: str
    sp: str
    breakpoint: bytes
    moved: int
    order: Sequence[tuple[str, int]]

    def register(self, name: str) -> str:
        """Return the stub's name of a register."""
        return self.names.get(name, name)

    def default_description(self) -> TargetDescription:
        """Return what holds where a stub describes nothing."""
        places, offset = {}, 0
        for number, (name, size) in enumerate(self.order):
            places[name] = RegisterPlace(name, number, offset, size)
            offset += size
        return TargetDescription("", places)


_SEGMENTS = ("cs", "ss", "ds", "es", "fs", "gs")
_I386 = ("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "eip", "eflags", *_SEGMENTS)
_AMD64 = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16)), "rip")
_INT3 = b"\xcc"

_PROCESSORS = {
    "i386": StubProcessor(frozenset({"i386", "i386:intel"}), {}, "eip", "esp", _INT3, 1, [(name, 4) for name in _I386]),
    "x86_64": StubProcessor(
        frozenset({"i386:x86-64", "i386:x86-64:intel"}),
        {f"e{name[1:]}": name for name in _AMD64 if not name[1:].isdecimal() and name[0] == "r" and len(name) == 3},
        "rip",
        "rsp",
        _INT3,
        1,
        [*((name, 8) for name in _AMD64), ("eflags", 4), *((name, 4) for name in _SEGMENTS)],
    ),
}


def processor_of(architecture: Architecture) -> StubProcessor | None:
    """Return the row of an architecture, None if there is none."""
    return _PROCESSORS.get(architecture.name)
