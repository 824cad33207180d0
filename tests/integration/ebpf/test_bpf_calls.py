"""The thin layer over bpf(2), maps and ring, with programs that the kernel runs."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import STATUS_SIZE, Status
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, HashMap, RingBuffer, wait
from dprobes.platform.linux.bpf_calls import (
    LogLevel,
    Program,
    ProgramFlag,
    ProgramRunner,
    ProgramType,
    enable_statistics,
    load_program,
    lookup_element,
    open_program,
    program_info,
    verifier_log,
)
from integration.ebpf.kernel import insn, load_map, load_value

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")

NO_WAKEUP, FORCE_WAKEUP = 1, 2
RINGBUF_OUTPUT = 130
EXIT = insn(0x95)
RETURN_0 = insn(0xB7) + EXIT


@contextlib.contextmanager
def loaded(instructions: bytes) -> Iterator[int]:
    fd = load_program(Program(ProgramType.SYSCALL, instructions, flags=ProgramFlag.SLEEPABLE, name="test"))
    try:
        yield fd
    finally:
        os.close(fd)


def output_of_context(ring: RingBuffer, flags: int) -> bytes:
    """Write the first 16 bytes of the context to the ring, by way of the stack, and return the helper's result."""
    copy = insn(0x79, 2, 1, 0) + insn(0x7B, 10, 2, -16) + insn(0x79, 2, 1, 8) + insn(0x7B, 10, 2, -8)
    arguments = load_map(1, ring.fd) + insn(0xBF, 2, 10) + insn(0x07, 2, value=-16)
    return (
        copy
        + arguments
        + insn(0xB7, 3, value=16)
        + insn(0xB7, 4, value=flags)
        + insn(0x85, value=RINGBUF_OUTPUT)
        + EXIT
    )


def test_a_program_reads_and_writes_its_context_and_returns_32_bits() -> None:
    code = insn(0x79, 2, 1, 0) + insn(0x07, 2, value=1) + insn(0x7B, 1, 2, 8) + insn(0xB7, 0, value=-7) + EXIT
    context = bytearray(168)
    context[0] = 41
    with loaded(code) as fd:
        runner = ProgramRunner(fd, context)
        assert runner.run() == 2**32 - 7
        assert context[8] == 42
        context[0] = 99
        runner.run()
    assert context[8] == 100


def test_an_array_is_the_same_memory_for_a_program_and_for_us() -> None:
    with ArrayMap(STATUS_SIZE, name="status") as status:
        status.words[1] = 5
        code = load_value(7, status.fd, 8) + insn(0x79, 0, 7) + insn(0xB7, 2, value=-1) + insn(0x7B, 7, 2, 8) + EXIT
        with loaded(code) as fd:
            assert ProgramRunner(fd, bytearray(8)).run() == 5
        assert status.words[2] == 2**64 - 1
        assert status.halves[4] == 2**32 - 1
        assert bytes(status.memory[16:25]) == b"\xff" * 8 + b"\x00"
        assert len(status.memory) == STATUS_SIZE


def test_elements_of_an_array_begin_at_multiples_of_its_stride() -> None:
    with ArrayMap(12, entries=1000) as numbers:
        assert numbers.stride == 16
        key = struct.pack("=I", 999)
        numbers.halves[999 * 4] = 77
        assert lookup_element(numbers.fd, key, 12) == struct.pack("=III", 77, 0, 0)


def test_a_hash_holds_what_it_is_given() -> None:
    with HashMap(4, 4, 8, "scope") as scope:
        scope[b"aaaa"] = b"1111"
        scope[b"bbbb"] = b"2222"
        scope[b"aaaa"] = b"3333"
        assert scope[b"aaaa"] == b"3333"
        assert sorted(scope) == [b"aaaa", b"bbbb"]
        assert scope.discard(b"bbbb")
        assert not scope.discard(b"bbbb")
        assert b"bbbb" not in scope
        with pytest.raises(KeyError):
            scope[b"bbbb"]


def test_a_full_hash_says_so() -> None:
    with HashMap(4, 4, 2) as small:
        small[b"aaaa"] = small[b"bbbb"] = b"0000"
        with pytest.raises(OSError, match=r"^\[Errno 7\] bpf MAP_UPDATE_ELEM: Argument list too long$"):
            small[b"cccc"] = b"0000"


def test_a_refused_map_names_the_command() -> None:
    with pytest.raises(OSError, match=r"^\[Errno 22\] bpf MAP_CREATE: Invalid argument$"):
        RingBuffer(3000)


