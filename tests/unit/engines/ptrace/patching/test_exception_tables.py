"""The code that registers exception tables: where it jumps, and which registers it leaves as they were."""

from __future__ import annotations

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
