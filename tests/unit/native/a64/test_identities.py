"""Who hits a probe, and when, as the process itself knows it, with as few system calls as can be."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from a64_processor import CPU, A64Processor
from dprobes.bpf.asm.assembler import Assembled
from dprobes.bpf.asm.insn import Insn
from dprobes.bpf.asm.isa import Class, Helper, Jump
from dprobes.native.a64.assembler import A64Assembler
from dprobes.native.a64.identities import write_clock, write_ids, write_name, write_signal, write_user
from dprobes.native.a64.registers import RESULT
from dprobes.native.a64.routine import write_function
from dprobes.native.code import Surroundings
from dprobes.native.processpage import CLOCK, PROCESS_PID

if TYPE_CHECKING:
    from collections.abc import Callable

CODE, PAGE_OF_PROCESS, THREAD, BUFFER = 0x40_0000, 0x50_0000, 0x60_0000, 0x70_0000
GETPID, GETTID, CLOCK_GETTIME, GETCPU = 172, 178, 113, 168


def processor_with(write: Callable[[A64Assembler], object]) -> A64Processor:
    asm = A64Assembler(CODE)
    write(asm)
    made = A64Processor([])
    made.put(CODE, asm.assemble())
    for address in (PAGE_OF_PROCESS, THREAD, BUFFER):
        made.map(address, 4096)
    made.thread_pointer = THREAD + 2048
    return made


def result_of(processor: A64Processor, *arguments: int) -> int:
    processor.call(CODE, *arguments)
    return processor.registers()[RESULT]


def test_the_process_is_asked_for_once() -> None:
    processor = processor_with(lambda asm: write_ids(asm, PAGE_OF_PROCESS, None))
    expected = os.getpid() << 32 | threading.get_native_id()
    assert result_of(processor) == expected
    assert processor.read(PAGE_OF_PROCESS + PROCESS_PID, 4) == os.getpid().to_bytes(4, "little")
    assert result_of(processor) == expected
    assert processor.calls == [GETPID, GETTID, GETTID]


@pytest.mark.parametrize("place", [-0x450, 0x2D0])
def test_no_system_call_where_the_c_library_has_the_thread_id(place: int) -> None:
    processor = processor_with(lambda asm: write_ids(asm, PAGE_OF_PROCESS, place))
    processor.write(PAGE_OF_PROCESS, (77).to_bytes(4, "little"))
    processor.write(processor.thread_pointer + place, (78).to_bytes(4, "little") + b"\xff" * 4)
    assert result_of(processor) == 77 << 32 | 78
    assert processor.calls == []


def test_user_name_and_signal() -> None:
    assert result_of(processor_with(write_user)) == os.getgid() << 32 | os.getuid()
    processor = processor_with(write_name)
    assert result_of(processor, BUFFER, 16) == 0
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_bytes().rstrip(b"\n")
    assert processor.read(BUFFER, 17) == name.ljust(17, b"\0")
    processor = processor_with(write_signal)
    assert result_of(processor, 10) == 0
    assert processor.signals == [10]


@pytest.mark.parametrize("rate", [1 << 32, 1 << 20, 41 << 32, (1 << 32) - 1])
def test_the_clock(rate: int) -> None:
    """The counter stands still between two calls of an emulated processor, or goes on a little."""
    processor = processor_with(lambda asm: write_clock(asm, PAGE_OF_PROCESS))
    processor.write(PAGE_OF_PROCESS, CLOCK.pack(0, 0, 0, 1 << 32))
    before = result_of(processor)
    base = before + 12345  # the counter is below it: the difference is negative
    processor.write(PAGE_OF_PROCESS, CLOCK.pack(2, base, 5_000_000_000_000_000, rate))
    found = result_of(processor)
    processor.write(PAGE_OF_PROCESS, CLOCK.pack(0, 0, 0, 1 << 32))
    after = result_of(processor)
    least, most = (5_000_000_000_000_000 + ((count - base) * rate >> 32) for count in (before, after))
    assert least <= found <= most
    assert processor.calls == []


def test_the_kernel_is_asked_while_somebody_changes_the_clock() -> None:
    processor = processor_with(lambda asm: write_clock(asm, PAGE_OF_PROCESS))
    processor.write(PAGE_OF_PROCESS, CLOCK.pack(1, 0, 0, 0))
    before = time.monotonic_ns()
    assert before <= result_of(processor) <= time.monotonic_ns()
    assert processor.calls == [CLOCK_GETTIME]


def test_the_cpu() -> None:
    code = (Insn(Class.JMP | Jump.CALL, 0, 0, 0, Helper.GET_SMP_PROCESSOR_ID), Insn(Class.JMP | Jump.EXIT))
    assembled = Assembled(code, (), (-1, -1), (0,))

    def write(asm: A64Assembler, place: int | None) -> None:
        write_function(asm, assembled, Surroundings({}, {}, {}, cpu_place=place), is_shared=False)

    processor = processor_with(lambda asm: write(asm, None))
    arguments = (11, 22, 33, 44, 55)
    assert result_of(processor, *arguments) == CPU
    assert processor.registers()[: len(arguments)] == list(arguments)
    assert processor.calls == [GETCPU]
    processor = processor_with(lambda asm: write(asm, 0x40))
    processor.write(processor.thread_pointer + 0x40, (3).to_bytes(4, "little"))
    assert result_of(processor) == 3
    assert processor.calls == []