def test_entries_come_out_of_the_ring_as_they_were_written() -> None:
    context = bytearray(16)
    with RingBuffer(mmap.PAGESIZE) as ring, loaded(output_of_context(ring, NO_WAKEUP)) as fd:
        runner = ProgramRunner(fd, context)
        expected = []
        # More than the ring holds, so that entries of 24 bytes wrap around at all their places.
        for number in range(3 * mmap.PAGESIZE // 24 + 5):
            struct.pack_into("=QQ", context, 0, number, ~number % 2**64)
            assert runner.run() == 0
            expected.append(bytes(context))
            if number % 100 == 99:
                assert ring.drain() == expected
                expected.clear()
        window = ring.window()
        assert len(window) == 24 * len(expected)
        assert bytes(window[8:24]) == expected[0]
        window.release()
        assert ring.drain() == expected


def test_a_full_ring_refuses_an_entry_and_takes_the_next_one_after_a_read() -> None:
    with RingBuffer(mmap.PAGESIZE) as ring, loaded(output_of_context(ring, NO_WAKEUP)) as fd:
        runner = ProgramRunner(fd, bytearray(16))
        results = [runner.run() for _ in range(mmap.PAGESIZE // 24 + 3)]
        written = results.index(2**32 - errno.EAGAIN)
        assert set(results[written:]) == {2**32 - errno.EAGAIN}
        assert ring.drain() == [bytes(16)] * written
        assert runner.run() == 0
        assert ring.drain() == [bytes(16)]


@pytest.mark.parametrize("flags", [NO_WAKEUP, FORCE_WAKEUP])
def test_waiting_ends_with_an_entry_whether_or_not_it_wakes(flags: int) -> None:
    with (
        ArrayMap(STATUS_SIZE) as status,
        RingBuffer(mmap.PAGESIZE) as ring,
        loaded(output_of_context(ring, flags)) as fd,
    ):
        runner = ProgramRunner(fd, bytearray(16))
        waiting = status.words

        def write_when_waited_for() -> None:
            while waiting[Status.WAITING // 8] == 0:
                pass
            runner.run()

        writer = threading.Thread(target=write_when_waited_for)
        writer.start()
        assert wait(ring, waiting, 60)
        writer.join()
        assert waiting[Status.WAITING // 8] == 0
        assert len(ring.drain()) == 1


def test_waiting_ends_at_once_when_there_is_an_entry_already_and_in_time_when_there_is_none() -> None:
    with (
        ArrayMap(STATUS_SIZE) as status,
        RingBuffer(mmap.PAGESIZE) as ring,
        loaded(output_of_context(ring, NO_WAKEUP)) as fd,
    ):
        ProgramRunner(fd, bytearray(16)).run()
        assert wait(ring, status.words, 60)
        ring.drain()
        assert not wait(ring, status.words, 0.03)


def test_waiting_ends_when_another_descriptor_can_be_read() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x")
        with ArrayMap(STATUS_SIZE) as status, RingBuffer(mmap.PAGESIZE) as ring:
            assert not wait(ring, status.words, 60, (reading,))
    finally:
        os.close(reading)
        os.close(writing)


def test_the_verifier_says_why_it_refuses_a_program() -> None:
    program = Program(ProgramType.SYSCALL, insn(0xBF, 0, 5) + EXIT, flags=ProgramFlag.SLEEPABLE)
    with pytest.raises(OSError, match=r"^\[Errno 13\] bpf PROG_LOAD: Permission denied$"):
        load_program(program)
    assert "R5 !read_ok" in verifier_log(program)
    taken = Program(ProgramType.SYSCALL, RETURN_0, flags=ProgramFlag.SLEEPABLE)
    assert verifier_log(taken, LogLevel.STATS).startswith("verification time")


def test_a_long_verifier_log_is_read_whole() -> None:
    long = Program(ProgramType.SYSCALL, insn(0xB7, 1) * 20_000 + RETURN_0, flags=ProgramFlag.SLEEPABLE)
    log = verifier_log(long, LogLevel.LEVEL2 | LogLevel.STATS)
    assert "processed 20002 insns" in log
    assert "\n19999: (b7) r1 = 0" in log


def test_runs_are_counted_while_statistics_are_enabled() -> None:
    with loaded(RETURN_0) as fd:
        statistics = enable_statistics()
        try:
            for _ in range(3):
                ProgramRunner(fd, bytearray(8)).run()
        finally:
            os.close(statistics)
        info = program_info(fd)
        assert (info.runs, info.recursion_misses, info.verified) == (3, 0, 2)
        assert info.run_time > 0


def test_a_loaded_program_is_opened_by_its_id() -> None:
    with loaded(RETURN_0) as fd:
        other = open_program(program_info(fd).id)
        try:
            assert other != fd
            assert program_info(other) == program_info(fd)
        finally:
            os.close(other)
