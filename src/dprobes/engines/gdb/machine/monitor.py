"""
What QEMU's monitor says and does that the protocol has no packets for: system registers, I/O ports, and dumps.

It speaks of one processor at a time, which ``cpu`` chooses. ``info registers`` prints for x86-64 among others::

    LDT=0000 0000000000000000 0000ffff 00008200 DPL=0 LDT
    TR =0040 fffffe0000003000 00004087 00008b00 DPL=0 TSS64-busy
    GDT=     fffffe0000001000 0000007f
    IDT=     fffffe0000000000 00000fff
    DR0=0000000000000000 DR1=0000000000000000 DR2=0000000000000000 DR3=0000000000000000
    CS =0010 0000000000000000 ffffffff 00af9b00 DPL=0 CS64 [-RA]

A segment is its selector, base, limit and the upper word of its descriptor.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.errors import EngineError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.gdb.stub import Stub

__all__ = ["Monitor", "Segment", "SystemRegisters"]

_SEGMENT = lazy_pattern(r"^([CDEFGS]S|LDT|TR) *=([0-9a-f]{4}) ([0-9a-f]+) ([0-9a-f]{8}) ([0-9a-f]{8})", re.MULTILINE)
_TABLE = lazy_pattern(r"^(GDT|IDT)= +([0-9a-f]+) ([0-9a-f]{8})", re.MULTILINE)
_DEBUG = lazy_pattern(r"\b(DR[0-7])=([0-9a-f]+)")
_PORT = lazy_pattern(r"^port[bwl]\[0x[0-9a-f]+\] = 0x([0-9a-f]+)", re.MULTILINE)
_WARNING = lazy_pattern(r"(?:[\w.+-]+: )?warning: ", re.IGNORECASE)
_DUMP_PATIENCE = 600.0
"""Seconds that the memory of a large machine may take to be written."""
_FORMATS = {1: "b", 2: "h", 4: "w"}


class Segment(NamedTuple):
    """A segment register."""

    selector: int
    base: int
    limit: int
    flags: int


class SystemRegisters(NamedTuple):
    """What a processor has besides its general registers: segments, tables as base and limit, debug registers."""

    segments: Mapping[str, Segment]
    tables: Mapping[str, tuple[int, int]]
    debug: Mapping[str, int]


class Monitor:
    """The monitor behind a stub."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def _ask(self, line: str) -> str:
        answer = self._stub.command(line)
        if answer is None:
            raise EngineError(f"the stub {self._stub.name} has no monitor, which '{line}' is for")
        return answer

    @property
    def is_there(self) -> bool:
        """Whether the stub has a monitor that knows of processors."""
        return "CPU #" in (self._stub.command("info cpus") or "")

    def system_registers(self, processor: int) -> SystemRegisters:
        """Return the registers of a processor, by the monitor's number of it; raise ``EngineError`` if none come."""
        self._ask(f"cpu {processor}")
        said = self._ask("info registers")
        found = SystemRegisters(
            {m[1].lower(): Segment(*(int(number, 16) for number in m.groups()[1:])) for m in _SEGMENT.finditer(said)},
            {m[1].lower(): (int(m[2], 16), int(m[3], 16)) for m in _TABLE.finditer(said)},
            {m[1].lower(): int(m[2], 16) for m in _DEBUG.finditer(said)},
        )
        if not found.tables:
            raise EngineError(f"the monitor behind the stub {self._stub.name} tells no system registers")
        return found

    def read_port(self, port: int, size: int) -> int:
        """Return what an I/O port reads, which may change what is behind it; raise ``EngineError`` if nothing comes."""
        said = self._ask(f"i /{_FORMATS[size]} {port:#x}")
        found = _PORT.search(said)
        if found is None:
            raise EngineError(f"the monitor behind the stub {self._stub.name} reads no port {port:#x}: {said.strip()}")
        return int(found[1], 16)

    def write_port(self, port: int, size: int, value: int) -> None:
        """Write to an I/O port."""
        _, problem = _warnings_and_problem(self._ask(f"o /{_FORMATS[size]} {port:#x} {value:#x}"))
        if problem:
            raise EngineError(f"the monitor behind the stub {self._stub.name} writes no port {port:#x}: {problem}")

    def dump(self, path: str) -> str:
        """
        Write the machine's memory and registers to a new file; return what the monitor warns of, mostly nothing.

        Raise ``EngineError`` if that cannot be done.
        """
        said = self._stub.command(f'dump-guest-memory "{path}"', _DUMP_PATIENCE)
        warnings, problem = _warnings_and_problem(said or "")
        if said is None or problem:
            raise EngineError(f"the stub {self._stub.name} writes no dump: {problem or 'it has no monitor'}")
        return warnings


def _warnings_and_problem(said: str) -> tuple[str, str]:
    """
    Take apart what a command said that says nothing when it succeeds.

    QEMU begins a warning so (``warn_report`` in util/qemu-error.c), and carries the command out nevertheless.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    warnings = [line for line in lines if _WARNING.match(line)]
    return "; ".join(warnings), "; ".join(line for line in lines if line not in warnings)
