"""
Mechanism by which the kernel enters a kprobe: a call of ftrace, a jump, or a breakpoint, which is the slowest.

The kernel chooses the mechanism some time after it has registered a kprobe. The prediction here follows
``can_optimize`` and ``copy_optimized_instructions`` in arch/x86/kernel/kprobes/opt.c, ``can_boost`` and
``prepare_emulation`` in core.c beside it (Linux 6.1 to 6.18). A jump replaces whole instructions with at least five
bytes. No instruction may jump to these bytes and no code may patch them. The function must have no entries of the
exception table and no indirect jumps.
"""

from __future__ import annotations

import enum
import struct
from bisect import bisect_left
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.target.code.machine_code import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.kernel.kernel_symbols import KernelSymbol
    from dprobes.target.kernel.running_kernel import RunningKernel

__all__ = ["KprobeWay", "KprobeWays"]

_BITS = 64
_JUMP = 5
"""Size in bytes of a jump, of a call, and of the instruction that ftrace patches."""
_BREAKPOINT = b"\xcc"
_SHORT = (b"\xeb", b"\x66")
"""First bytes of a jump label of two bytes: ``jmp``, and ``nop``."""
_ENDBR = 4

_OPTIMIZATION = Path("/proc/sys/debug/kprobes-optimization")

# struct exception_table_entry: s32 insn, fixup; int data; numbers are relative to their own addresses.
_EXCEPTION_SIZE = 12
# struct jump_entry: s32 code, target; s64 key.
_JUMP_LABEL_SIZE = 16
# struct static_call_site: s32 addr, key.
_STATIC_CALL_SIZE = 8
_RELATIVE = struct.Struct("<i")

_TABLES = {
    "exceptions": ("__start___ex_table", "__stop___ex_table", _EXCEPTION_SIZE),
    "jump labels": ("__start___jump_table", "__stop___jump_table", _JUMP_LABEL_SIZE),
    "static calls": ("__start_static_call_sites", "__stop_static_call_sites", _STATIC_CALL_SIZE),
}

_PREFIXES = b"\x66\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65\x67"
_NEVER_MOVED = b"\x2e\x67"
"""The prefixes ``cs`` and address size. The kernel never boosts a copy with one of them."""


class KprobeWay(enum.Enum):
    """Mechanism by which a kprobe is entered, the fastest first; the values are for messages."""

    FTRACE = "ftrace"
    """ftrace calls the handler, without an exception."""
    JUMP = "jump"
    """A jump leads to the handler, without an exception."""
    JUMP_SINCE = "jump or breakpoint"
    """A jump leads to the handler, if the kernel boosts the opcode groups: see ``_Moves``."""
    EMULATED = "breakpoint, emulated"
    """The kernel emulates the instruction."""
    MOVED = "breakpoint, moved"
    """
    The kernel executes a copy of the instruction, which jumps back.

    In a preemptible kernel it ends in a breakpoint.
    """
    MOVED_SINCE = "breakpoint, moved or stepped"
    """A copy is executed, and jumps back if the kernel boosts the opcode groups: see ``_Moves``."""
    STEPPED = "breakpoint, stepped"
    """A copy of the instruction is executed, and ends in another breakpoint."""


class _Moves(enum.IntEnum):
    """
    Kernel versions that boost an instruction: its copy ends with a jump back, and needs no second breakpoint.

    Instructions of opcode groups 2 to 5 (shifts, ``not``, ``neg``, ``mul``, ``div``, ``inc``, ``dec``) are boosted
    since "x86/kprobes: Boost more instructions from grp2/3/4/5" (Linux 6.10). No interface of the kernel shows whether
    it has that commit.
    """

    NEVER = 0
    SINCE = 1
    ALWAYS = 2


