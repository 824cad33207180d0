"""Analysis of handlers' eBPF before its translation: validity, dead code, and the use of registers and memory."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_assembler import Assembled, MapReference
from dprobes.bpf.bpf_instructions import (
    CALL,
    EXIT,
    WIDE_LOAD,
    Alu,
    Atomic,
    CallKind,
    Class,
    Helper,
    Jump,
    LoadImmediate,
    Mode,
    Register,
    Size,
    X,
)
from dprobes.errors import NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.bpf_instructions import Insn

__all__ = [
    "CONTEXT_WORDS",
    "FRAME_MAX",
    "Footprint",
    "budget_place",
    "check_code",
    "footprint",
    "frame_size",
    "is_first_argument_used",
    "trimmed",
    "uses_budget",
]

# The rules for eBPF that becomes machine code, whichever processor it is for.
#
# Unlike in the kernel, no verifier checks the code later. So these are refused here: an unknown opcode, a jump to a
# place that is not the start of an instruction, and an access beyond the frame by a constant. Pointers in registers are
# not tracked.


FRAME_MAX = 512
"""Maximum size of a program's frame in the kernel (MAX_BPF_STACK)."""

_MODE = 0xE0
_FRAME = Register.R10.value
_LAST = max(register.value for register in Register)

_FETCHING = {operation | Atomic.FETCH for operation in (Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR)}
_ATOMIC = {Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR, Atomic.XCHG, Atomic.CMPXCHG, *_FETCHING}

_CALCULATIONS = {kind | operation | x for kind in (Class.ALU, Class.ALU64) for operation in Alu for x in (0, X)} - {
    kind | Alu.NEG | X for kind in (Class.ALU, Class.ALU64)
}
_PLAIN = (Jump.JA, Jump.CALL, Jump.EXIT, Jump.MAY_GOTO)
_BRANCHES = {
    kind | condition | x
    for kind in (Class.JMP, Class.JMP32)
    for condition in Jump
    if condition not in _PLAIN
    for x in (0, X)
}
_GOES = {*_BRANCHES, Class.JMP | Jump.JA, Class.JMP | Jump.MAY_GOTO}
_LOADS = {Class.LDX | Mode.MEM | size for size in Size}
_STORES = {kind | Mode.MEM | size for kind in (Class.ST, Class.STX) for size in Size}
_ATOMICS = {Class.STX | Mode.ATOMIC | size for size in (Size.W, Size.DW)}
_KNOWN = {*_CALCULATIONS, *_GOES, *_LOADS, *_STORES, *_ATOMICS, CALL, EXIT, WIDE_LOAD}
_WITH_OFFSET = {*_GOES, *_LOADS, *_STORES, *_ATOMICS}
_DATA = (LoadImmediate.NUMBER, LoadImmediate.MAP, LoadImmediate.MAP_VALUE)


@lru_cache(64)
def check_code(assembled: Assembled) -> None:
    """Raise ``NotSupportedError`` for an unknown opcode, a bad register or jump, or an access outside of the frame."""
    if len(assembled.functions) > 1:
        raise NotSupportedError("a handler with functions of its own cannot be translated to machine code")
    code = assembled.code
    starts = set()
    index = 0
    while index < len(code):
        starts.add(index)
        insn = code[index]
        _check_opcode(insn)
        _check_registers(insn)
        _check_frame(code, index)
        if insn.opcode == WIDE_LOAD:
            index += 1
            if index == len(code) or code[index].opcode or code[index].dst or code[index].src or code[index].off:
                raise NotSupportedError("a load of 64 bits lacks its second half")
        index += 1
    for index in starts:
        insn = code[index]
        if insn.opcode in _GOES and index + 1 + insn.off not in starts:
            raise NotSupportedError(f"the eBPF instruction {index} goes to {index + 1 + insn.off}, where none begins")
    if not code or code[-1].opcode not in (EXIT, Class.JMP | Jump.JA):
        raise NotSupportedError("the eBPF code runs off its end")


