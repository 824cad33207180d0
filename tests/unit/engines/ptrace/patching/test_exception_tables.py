"""The code that registers exception tables: where it jumps, and which registers it leaves as they were."""

from __future__ import annotations

import ctypes
import mmap
import platform

import pytest
from iced_x86 import Decoder, FlowControl, Instruction, Mnemonic, Register

from dprobes.engines.ptrace.patching.exception_tables import registration_code

ADDRESS, TABLES, REGISTER, STATE, TARGET = (
    0x7F0000001C00,
    0x7F0000005030,
    0x7F1234567890,
    0x7F0000007000,
    0x7F0000003100,
)


def instructions() -> list[Instruction]:
    return list(Decoder(64, registration_code(ADDRESS, TABLES, REGISTER, STATE, TARGET), ip=ADDRESS))


def test_the_code_fits_before_the_object() -> None:
    assert len(registration_code(ADDRESS, TABLES, REGISTER, STATE, TARGET)) <= 1024


def test_registered_tables_cost_a_comparison_and_two_jumps() -> None:
    first, second, third = instructions()[:3]
    assert first.mnemonic == Mnemonic.CMP
    assert first.ip_rel_memory_address == STATE
    assert second.flow_control == FlowControl.CONDITIONAL_BRANCH
    assert (third.flow_control, third.near_branch_target) == (FlowControl.UNCONDITIONAL_BRANCH, TARGET)


def test_the_slow_way_pops_what_it_has_pushed() -> None:
    pushed = [each.op0_register for each in instructions() if each.mnemonic == Mnemonic.PUSH]
    popped = [each.op0_register for each in instructions() if each.mnemonic == Mnemonic.POP]
    assert pushed == popped[::-1]
    arguments = {
        Register.RDI,
        Register.RSI,
        Register.RDX,
        Register.RCX,
        Register.R8,
        Register.R9,
        Register.RAX,
        Register.R10,
    }
    assert arguments <= set(pushed)
    last = instructions()[-1]
    assert (last.flow_control, last.near_branch_target) == (FlowControl.UNCONDITIONAL_BRANCH, TARGET)


def test_the_tables_are_the_argument_of_the_only_call() -> None:
    code = instructions()
    (call,) = [number for number, each in enumerate(code) if each.flow_control == FlowControl.INDIRECT_CALL]
    before = {each.op0_register: each.immediate(1) for each in code[call - 2 : call]}
    assert before == {Register.RDI: TABLES, Register.RAX: REGISTER}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the code is for x86-64")
@pytest.mark.parametrize("state", [0, 0x7F1122334400], ids=["nobody", "a thread that is gone"])
def test_the_tables_are_registered_once_also_after_a_fork_during_the_registration(state: int) -> None:
    """In the child of a fork, the state may be the pointer of a thread that only the parent has."""
    registered: list[int] = []
    register = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(registered.append)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    word, target = base + mmap.PAGESIZE, base + 2048
    function = ctypes.cast(register, ctypes.c_void_p).value
    assert function is not None
    code = registration_code(base, TABLES, function, word, target)
    memory[: len(code)] = code
    memory[2048:2052] = b"\x48\x8d\x47\x01"  # lea rax, [rdi + 1]
    memory[2052] = 0xC3
    memory[mmap.PAGESIZE : mmap.PAGESIZE + 8] = state.to_bytes(8, "little")
    patched = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(base)
    assert [patched(number) for number in range(3)] == [1, 2, 3]
    assert registered == [TABLES]
    assert int.from_bytes(memory[mmap.PAGESIZE : mmap.PAGESIZE + 8], "little") == 1
