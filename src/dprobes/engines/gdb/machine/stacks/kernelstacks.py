"""
Call stacks of the kernel of a machine: up from a processor's registers, by the kernel's own tables (ORC).

What the kernel does itself for its traces (``arch/x86/kernel/unwind_orc.c``) is done here from outside. Code without an
entry, as that of BPF programs, has frame pointers, and so has all code of a kernel without such tables. A walk ends
where the kernel was entered from a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.stacks.orctables import OrcEntry, OrcKind, OrcRegister
from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.gdb.registers import Registers

__all__ = ["KernelStacks"]

_WORD = 8
_MASK = (1 << 64) - 1
_FRAMES_MAX = 127
_RING = 3
_KERNEL_HALF = 1 << 63
_FRAME_POINTER = OrcEntry(OrcRegister.BP, 16, OrcRegister.PREV_SP, -16, OrcKind.CALL)
"""How code with frame pointers is walked (``orc_fp_entry``)."""
_SAVED_BP, _SAVED_IP, _SAVED_CS, _SAVED_SP = 4 * _WORD, 16 * _WORD, 17 * _WORD, 19 * _WORD
"""Where ``struct pt_regs`` has them; what the processor itself saves begins with the instruction pointer."""
_NAMES = {
    OrcRegister.DX: "rdx",
    OrcRegister.DI: "rdi",
    OrcRegister.R10: "r10",
    OrcRegister.R13: "r13",
}


class _Frame(NamedTuple):
    """A frame: its registers, and whether its address is that of an instruction to come."""

    ip: int
    sp: int
    bp: int
    is_exact: bool


class KernelStacks:
    """
    Walk up stacks of the kernel.

    ``word`` reads memory, and ``entry_at`` returns the entry for an address, None if there is none. ``is_entered`` is
    whether an address is the first one of a function.
    """

    def __init__(
        self,
        word: Callable[[int, int], int | None],
        entry_at: Callable[[int], OrcEntry | None],
        is_entered: Callable[[int], bool],
    ) -> None:
        self._read, self._entry_at, self._is_entered = word, entry_at, is_entered

    def stack(self, registers: Registers) -> list[int]:
        """Return the addresses of the call stack of a processor, the innermost first; none outside of the kernel."""
        if registers["cs"] & _RING:
            return []
        frame: _Frame | None = _Frame(registers["rip"], registers["rsp"], registers["rbp"], is_exact=True)
        found: list[int] = []
        seen: set[_Frame] = set()
        while frame is not None and frame.ip >= _KERNEL_HALF and frame not in seen and len(found) < _FRAMES_MAX:
            seen.add(frame)
            found.append(frame.ip)
            try:
                frame = self._above(frame, registers if len(found) == 1 else None)
            except TargetError:
                break
        return found

    def _word(self, address: int) -> int:
        value = self._read(address & _MASK, _WORD)
        if value is None:
            raise TargetError(f"the stack at {address:#x} cannot be read")
        return value

    def _above(self, frame: _Frame, registers: Registers | None) -> _Frame | None:
        """Return the caller's frame, or that of what was interrupted; ``registers`` are known of the innermost one."""
        entry = self._entry_at(frame.ip if frame.is_exact else frame.ip - 1)
        if entry is None and frame.is_exact and registers is not None and self._is_entered(frame.ip):
            return _Frame(self._word(frame.sp), frame.sp + _WORD, frame.bp, is_exact=False)
        entry = entry or _FRAME_POINTER
        sp = None if entry.kind in (OrcKind.UNDEFINED, OrcKind.END_OF_STACK) else self._sp(entry, frame, registers)
        if sp is None:
            return None
        match entry.kind:
            case OrcKind.CALL:
                return _Frame(self._word(sp - _WORD), sp, self._bp(entry, frame, sp), is_exact=False)
            case OrcKind.REGS:
                bp = self._word(sp + _SAVED_BP)
                return self._interrupted(sp, bp)
            case _:
                return self._interrupted(sp - _SAVED_IP, self._bp(entry, frame, sp))

    def _interrupted(self, saved: int, bp: int) -> _Frame | None:
        """Return the frame whose registers were saved when it was interrupted, None if that was a program's."""
        if self._word(saved + _SAVED_CS) & _RING:
            return None
        return _Frame(self._word(saved + _SAVED_IP), self._word(saved + _SAVED_SP), bp, is_exact=True)

    def _sp(self, entry: OrcEntry, frame: _Frame, registers: Registers | None) -> int | None:
        match entry.sp_register:
            case OrcRegister.SP:
                return frame.sp + entry.sp_offset
            case OrcRegister.BP:
                return frame.bp + entry.sp_offset
            case OrcRegister.SP_INDIRECT:
                return self._word(frame.sp) + entry.sp_offset
            case OrcRegister.BP_INDIRECT:
                return self._word(frame.bp + entry.sp_offset)
            case OrcRegister.DX | OrcRegister.DI | OrcRegister.R10 | OrcRegister.R13 as register:
                return None if registers is None else registers[_NAMES[OrcRegister(register)]]
        return None

    def _bp(self, entry: OrcEntry, frame: _Frame, sp: int) -> int:
        match entry.bp_register:
            case OrcRegister.PREV_SP:
                return self._word(sp + entry.bp_offset)
            case OrcRegister.BP:
                return self._word(frame.bp + entry.bp_offset)
        return frame.bp
