"""The semantics of eBPF instructions (RFC 9669) in Python, and comparisons of a translation of all forms with it."""

from __future__ import annotations

import ctypes
import mmap
from random import Random
from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.bpf_instructions import Alu, Atomic, Class, Insn, Jump, Mode, Size, X

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["REGISTERS", "check_atomics", "check_calculations", "check_comparisons"]

REGISTERS = range(10)
"""The eBPF registers that a translated sequence of instructions may change."""


class MakePieces(Protocol):
    """A function that translates sequences of eBPF instructions to functions."""

    def __call__(
        self, codes: Sequence[Sequence[Insn]], *memory: tuple[int, int]
    ) -> list[Callable[[Sequence[int]], list[int]]]:
        """
        Return a function for each sequence, from the initial to the final values of R0 to R9.

        ``memory`` are start address and size of pages that the code may access.
        """
        ...


OFFSET = 8
EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 32, (1 << 63) - 1, 1 << 63)
NUMBERS = (0, 1, -1, 3, 31, 32, 63, 64, 127, 128, -128, -129, 0x7FFF_FFFF, -0x8000_0000)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def calculated(operation: Alu, first: int, second: int, bits: int) -> int:
    """Return the result of an arithmetic operation on numbers of ``bits`` bits."""
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
    """Iterate over all arithmetic instructions, of 64 bits if ``wide``, with all registers and immediates."""
    kind = Class.ALU64 if wide else Class.ALU
    for operation in Alu:
        for dst in REGISTERS:
            for number in NUMBERS:
                if operation is not Alu.NEG or not number:
                    yield Insn(kind | operation, dst, imm=number)
            if operation is not Alu.NEG:
                for src in REGISTERS:
                    yield Insn(kind | operation | X, dst, src)


def holds(condition: Jump, first: int, second: int, bits: int) -> bool:
    """Return whether a jump with this condition is taken for two numbers of ``bits`` bits."""
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


PLAIN = (Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR)
OPERATIONS = (*PLAIN, *(operation | Atomic.FETCH for operation in PLAIN), Atomic.XCHG, Atomic.CMPXCHG)


def changed(operation: int, old: int, operand: int, result: int, bits: int) -> int:
    """Return the new value of memory after an atomic operation on ``old``; ``result`` is R0."""
    mask = (1 << bits) - 1
    match operation & ~Atomic.FETCH if operation not in (Atomic.XCHG, Atomic.CMPXCHG) else operation:
        case Atomic.ADD:
            new = old + operand
        case Atomic.OR:
            new = old | operand
        case Atomic.AND:
            new = old & operand
        case Atomic.XOR:
            new = old ^ operand
        case Atomic.XCHG:
            new = operand
        case _:
            new = operand if old == result & mask else old
    return new & mask


def check_calculations(make: MakePieces, *, wide: bool) -> None:
    """Compare all arithmetic instructions of 64 (``wide``) or 32 bits, translated by ``make``, with the model."""
    random = Random(1)
    insns = list(operations(wide=wide))
    for insn, run in zip(insns, make([[insn] for insn in insns]), strict=True):
        for _ in range(6):
            before = [random_value(random) for _ in REGISTERS]
            after = run(before)
            second = before[insn.src] if insn.opcode & X else insn.imm & (1 << 64) - 1
            expected = list(before)
            expected[insn.dst] = calculated(Alu(insn.opcode & 0xF0), before[insn.dst], second, 64 if wide else 32)
            assert after == expected, f"{insn} on {before}"


def check_comparisons(make: MakePieces, *, wide: bool) -> None:
    """
    Compare all conditional jumps of 64 (``wide``) or 32 bits, translated by ``make``, with the model.

    A jump that is taken leaves R9 unchanged.
    """
    random = Random(2)
    kind = Class.JMP if wide else Class.JMP32
    conditions = [each for each in Jump if each not in (Jump.JA, Jump.CALL, Jump.EXIT, Jump.MAY_GOTO)]
    jumps = [
        Insn(kind | condition | X, dst, src, 1) for condition in conditions for dst in range(9) for src in range(9)
    ]
    jumps += [Insn(kind | condition, dst, 0, 1, n) for condition in conditions for dst in range(9) for n in NUMBERS]
    for insn, run in zip(jumps, make([[insn, Insn(0xB7, 9, imm=77)] for insn in jumps]), strict=True):
        for _ in range(6):
            before = [random_value(random) for _ in REGISTERS]
            if random.random() < 0.3:
                before[insn.src] = before[insn.dst]
            after = run(before)
            second = before[insn.src] if insn.opcode & X else insn.imm & (1 << 64) - 1
            taken = holds(Jump(insn.opcode & 0xF0), before[insn.dst], second, 64 if wide else 32)
            assert after == [*before[:9], before[9] if taken else 77], f"{insn} on {before}"


def check_atomics(make: MakePieces, size: Size) -> None:
    """Compare all atomic operations on ``size``, translated by ``make``, with the model."""
    random = Random(3)
    bits = 8 * size.bytes
    insns = [
        Insn(Class.STX | Mode.ATOMIC | size, base, src, OFFSET, operation)
        for operation in OPERATIONS
        for base in REGISTERS
        for src in REGISTERS
    ]
    page = mmap.mmap(-1, mmap.PAGESIZE)
    memory = (ctypes.c_uint64 * 4).from_buffer(page)
    address = ctypes.addressof(memory)
    for insn, run in zip(insns, make([[insn] for insn in insns], (address, mmap.PAGESIZE)), strict=True):
        for _ in range(6):
            before = [random.getrandbits(64) for _ in REGISTERS]
            before[insn.dst] = address
            words = [random.getrandbits(64) for _ in memory]
            if random.random() < 0.5:
                words[1] = words[1] >> bits << bits | before[0] & (1 << bits) - 1
            for n, word in enumerate(words):
                memory[n] = word
            after = run(before)
            old = words[1] & (1 << bits) - 1
            new = changed(insn.imm, old, before[insn.src], before[0], bits)
            expected = list(before)
            if insn.imm == Atomic.CMPXCHG:
                expected[0] = old
            elif insn.imm & Atomic.FETCH:
                expected[insn.src] = old
            assert after == expected, insn
            assert list(memory) == [words[0], words[1] >> bits << bits | new, *words[2:]], insn
