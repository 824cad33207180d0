"""
Code without what nobody looks at: calculations and loads whose results are not used, on any way.

The kernel needs them: for arguments of helpers that routines here do not have, and for what a program returns. Each
register less is one less to be saved for the probed program.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembled, MapReference
from dprobes.bpf.asm.insn import WIDE_LOAD
from dprobes.bpf.asm.isa import Alu, Atomic, Class, Helper, Jump, Mode, X

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.asm.insn import Insn

__all__ = ["is_first_argument_used", "trimmed"]

_CLASS, _OPERATION, _MODE = 0x07, 0xF0, 0xE0
_CALL, _EXIT, _JUMP = Class.JMP | Jump.CALL, Class.JMP | Jump.EXIT, Class.JMP | Jump.JA
_BRANCHES = (Class.JMP, Class.JMP32)
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
"""How many arguments routines look at; others may look at five."""


@lru_cache(64)  # the probepoints of a definition have the same code, at different addresses
def trimmed(assembled: Assembled) -> Assembled:
    """Return the code of a handler without what is not needed; it is well formed, and nobody looks at its result."""
    code = assembled.code
    live = _live(code)
    dropped = {index for index, insn in _instructions(code) if _is_pure(insn) and not live[index] >> insn.dst & 1}
    dropped |= {index + 1 for index in dropped if code[index].opcode == WIDE_LOAD}
    return _without(assembled, dropped) if dropped else assembled


def is_first_argument_used(code: tuple[Insn, ...]) -> bool:
    """Return whether anybody looks at what R1 is at the beginning."""
    looked_at, changed = _effect(code[0])
    behind = _live(code)[0]
    is_needed = not _is_pure(code[0]) or behind >> code[0].dst & 1
    return bool((behind & ~changed | (looked_at if is_needed else _NONE)) & _FIRST_ARGUMENT)


def _instructions(code: tuple[Insn, ...]) -> Iterator[tuple[int, Insn]]:
    """Iterate over instructions with their places; second halves are none."""
    index = 0
    while index < len(code):
        yield index, code[index]
        index += 2 if code[index].opcode == WIDE_LOAD else 1


def _is_pure(insn: Insn) -> bool:
    """Return whether an instruction does nothing but set its register."""
    return insn.opcode & _CLASS in _SETTING or insn.opcode == WIDE_LOAD


def _live(code: tuple[Insn, ...]) -> list[int]:
    """Return for each instruction the registers, as bits, that somebody looks at behind it."""
    before, behind = [_NONE] * (len(code) + 1), [_NONE] * len(code)
    order = [
        (
            index,
            len(code) if insn.opcode in (_EXIT, _JUMP) else index + (2 if insn.opcode == WIDE_LOAD else 1),
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
    return insn.opcode & _CLASS in _BRANCHES and insn.opcode not in (_CALL, _EXIT)


def _effect(insn: Insn) -> tuple[int, int]:
    """Return the registers, as bits, that an instruction looks at, and those that it changes."""
    dst, src = 1 << insn.dst, 1 << insn.src
    kind = insn.opcode & _CLASS
    if insn.opcode == _CALL:
        count = _ARGUMENTS.get(Helper(insn.imm), 5)
        return (1 << count + 1) - 2, _CALLED
    if insn.opcode == WIDE_LOAD:
        return _NONE, dst
    if kind == Class.LDX:
        return src, dst
    if kind in (Class.ALU, Class.ALU64):
        operand = src if insn.opcode & X else _NONE
        return operand | (_NONE if insn.opcode & _OPERATION == Alu.MOV else dst), dst
    if kind == Class.ST:
        return dst, _NONE
    if kind == Class.STX and insn.opcode & _MODE == Mode.ATOMIC:
        looks_at = dst | src | (1 if insn.imm == Atomic.CMPXCHG else _NONE)
        return looks_at, _NONE  # what it changes, it has looked at
    if kind == Class.STX:
        return dst | src, _NONE
    if insn.opcode in (_EXIT, _JUMP, Class.JMP | Jump.MAY_GOTO):
        return _NONE, _NONE
    return dst | (src if insn.opcode & X else _NONE), _NONE


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