class KprobeWays:
    """A prediction of how a kernel enters kprobes: by ftrace, by an optimized jump, or by a breakpoint."""

    def __init__(self, kernel: RunningKernel, *, optimizes: bool | None = None) -> None:
        """
        Predict for ``kernel``.

        ``optimizes`` is whether it replaces breakpoints by jumps, None for its present setting.
        """
        self._kernel = kernel
        self._optimizes = _is_optimizing() if optimizes is None else optimizes

    def ways(self, function: KernelSymbol) -> Mapping[int, KprobeWay]:
        """
        Return the way in which the kernel enters a kprobe at each instruction of a function, by address.

        The result is empty if the code of the function cannot be read.
        """
        end = self._kernel.end_of(function)
        code = self._kernel.text.read(function.address, end - function.address)
        if not code:
            return {}
        instructions = list(decode(code, _BITS, function.address))
        targets = self._jump_targets(instructions) if self._optimizes else None
        place = self._ftrace_place(function)
        return {
            each.address: self._way(place, instructions, number, end, targets)
            for number, each in enumerate(instructions)
        }

    def _way(
        self,
        place: int | None,
        instructions: Sequence[DecodedInstruction],
        number: int,
        end: int,
        targets: Sequence[int] | None,
    ) -> KprobeWay:
        each = instructions[number]
        # The kernel moves a kprobe at the landing pad to the place of ftrace after it.
        if place is not None and each.address in (place, instructions[0].address):
            return KprobeWay.FTRACE
        if targets is not None:
            match self._may_jump(instructions, number, end, targets, place):
                case _Moves.ALWAYS:
                    return KprobeWay.JUMP
                case _Moves.SINCE:
                    return KprobeWay.JUMP_SINCE
        if _is_emulated(each.raw):
            return KprobeWay.EMULATED
        return _WAYS_OF_COPIES[self._moves(each)]

    def _ftrace_place(self, function: KernelSymbol) -> int | None:
        """Return the address that ftrace patches in a function, or None if ftrace cannot trace the function."""
        if not self._kernel.is_traceable(function.address):
            return None
        begins = self._kernel.text.read(function.address, _ENDBR)
        return function.address + (_ENDBR if begins in _LANDING_PADS else 0)

    def _jump_targets(self, instructions: Sequence[DecodedInstruction]) -> list[int] | None:
        """Return the sorted targets of the function's jumps, or None if no kprobe in it can become a jump."""
        targets = []
        for each in instructions:
            if each.address in self._exceptions:
                return None
            _, bare = _opcode(each.raw)
            if bare[:1] == _BREAKPOINT:
                break  # padding after the function
            target = _jump_target(bare, each)
            if self._fears_indirect and (_is_indirect_jump(bare) or self._is_thunk(target)):
                return None
            if target is not None:
                targets.append(target)
        return sorted(targets)

    def _may_jump(
        self,
        instructions: Sequence[DecodedInstruction],
        number: int,
        end: int,
        targets: Sequence[int],
        place: int | None,
    ) -> _Moves:
        address = instructions[number].address
        if end - address < _JUMP or self._entry_code[0] <= address < self._entry_code[1]:
            return _Moves.NEVER
        # From after the first byte, where the breakpoint is at first, to the end of the jump.
        at = bisect_left(targets, address + 1)
        if at < len(targets) and targets[at] <= address + _JUMP:
            return _Moves.NEVER
        behind, moves = number, _Moves.ALWAYS
        while behind < len(instructions) and instructions[behind].address < address + _JUMP:
            moves = min(moves, self._moves(instructions[behind]))
            behind += 1
        last = instructions[behind - 1].address + instructions[behind - 1].length - 1
        is_of_ftrace = place is not None and address <= place <= last
        return _Moves.NEVER if is_of_ftrace or self._is_reserved(address, last) else moves

    def _moves(self, instruction: DecodedInstruction) -> _Moves:
        return _Moves.NEVER if instruction.address in self._exceptions else _boost(instruction.raw)

    def _is_reserved(self, first: int, last: int) -> bool:
        """Return whether jump labels or static calls patch bytes of a range."""
        at = bisect_left(self._reserved, first - _JUMP + 1)
        while at < len(self._reserved) and self._reserved[at] <= last:
            if self._reserved[at] + self._size_at(self._reserved[at]) > first:
                return True
            at += 1
        return False

    def _size_at(self, address: int) -> int:
        """Return the number of bytes that the kernel patches at an address: 2 for a short jump, else 5."""
        return 2 if self._kernel.text.read(address, 1) in _SHORT else _JUMP

    @cached_property
    def _exceptions(self) -> frozenset[int]:
        return frozenset(self._entries("exceptions"))

    @cached_property
    def _reserved(self) -> list[int]:
        return sorted([*self._entries("jump labels"), *self._entries("static calls")])

    def _entries(self, table: str) -> Iterator[int]:
        """
        Iterate over the code addresses in a table of the kernel, named by its symbols.

        A table that cannot be read is empty.
        """
        begins, ends, size = _TABLES[table]
        start, end = self._address(begins), self._address(ends)
        if start is None or end is None or self._kernel.memory.problem is not None:
            return
        data = self._kernel.memory.read(start, end - start)
        for offset in range(0, len(data) - size + 1, size):
            yield start + offset + _RELATIVE.unpack_from(data, offset)[0]

    @cached_property
    def _entry_code(self) -> tuple[int, int]:
        return self._range("__entry_text_start", "__entry_text_end")

    def _is_thunk(self, target: int | None) -> bool:
        """Return whether a jump leads to a thunk, which replaces an indirect jump."""
        start, end = self._thunks
        return target is not None and start <= target <= end

    @cached_property
    def _thunks(self) -> tuple[int, int]:
        return self._range("__indirect_thunk_start", "__indirect_thunk_end")

    @cached_property
    def _fears_indirect(self) -> bool:
        """
        True if an indirect jump forbids optimization in the whole function.

        Since Linux kernel commit 833fd800bf56 it does not, in kernels that are built without jump tables because they
        use thunks. That commit removed the symbols around the thunks.
        """
        return self._thunks != (0, 0) or self._address("__x86_indirect_thunk_rax") is None

    def _range(self, begins: str, ends: str) -> tuple[int, int]:
        start, end = self._address(begins), self._address(ends)
        return (start, end) if start is not None and end is not None else (0, 0)

    def _address(self, name: str) -> int | None:
        found = self._kernel.symbols.find(name, "")
        return found[0].address if found else None


