"""Walks up stacks of a kernel, each of a few words that are written down here."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.gdb.machine.guest_stacks import KernelStacks
from dprobes.engines.gdb.machine.orc_tables import OrcEntry, OrcKind, OrcRegister

if TYPE_CHECKING:
    from dprobes.engines.gdb.stub_registers import Registers

CODE, STACK, OTHER = 0xFFFFFFFF81000000, 0xFFFFC90000004000, 0xFFFFC90000008000
KERNEL, USER = 0x10, 0x33
LEAF = OrcEntry(OrcRegister.SP, 8, OrcRegister.UNDEFINED, 0, OrcKind.CALL)


def words(at: int, *values: int) -> dict[int, int]:
    return {at + 8 * number: value for number, value in enumerate(values)}


def saved(at: int, ip: int, cs: int, sp: int, bp: int) -> dict[int, int]:
    """Return a ``struct pt_regs``."""
    return {at + 32: bp, at + 128: ip, at + 136: cs, at + 152: sp}


def walk(
    memory: dict[int, int], entries: dict[int, OrcEntry], entered: tuple[int, ...] = (), /, **registers: int
) -> list[int]:
    start = {"cs": KERNEL, "rip": CODE, "rsp": STACK, "rbp": 0, **registers}
    stacks = KernelStacks(lambda at, _: memory.get(at), entries.get, entered.__contains__)
    return stacks.stack(cast("Registers", start))


def test_calls_leave_their_return_addresses() -> None:
    """Of a return address the entry is that of the call before it."""
    inner = OrcEntry(OrcRegister.SP, 24, OrcRegister.PREV_SP, -16, OrcKind.CALL)
    outer = OrcEntry(OrcRegister.BP, 16, OrcRegister.PREV_SP, -16, OrcKind.CALL)
    memory = words(STACK, 0, OTHER, CODE + 0x100) | words(OTHER, 0, CODE + 0x200)
    end = OrcEntry(0, 0, 0, 0, OrcKind.END_OF_STACK)
    entries = {CODE: inner, CODE + 0xFF: outer, CODE + 0x1FF: end}
    assert walk(memory, entries) == [CODE, CODE + 0x100, CODE + 0x200]


def test_a_stack_of_its_own_is_left_by_a_pointer_to_the_other_one() -> None:
    inner = OrcEntry(OrcRegister.SP_INDIRECT, 8, OrcRegister.UNDEFINED, 0, OrcKind.CALL)
    assert walk({STACK: OTHER, OTHER: CODE + 0x100}, {CODE: inner}) == [CODE, CODE + 0x100]
    inner = OrcEntry(OrcRegister.BP_INDIRECT, -8, OrcRegister.UNDEFINED, 0, OrcKind.CALL)
    memory = {STACK + 0x20: OTHER + 8, OTHER: CODE + 0x100}
    assert walk(memory, {CODE: inner}, rbp=STACK + 0x28) == [CODE, CODE + 0x100]


@pytest.mark.parametrize(
    ("number", "name"),
    [(OrcRegister.DX, "rdx"), (OrcRegister.DI, "rdi"), (OrcRegister.R10, "r10"), (OrcRegister.R13, "r13")],
)
def test_the_innermost_frame_may_be_found_by_another_register(number: OrcRegister, name: str) -> None:
    entry = OrcEntry(number, 0, OrcRegister.UNDEFINED, 0, OrcKind.CALL)
    memory = {OTHER - 8: CODE + 0x100, OTHER: CODE + 0x200}
    assert walk(memory, {CODE: entry, CODE + 0xFF: entry}, **{name: OTHER}) == [CODE, CODE + 0x100]


@pytest.mark.parametrize("kind", [OrcKind.REGS, OrcKind.REGS_PARTIAL])
def test_what_was_interrupted_is_above_what_interrupts(kind: OrcKind) -> None:
    """Its address is that of the next instruction, which has the entry."""
    at = STACK if kind is OrcKind.REGS else STACK - 128
    memory = saved(at, CODE + 0x50, KERNEL, OTHER, OTHER + 0x100) | {OTHER: CODE + 0x100}
    entries = {CODE: OrcEntry(OrcRegister.SP, 0, OrcRegister.UNDEFINED, 0, kind), CODE + 0x50: LEAF}
    assert walk(memory, entries)[:3] == [CODE, CODE + 0x50, CODE + 0x100]


def test_a_program_that_was_interrupted_is_the_end() -> None:
    entries = {CODE: OrcEntry(OrcRegister.SP, 0, OrcRegister.UNDEFINED, 0, OrcKind.REGS)}
    assert walk(saved(STACK, 0x401000, USER, 0x7FFF0000, 0), entries) == [CODE]


def test_a_program_has_no_stack_in_the_kernel() -> None:
    assert walk({}, {}, cs=USER, rip=0x401000) == []


def test_code_without_entries_has_frame_pointers() -> None:
    memory = words(STACK, OTHER, CODE + 0x100) | words(OTHER, 0, CODE + 0x200)
    assert walk(memory, {}, rbp=STACK) == [CODE, CODE + 0x100, CODE + 0x200]


def test_a_function_that_has_just_begun_has_its_return_address_on_top() -> None:
    memory = words(STACK, CODE + 0x100) | words(OTHER, 0, CODE + 0x200)
    assert walk(memory, {}, (CODE,), rbp=OTHER) == [CODE, CODE + 0x100, CODE + 0x200]


def test_a_stack_that_leads_to_itself_ends() -> None:
    frame = OrcEntry(OrcRegister.BP, 16, OrcRegister.PREV_SP, -16, OrcKind.CALL)
    entries = {CODE: frame, CODE - 1: frame}
    assert walk(words(STACK, STACK, CODE), entries, rbp=STACK) == [CODE, CODE]


def test_what_cannot_be_read_or_is_undefined_is_the_end() -> None:
    assert walk({}, {CODE: LEAF}) == [CODE]
    assert walk({}, {CODE: OrcEntry(0, 0, 0, 0, OrcKind.UNDEFINED)}) == [CODE]
    assert walk({}, {CODE: OrcEntry(OrcRegister.UNDEFINED, 0, 0, 0, OrcKind.CALL)}) == [CODE]