def _check_opcode(insn: Insn) -> None:
    if insn.opcode not in _KNOWN or (insn.off and insn.opcode not in _WITH_OFFSET):
        with_offset = f" with the offset {insn.off}" if insn.off else ""
        raise NotSupportedError(f"there is no machine code for the eBPF opcode {insn.opcode:#04x}{with_offset}")
    if insn.opcode in _ATOMICS and insn.imm not in _ATOMIC:
        raise NotSupportedError(f"there is no machine code for the atomic operation {insn.imm:#04x}")
    if insn.opcode == WIDE_LOAD and insn.src not in _DATA:
        raise NotSupportedError("there is no machine code for the address of a function")
    if insn.opcode == CALL:
        if insn.src != CallKind.HELPER:
            raise NotSupportedError("there is no machine code for calls of kernel functions")
        if insn.imm not in Helper.__members__.values():
            raise NotSupportedError(f"there is no routine for helper {insn.imm} of the kernel")


def _check_registers(insn: Insn) -> None:
    kind = insn.kind
    if insn.dst > _LAST or (insn.src > _LAST):
        raise NotSupportedError(f"there is no eBPF register {max(insn.dst, insn.src)}")
    writes = kind in (Class.ALU, Class.ALU64, Class.LDX) or insn.opcode == WIDE_LOAD
    changes = {insn.dst} if writes else set()
    if insn.opcode in _ATOMICS and insn.imm & Atomic.FETCH and insn.imm != Atomic.CMPXCHG:
        changes = {insn.src}
    if _FRAME in changes:
        raise NotSupportedError("eBPF code may not change R10")


def _check_frame(code: tuple[Insn, ...], index: int) -> None:
    """
    Raise ``NotSupportedError`` for an access outside of the frame.

    The access is through R10, or through a copy of R10 to which the next instruction adds a number.
    """
    insn = code[index]
    kind = insn.kind
    if (kind == Class.LDX and insn.src == _FRAME) or (kind in (Class.ST, Class.STX) and insn.dst == _FRAME):
        size = insn.size
        if not -FRAME_MAX <= insn.off <= -size:
            raise NotSupportedError(f"eBPF code has no frame at R10{insn.off:+d}")
    elif insn.opcode == Class.ALU64 | Alu.MOV | X and insn.src == _FRAME and index + 1 < len(code):
        following = code[index + 1]
        is_moved = following.opcode == Class.ALU64 | Alu.ADD and following.dst == insn.dst
        if is_moved and not -FRAME_MAX <= following.imm <= 0:
            raise NotSupportedError(f"eBPF code has no frame at R10{following.imm:+d}")


# The size of the stack frame that the code of a handler uses, below R10.


_COPY, _ADDITION, _MAY_GOTO = Class.ALU64 | Alu.MOV | X, Class.ALU64 | Alu.ADD, Class.JMP | Jump.MAY_GOTO
_BUDGET_SIZE, _ALIGNMENT = 8, 16


def uses_budget(code: tuple[Insn, ...]) -> bool:
    """Return whether code uses MAY_GOTO, whose count of iterations needs a word of the frame."""
    return any(insn.opcode == _MAY_GOTO for insn in code)


def budget_place(code: tuple[Insn, ...]) -> int:
    """Return the offset from R10, in bytes, of the word with the number of iterations left for MAY_GOTO; negative."""
    return -_depth(code) - _BUDGET_SIZE