_LANDING_PADS = (bytes.fromhex("f30f1efa"), bytes.fromhex("660f1f00"))
"""``endbr64``, and the instruction that replaces one to which nothing may jump."""


def _is_optimizing() -> bool:
    try:
        return _OPTIMIZATION.read_text().strip() != "0"
    except OSError:
        return False  # built without CONFIG_OPTPROBES


def _opcode(raw: bytes) -> tuple[bytes, bytes]:
    """Return the legacy prefixes of an instruction, and the bytes after them and after a REX prefix."""
    bare = raw.lstrip(_PREFIXES)
    prefixes = raw[: len(raw) - len(bare)]
    return prefixes, bare[1:] if bare and 0x40 <= bare[0] <= 0x4F else bare


def _register(bare: bytes) -> int:
    """Return the reg field of the ModRM byte after an opcode of one byte."""
    return bare[1] >> 3 & 7


def _is_indirect_jump(bare: bytes) -> bool:
    return bare[:1] == b"\xff" and _register(bare) in (4, 5)


def _jump_target(bare: bytes, instruction: DecodedInstruction) -> int | None:
    """Return the target of a direct jump, or None for another instruction."""
    first = bare[0] if bare else 0
    if 0x70 <= first <= 0x7F or 0xE0 <= first <= 0xE3 or first == 0xEB:
        distance = int.from_bytes(bare[1:2], "little", signed=True)
    elif first == 0xE9:
        distance = int.from_bytes(bare[1:5], "little", signed=True)
    elif first == 0x0F and len(bare) > 1 and 0x80 <= bare[1] <= 0x8F:
        distance = int.from_bytes(bare[2:6], "little", signed=True)
    else:
        return None
    return instruction.address + instruction.length + distance


