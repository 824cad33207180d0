"""Calculations do what RFC 9669 says, with all registers, compared with a model in Python."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.asm.insn import Insn
from dprobes.bpf.asm.isa import Alu, Class, Jump, X
from ebpf_pieces import REGISTERS, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 32, (1 << 63) - 1, 1 << 63)
NUMBERS = (0, 1, -1, 3, 31, 32, 63, 64, 127, 128, -128, -129, 0x7FFF_FFFF, -0x8000_0000)
WIDE = pytest.mark.parametrize("wide", [True, False])


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def calculated(operation: Alu, first: int, second: int, bits: int) -> int:
    """Return what an operation makes of two numbers."""
    mask = (1 << bits) - 1
    first, second = first & mask, second & mask
    count = second & bits - 1
    match operation:
        case Alu.ADD:
            value = first + second
        case Alu.SUB:
            value = first - second
        case Alu.MUL:
            value = first * second
        case Alu.DIV:
            value = first // second if second else 0
        case Alu.MOD:
            value = first % second if second else first
        case Alu.OR:
            value = first | second
        case Alu.AND:
            value = first & second
        case Alu.XOR:
            value = first ^ second
        case Alu.LSH:
            value = first << count
        case Alu.RSH:
            value = first >> count
        case Alu.ARSH:
            value = signed(first, bits) >> count
        case Alu.NEG:
            value = -first
        case Alu.MOV:
            value = second
    return value & mask


def random_value(random: Random) -> int:
    choice = random.choice((*EDGES, None, None, None, None))
    value = random.getrandbits(64) if choice is None else choice
    return (-value if random.random() < 0.3 else value) & (1 << 64) - 1


def operations(*, wide: bool) -> Iterator[Insn]:
    """Iterate over all operations with all pairs of registers, and with numbers."""
    kind = Class.ALU64 if wide else Class.ALU
    for operation in Alu:
        for dst in REGISTERS:
            for number in NUMBERS:
                if operation is not Alu.NEG or not number:
                    yield Insn(kind | operation, dst, imm=number)
            if operation is not Alu.NEG:
                for src in REGISTERS:
                    yield Insn(kind | operation | X, dst, src)


@WIDE
def test_calculations(*, wide: bool) -> None:
    random = Random(1)
    insns = list(operations(wide=wide))
    for insn, run in zip(insns, pieces([[insn] for insn in insns]), strict=True):
        for _ in range(6):
            before = [random_value(random) for _ in REGISTERS]
            after = run(before)
            second = before[insn.src] if insn.opcode & X else insn.imm & (1 << 64) - 1
            expected = list(before)
            expected[insn.dst] = calculated(Alu(insn.opcode & 0xF0), before[insn.dst], second, 64 if wide else 32)
            assert after == expected, f"{insn} on {before}"


def holds(condition: Jump, first: int, second: int, bits: int) -> bool:
    """Return whether two numbers compare so."""
    mask = (1 << bits) - 1
    first, second = first & mask, second & mask
    if condition.name.startswith("JS") and condition is not Jump.JSET:
        first, second = signed(first, bits), signed(second, bits)
    match condition:
        case Jump.JEQ:
            return first == second
        case Jump.JNE:
            return first != second
        case Jump.JSET:
            return bool(first & second)
        case Jump.JGT | Jump.JSGT:
            return first > second
        case Jump.JGE | Jump.JSGE:
            return first >= second
        case Jump.JLT | Jump.JSLT:
            return first < second
        case _:
            return first <= second


@WIDE
def test_comparisons(*, wide: bool) -> None:
    """A jump that is taken leaves R9 as it was."""
    random = Random(2)
    kind = Class.JMP if wide else Class.JMP32
    conditions = [each for each in Jump if each not in (Jump.JA, Jump.CALL, Jump.EXIT, Jump.MAY_GOTO)]
    jumps = [
        Insn(kind | condition | X, dst, src, 1) for condition in conditions for dst in range(9) for src in range(9)
    ]
    jumps += [Insn(kind | condition, dst, 0, 1, n) for condition in conditions for dst in range(9) for n in NUMBERS]
    for insn, run in zip(jumps, pieces([[insn, Insn(0xB7, 9, imm=77)] for insn in jumps]), strict=True):
        for _ in range(6):
            before = [random_value(random) for _ in REGISTERS]
            if random.random() < 0.3:
                before[insn.src] = before[insn.dst]
            after = run(before)
            second = before[insn.src] if insn.opcode & X else insn.imm & (1 << 64) - 1
            taken = holds(Jump(insn.opcode & 0xF0), before[insn.dst], second, 64 if wide else 32)
            assert after == [*before[:9], before[9] if taken else 77], f"{insn} on {before}"