def frame_size(assembled: Assembled) -> int:
    """Return the size in bytes of the frame that a handler needs below R10: a multiple of 16."""
    code = assembled.code
    return -(-(_depth(code) + (_BUDGET_SIZE if uses_budget(code) else 0)) // _ALIGNMENT) * _ALIGNMENT


def _depth(code: tuple[Insn, ...]) -> int:
    """
    Return the number of bytes below R10 that code accesses, without the word of MAY_GOTO.

    512, the maximum, if the code calculates with a pointer into the frame that is not tracked.
    """
    frame = Register.R10.value
    lowest = 0
    for index, insn in enumerate(code):
        if frame not in (insn.src, insn.dst):
            continue
        kind = insn.kind
        if (kind == Class.LDX and insn.src == frame) or (kind in (Class.ST, Class.STX) and insn.dst == frame):
            lowest = min(lowest, insn.off)
        elif insn.src == frame and insn.opcode == _COPY:
            following = code[index + 1]
            if following.opcode != _ADDITION or following.dst != insn.dst:
                return FRAME_MAX
            lowest = min(lowest, following.imm)
        elif insn.src == frame and insn.has_register and kind in (Class.ALU64, Class.ALU):
            return FRAME_MAX
    return -lowest


# Dead code: calculations and loads whose results are not read on any path.
#
# The kernel needs them, for arguments of helpers that the routines here ignore, and for the BPF program's return value.
# A register of the probed program that the code does not use need not be saved.


_SETTING = (Class.ALU, Class.ALU64, Class.LDX)
_NONE = 0
_FIRST_ARGUMENT = 0b10
_CALLED = 0b11_1111
"""The registers that a call changes: R0 to R5, as bits."""

_ARGUMENTS = {
    Helper.MAP_LOOKUP_ELEM: 2,
    Helper.MAP_DELETE_ELEM: 2,
    Helper.KTIME_GET_NS: 0,
    Helper.GET_SMP_PROCESSOR_ID: 0,
    Helper.GET_CURRENT_PID_TGID: 0,
    Helper.GET_CURRENT_UID_GID: 0,
    Helper.GET_CURRENT_COMM: 1,
    Helper.GET_CURRENT_TASK: 1,
    Helper.SEND_SIGNAL: 1,
    Helper.PROBE_READ_USER: 3,
    Helper.PROBE_READ_USER_STR: 3,
    Helper.PROBE_WRITE_USER: 3,
    Helper.RINGBUF_OUTPUT: 3,
}
"""The number of arguments that each of these routines reads; other routines may read five."""


@lru_cache(64)  # the probepoints of a definition have the same code, at different addresses
def trimmed(assembled: Assembled) -> Assembled:
    """
    Return a handler without its dead code; the return value of the handler counts as unused.

    ``check_code`` must have accepted the handler.
    """
    code = assembled.code
    live = _live(code)
    dropped = {index for index, insn in _instructions(code) if _is_pure(insn) and not live[index] >> insn.dst & 1}
    dropped |= {index + 1 for index in dropped if code[index].opcode == WIDE_LOAD}
    return _without(assembled, dropped) if dropped else assembled


def is_first_argument_used(code: tuple[Insn, ...]) -> bool:
    """Return whether code reads the initial value of R1, other than for a dead instruction at its start."""
    looked_at, changed = _effect(code[0])
    behind = _live(code)[0]
    is_needed = not _is_pure(code[0]) or behind >> code[0].dst & 1
    return bool((behind & ~changed | (looked_at if is_needed else _NONE)) & _FIRST_ARGUMENT)


def _instructions(code: tuple[Insn, ...]) -> Iterator[tuple[int, Insn]]:
    """Iterate over instructions with their indices; the second half of a WIDE_LOAD is skipped."""
    index = 0
    while index < len(code):
        yield index, code[index]
        index += 2 if code[index].opcode == WIDE_LOAD else 1


def _is_pure(insn: Insn) -> bool:
    """Return whether an instruction has no effect but to set its destination register."""
    return insn.kind in _SETTING or insn.opcode == WIDE_LOAD


def _live(code: tuple[Insn, ...]) -> list[int]:
    """Return for each instruction the live registers after it, as a bit mask by their numbers."""
    before, behind = [_NONE] * (len(code) + 1), [_NONE] * len(code)
    order = [
        (
            index,
            len(code) if insn.opcode in (EXIT, Class.JMP | Jump.JA) else index + (2 if insn.opcode == WIDE_LOAD else 1),
            index + 1 + insn.off if _goes(insn) else len(code),
            *_effect(insn),
            1 << insn.dst if _is_pure(insn) else _NONE,
        )
        for index, insn in _instructions(code)
    ]
    order.reverse()
    is_stable = False
    while not is_stable:
        is_stable = True
        for index, following, target, looked_at, changed, wanted in order:
            live = behind[index] = before[following] | before[target]
            if not wanted or live & wanted:
                live = live & ~changed | looked_at
            if live != before[index]:
                before[index] = live
                is_stable = False
    return behind


def _goes(insn: Insn) -> bool:
    return insn.kind in (Class.JMP, Class.JMP32) and insn.opcode not in (CALL, EXIT)


def _effect(insn: Insn) -> tuple[int, int]:
    """Return bit masks of the registers that an instruction reads, and of those that it certainly overwrites."""
    dst, src = 1 << insn.dst, 1 << insn.src
    kind = insn.kind
    if insn.opcode == CALL:
        count = _ARGUMENTS.get(Helper(insn.imm), 5)
        return (1 << count + 1) - 2, _CALLED
    if insn.opcode == WIDE_LOAD:
        return _NONE, dst
    if kind == Class.LDX:
        return src, dst
    if kind in (Class.ALU, Class.ALU64):
        operand = src if insn.has_register else _NONE
        return operand | (_NONE if insn.operation == Alu.MOV else dst), dst
    if kind == Class.ST:
        return dst, _NONE
    if kind == Class.STX and insn.opcode & _MODE == Mode.ATOMIC:
        looks_at = dst | src | (1 if insn.imm == Atomic.CMPXCHG else _NONE)
        return looks_at, _NONE  # each register that it changes is also one that it reads
    if kind == Class.STX:
        return dst | src, _NONE
    if insn.opcode in (EXIT, Class.JMP | Jump.JA, Class.JMP | Jump.MAY_GOTO):
        return _NONE, _NONE
    return dst | (src if insn.has_register else _NONE), _NONE


def _without(assembled: Assembled, dropped: set[int]) -> Assembled:
    code = assembled.code
    places, count = [], 0
    for index in range(len(code) + 1):
        places.append(count)
        count += index not in dropped
    halves = {index + 1 for index, insn in _instructions(code) if insn.opcode == WIDE_LOAD}
    kept = []
    for index, insn in enumerate(code):
        if index in dropped:
            continue
        is_going = index not in halves and _goes(insn)
        distance = places[index + 1 + insn.off] - places[index] - 1 if is_going else insn.off
        kept.append(insn._replace(off=distance))
    return Assembled(
        tuple(kept),
        tuple(
            MapReference(places[reference.index], reference.map, reference.is_value)
            for reference in assembled.maps
            if reference.index not in dropped
        ),
        tuple(origin for index, origin in enumerate(assembled.origins) if index not in dropped),
        assembled.functions,
    )


# The footprint of a handler's code: eBPF registers, and the registers of the hit that it reads and writes.


CONTEXT_WORDS = range(0, 168, 8)
"""Offsets in bytes of the words of ``struct pt_regs`` of x86-64."""

_MOVE = Class.ALU64 | Alu.MOV | X


class Footprint(NamedTuple):
    """
    The numbers of the eBPF registers that code uses, and the offsets of the context's words that it reads and writes.

    ``calls`` is true if the code calls helpers, which may change R0 to R5.
    """

    registers: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    calls: bool


@lru_cache(64)
def footprint(assembled: Assembled, context: range = CONTEXT_WORDS) -> Footprint:
    """
    Return the footprint of code whose context has words at the offsets ``context``.

    If the address of the context may be stored, copied or passed to a helper, all words count as read and written.
    """
    code = assembled.code
    contexts = {Register.R1.value} if is_first_argument_used(code) else set()
    used = 0b1
    reads: set[int] = set()
    writes: set[int] = set()
    escapes = calls = False
    knows_first = bool(contexts)
    for index, insn in enumerate(code):
        kind = insn.kind
        looked_at, changed = _effect(insn)
        used |= looked_at | changed
        if insn.opcode == CALL:
            calls = True
            escapes |= knows_first  # the context may be an argument
            continue
        if not index and insn.opcode == _MOVE and (insn.dst, insn.src) == (Register.R6.value, Register.R1.value):
            contexts, knows_first = {Register.R6.value}, False
            continue
        if kind == Class.LDX and insn.src in contexts:
            reads |= _words(insn)
        elif kind in (Class.ST, Class.STX) and insn.dst in contexts:
            writes |= _words(insn)
            is_whole = insn.opcode == kind | Mode.MEM | Size.DW and not insn.off & 7
            if not is_whole:
                reads |= _words(insn)
            escapes |= kind == Class.STX and insn.src in contexts
        elif kind == Class.STX:
            escapes |= insn.src in contexts
        elif kind in (Class.ALU64, Class.ALU):
            escapes |= insn.dst in contexts or (insn.has_register and insn.src in contexts)
        elif kind == Class.LDX or insn.opcode == WIDE_LOAD:
            escapes |= insn.dst in contexts
    registers = frozenset(number for number in range(_LAST + 1) if used >> number & 1)
    words = set(context)
    if escapes:
        reads |= words
        writes |= words
    return Footprint(registers, frozenset(reads & words), frozenset(writes & words), calls)


def _words(insn: Insn) -> set[int]:
    """Return the offsets of the words of the handler's context, one or two, that an access to memory touches."""
    size = insn.size
    return {insn.off & ~7, insn.off + size - 1 & ~7}
