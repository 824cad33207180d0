"""Atomic operations do what RFC 9669 says, with all registers, and let no other thread's change be lost."""

from __future__ import annotations

import ctypes
import threading
from random import Random

import pytest

from dprobes.bpf.asm.insn import Insn
from dprobes.bpf.asm.isa import Atomic, Class, Jump, Mode, Size
from ebpf_pieces import REGISTERS, pieces

PLAIN = (Atomic.ADD, Atomic.OR, Atomic.AND, Atomic.XOR)
OPERATIONS = (*PLAIN, *(operation | Atomic.FETCH for operation in PLAIN), Atomic.XCHG, Atomic.CMPXCHG)
SIZES = pytest.mark.parametrize("size", [Size.W, Size.DW])
OFFSET = 8


def changed(operation: int, old: int, operand: int, result: int, bits: int) -> int:
    """Return what memory holds afterwards; ``result`` is R0."""
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


@SIZES
def test_operations(size: Size) -> None:
    random = Random(3)
    bits = 8 * size.bytes
    insns = [
        Insn(Class.STX | Mode.ATOMIC | size, base, src, OFFSET, operation)
        for operation in OPERATIONS
        for base in REGISTERS
        for src in REGISTERS
    ]
    memory = (ctypes.c_uint64 * 4)()
    address = ctypes.addressof(memory)
    for insn, run in zip(insns, pieces([[insn] for insn in insns]), strict=True):
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


@SIZES
def test_nothing_that_several_threads_do_is_lost(size: Size) -> None:
    """Each thread flips bits of its own, and adds to the upper half."""
    passes, threads = 20_000, 4
    memory = (ctypes.c_uint64 * 4)()
    kind = Class.STX | Mode.ATOMIC | size
    loop = [
        Insn(0xBF, 3, 2),
        Insn(kind, 1, 3, 8, Atomic.XOR | Atomic.FETCH),
        Insn(0xBF, 3, 4),
        Insn(kind, 1, 3, 16, Atomic.ADD | Atomic.FETCH),
        Insn(kind, 1, 4, 24, Atomic.ADD),
        Insn(0x17, 5, imm=1),
        Insn(Class.JMP | Jump.JNE, 5, 0, -7, 0),
    ]
    (run,) = pieces([loop])

    def work(number: int) -> None:
        run([0, ctypes.addressof(memory), 1 << number, 0, 1, passes + number % 2, 0, 0, 0, 0])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total = threads * passes + threads // 2
    assert list(memory) == [0, 0b1010, total, total]
