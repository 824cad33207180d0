"""Atomic operations do what RFC 9669 says, with all registers, and let no other thread's change be lost."""

from __future__ import annotations

import ctypes
import threading

import pytest

from dprobes.bpf.bpf_instructions import Atomic, Class, Insn, Jump, Mode, Size
from support.ebpf_model import check_atomics
from support.ebpf_pieces import pieces

SIZES = pytest.mark.parametrize("size", [Size.W, Size.DW])


@SIZES
def test_operations(size: Size) -> None:
    check_atomics(pieces, size)


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
