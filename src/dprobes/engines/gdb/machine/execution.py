"""
Single instructions that a processor of a machine executes for us: those that tell what no stub does.

Its registers are set to what the instruction takes, and its program counter to where the kernel has such one; after
one step they are what they were. If the instruction faults, the step leads to the kernel's entry for that, of
which nothing is executed: then there is no result. Interrupts are held meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.machine.pagetables import Paging
    from dprobes.engines.gdb.stopreplies import ThreadId

__all__ = ["CPUID", "RDMSR", "Executor"]

RDMSR: Final = b"\x0f\x32"
CPUID: Final = b"\x0f\xa2"
_PIECE, _TEXT_MAX = 1 << 16, 1 << 25
_RESTORED = ("rax", "rbx", "rcx", "rdx", "rsp", "eflags", "rip")
"""What the instructions, or the entry of an exception, change."""


class Executor:
    """Execute instructions on processors of a ``target``; the kernel's code begins at ``text``."""

    def __init__(self, target: MachineTarget, text: int, tables: int, paging: Paging) -> None:
        self._target = target
        self._text, self._tables, self._paging = text, tables, paging
        self._places: dict[bytes, int | None] = {}

    def execute(
        self, code: bytes, thread: ThreadId | None, inputs: Mapping[str, int], outputs: tuple[str, ...]
    ) -> tuple[int, ...] | None:
        """Return the registers ``outputs`` after an instruction, None if it faults, or is nowhere in the kernel."""
        place = self._place_of(code)
        if place is None:
            return None
        registers = self._target.registers(thread)
        before = {name: registers[name] for name in _RESTORED}
        try:
            for name, value in {**inputs, "rip": place}.items():
                registers[name] = value
            self._target.write_back(thread, registers)
            self._target.step(thread, place, "rip", is_exact=False)
            registers = self._target.registers(thread)
            has_executed = registers["rip"] == place + len(code)
            result = tuple(registers[name] for name in outputs)
        finally:
            registers = self._target.registers(thread)
            for name, value in before.items():
                if registers[name] != value:
                    registers[name] = value
            self._target.write_back(thread, registers)
        return result if has_executed else None

    def _place_of(self, code: bytes) -> int | None:
        """Return where the bytes are in the kernel's text, whatever they are a part of there."""
        if code not in self._places:
            self._places[code] = self._search(code)
        return self._places[code]

    def _search(self, code: bytes) -> int | None:
        before = b""
        for start in range(self._text, self._text + _TEXT_MAX, _PIECE):
            piece = self._target.read_large(self._tables, self._paging, start, _PIECE)
            if (at := (before + piece).find(code)) >= 0:
                return start - len(before) + at
            if len(piece) < _PIECE:
                break
            before = piece[1 - len(code) :]
        return None
