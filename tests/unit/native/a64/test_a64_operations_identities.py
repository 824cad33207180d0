"""Who hits a probe, and when, as the process itself knows it, with as few system calls as can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_assembler import Assembled
from dprobes.bpf.bpf_instructions import Class, Helper, Insn, Jump
from dprobes.native.a64.a64_operations import A64Operations, gpr
from dprobes.native.ebpf_translator import write_function
from dprobes.native.generated_code import Surroundings
from dprobes.native.process_page import (
    CLOCK_READING,
    PROCESS_IS_NESTED,
    PROCESS_PID,
    PROCESS_SIZE,
    THREAD,
    thread_window,
)
from dprobes.native.runtime_routines import write_clock, write_ids, write_signal, write_stack_end
from support.a64_processor import CPU, A64Processor

if TYPE_CHECKING:
    from collections.abc import Callable

CODE, PAGE_OF_PROCESS, THREAD_AREA, BUFFER = 0x40_0000, 0x50_0000, 0x60_0000, 0x70_0000
GETPID, GETTID, CLOCK_GETTIME, GETCPU = 172, 178, 113, 168


def processor_with(write: Callable[[A64Operations], object]) -> A64Processor:
    asm = A64Operations(CODE)
    write(asm)
    made = A64Processor([])
    made.put(CODE, asm.assemble())
    for address, size in ((PAGE_OF_PROCESS, PROCESS_SIZE), (THREAD_AREA, 4096), (BUFFER, 4096)):
        made.map(address, size)
    made.thread_pointer = THREAD_AREA + 2048
    return made


def result_of(processor: A64Processor, *arguments: int) -> int:
    processor.call(CODE, *arguments)
    return processor.registers()[gpr(0)]


def test_without_a_place_of_thread_ids_there_is_the_process_id_alone() -> None:
    processor = processor_with(lambda asm: write_ids(asm, PAGE_OF_PROCESS, None))
    processor.write(PAGE_OF_PROCESS + PROCESS_PID, (77).to_bytes(4, "little"))
    assert result_of(processor) == 77 << 32
    assert processor.calls == []


@pytest.mark.parametrize("place", [-0x450, 0x2D0])
def test_no_system_call_where_the_c_library_has_the_thread_id(place: int) -> None:
    processor = processor_with(lambda asm: write_ids(asm, PAGE_OF_PROCESS, place))
    processor.write(PAGE_OF_PROCESS, (77).to_bytes(4, "little"))
    processor.write(processor.thread_pointer + place, (78).to_bytes(4, "little") + b"\xff" * 4)
    assert result_of(processor) == 77 << 32 | 78
    assert processor.calls == []


@pytest.mark.parametrize("local", [1, 4095, 4096 * 7 + 78, (1 << 22) - 1])
def test_in_a_nested_namespace_the_thread_has_the_id_that_the_page_has_for_it(local: int) -> None:
    processor = processor_with(lambda asm: write_ids(asm, PAGE_OF_PROCESS, 0x10))
    processor.write(PAGE_OF_PROCESS + PROCESS_PID, (77).to_bytes(4, "little"))
    processor.write(processor.thread_pointer + 0x10, local.to_bytes(4, "little") + b"\xff" * 4)
    assert result_of(processor) == 77 << 32 | local
    processor.write(PAGE_OF_PROCESS + PROCESS_IS_NESTED, (1).to_bytes(4, "little"))
    assert result_of(processor) == 77 << 32, "one that is not there has no id"
    window = thread_window(local)
    for place in (window[0], window[-1]):
        for other in window:
            processor.write(PAGE_OF_PROCESS + other, THREAD.pack(local + 1, 5))
        assert result_of(processor) == 77 << 32
        processor.write(PAGE_OF_PROCESS + place, THREAD.pack(local, (1 << 32) - 1))
        assert result_of(processor) == 77 << 32 | (1 << 32) - 1
    assert processor.calls == []


@pytest.mark.parametrize("first_stack", [None, THREAD_AREA - 4096, THREAD_AREA + 8192])
def test_the_end_of_a_stack_is_the_nearest_of_what_is_above(first_stack: int | None) -> None:
    processor = processor_with(lambda asm: write_stack_end(asm, first_stack))
    above = [place for place in (processor.thread_pointer, first_stack) if place is not None]
    start = THREAD_AREA
    for address in (0, start - 5000, start, processor.thread_pointer, start + 4096, start + 9000, (1 << 64) - 1):
        assert result_of(processor, address) == min((place for place in above if place >= address), default=0)


def test_a_signal_is_sent() -> None:
    processor = processor_with(write_signal)
    assert result_of(processor, 10) == 0
    assert processor.signals == [10]


def clock_page(version: int, counter: int, time: int, rate: int) -> bytes:
    """Return a page whose valid reading is this one."""
    other = CLOCK_READING.pack(-1 & 0xFFFF, 7, 7)
    valid = CLOCK_READING.pack(counter, time, rate)
    return version.to_bytes(8, "little") + (other + valid if version & 1 else valid + other)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("rate", [1 << 32, 1 << 20, 41 << 32, (1 << 32) - 1])
def test_the_clock(rate: int, version: int) -> None:
    """The counter stands still between two calls of an emulated processor, or goes on a little."""
    processor = processor_with(lambda asm: write_clock(asm, PAGE_OF_PROCESS))
    processor.write(PAGE_OF_PROCESS, clock_page(0, 0, 0, 1 << 32))
    before = result_of(processor)
    base = before + 12345  # the counter is below it: the difference is negative
    processor.write(PAGE_OF_PROCESS, clock_page(version, base, 5_000_000_000_000_000, rate))
    found = result_of(processor)
    processor.write(PAGE_OF_PROCESS, clock_page(0, 0, 0, 1 << 32))
    after = result_of(processor)
    least, most = (5_000_000_000_000_000 + ((count - base) * rate >> 32) for count in (before, after))
    assert least <= found <= most
    assert processor.calls == []


def test_the_cpu() -> None:
    code = (Insn(Class.JMP | Jump.CALL, 0, 0, 0, Helper.GET_SMP_PROCESSOR_ID), Insn(Class.JMP | Jump.EXIT))
    assembled = Assembled(code, (), (-1, -1), (0,))

    def write(asm: A64Operations, place: int | None) -> None:
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