def _is_emulated(raw: bytes) -> bool:
    """Return whether the kernel emulates an instruction (``prepare_emulation``)."""
    _, bare = _opcode(raw)
    first = bare[0] if bare else 0
    if first in (0x9C, 0x9D, 0xC2, 0xC3, 0xCA, 0xCB, 0xE8, 0xE9, 0xEB, 0xFA, 0xFB):
        return True
    if 0x70 <= first <= 0x7F or 0xE0 <= first <= 0xE3:
        return True
    if first == 0x0F:
        return len(bare) > 1 and 0x80 <= bare[1] <= 0x8F
    return first == 0xFF and len(bare) > 1 and bare[1] >> 6 == 3 and _register(bare) in (2, 4)


_TWO_BYTES = (
    "0011001011000000"  # 00
    "0000000000000001"  # 10
    "1111000000000000"  # 20
    "0100000000000000"  # 30
    "1111111111111111"  # 40
    "0000000000000000"  # 50
    "1111111111110011"  # 60
    "0000111100000011"  # 70
    "0000000000000000"  # 80
    "1111111111111111"  # 90
    "1101110011011101"  # a0
    "1111111100011111"  # b0
    "1100000011111111"  # c0
    "0111010011011101"  # d0
    "0110010011011101"  # e0
    "0111010011101110"  # f0
)
"""Two-byte opcodes that the kernel boosts ("1"), by the byte after 0f (``twobyte_is_boostable`` in core.c)."""


def _boost(raw: bytes) -> _Moves:
    """Return which kernel versions boost an instruction when its kprobe is hit (``can_boost`` in the kernel)."""
    prefixes, bare = _opcode(raw)
    if not bare:
        return _Moves.NEVER
    first = bare[0]
    if first == 0x0F:
        return _Moves.ALWAYS if len(bare) > 1 and _TWO_BYTES[bare[1]] == "1" else _Moves.NEVER
    if any(prefix in _NEVER_MOVED for prefix in prefixes):
        return _Moves.NEVER
    if (
        first in (0x62, 0x9A, 0xC4, 0xC5, 0xD6, 0xE8, 0xE9, 0xEB)
        or 0x70 <= first <= 0x7F
        or 0xCC <= first <= 0xCE
        or 0xD8 <= first <= 0xDF
        or 0xE0 <= first <= 0xE3
        or 0xF0 <= first <= 0xF4
    ):
        return _Moves.NEVER
    if first == 0xFF and _register(bare) == 4:
        return _Moves.ALWAYS
    if (since := _GROUPS.get(first)) is not None:
        return _Moves.SINCE if _register(bare) in since else _Moves.NEVER
    return _Moves.ALWAYS


_SHIFTS, _MATHS, _STEPS = frozenset(range(8)) - {6}, frozenset(range(8)) - {1}, frozenset({0, 1})
_GROUPS = {
    **dict.fromkeys((0xC0, 0xC1, 0xD0, 0xD1, 0xD2, 0xD3), _SHIFTS),
    **dict.fromkeys((0xF6, 0xF7), _MATHS),
    **dict.fromkeys((0xFE, 0xFF), _STEPS),
}
"""Opcodes of groups 2 to 5, and the values of ModRM's reg field with which they are boosted."""

_WAYS_OF_COPIES = {
    _Moves.ALWAYS: KprobeWay.MOVED,
    _Moves.SINCE: KprobeWay.MOVED_SINCE,
    _Moves.NEVER: KprobeWay.STEPPED,
}
