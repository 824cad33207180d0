"""Injected system calls: their results, that they leave no trace, and that a thread survives its tracer's death."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ptrace.tracer import call_injection
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import ThreadBusyError
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadGoneError, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Event, Register, RegisterSet, StopKind, classify_stop
from integration.support import TIMEOUT, await_line, await_true, kernel_state, running, status_field, symbols_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from integration.support import Builder

GETPID = {8: 39, 4: 20}
KILL = {8: 62, 4: 37}
MMAP = {8: 9, 4: 192}
PAUSE = 34


@contextlib.contextmanager
def stopped(process: subprocess.Popen[str], word_size: int) -> Iterator[Thread]:
    """Stop a process at an event stop; it is let go at the end."""
    thread = seize(process.pid, word_size)
    try:
        yield thread
    finally:
        thread.space.close()
        with contextlib.suppress(OSError):
            ptrace_calls.detach(process.pid)


def seize(pid: int, word_size: int) -> Thread:
    ptrace_calls.seize(pid)
    ptrace_calls.interrupt(pid)
    assert classify_stop(os.waitpid(pid, ptrace_calls.WALL)[1]) == (StopKind.EVENT, Event.STOP)
    space = AddressSpace.of_thread(pid, 8 if word_size == 8 else 4)
    return Thread(pid, pid, space, ThreadState.STOPPED)


def state_of(pid: int) -> tuple[list[int], bytes, int]:
    """Return all registers, the floating-point state and the signal mask of a stopped thread."""
    registers = ptrace_calls.Registers()
    ptrace_calls.get_registers(pid, registers)
    return list(registers), ptrace_calls.get_register_set(pid, RegisterSet.XSTATE), ptrace_calls.get_signal_mask(pid)


def stack_below(thread: Thread) -> bytes:
    registers = ptrace_calls.Registers()
    ptrace_calls.get_registers(thread.tid, registers)
    return os.pread(thread.space.memory, 8192, registers[Register.RSP] - 8192)


def place_of(pid: int) -> int:
    """Return the instruction pointer of a running process."""
    ptrace_calls.seize(pid)
    ptrace_calls.interrupt(pid)
    os.waitpid(pid, ptrace_calls.WALL)
    registers = state_of(pid)[0]
    ptrace_calls.detach(pid)
    return registers[Register.RIP]


@pytest.fixture(params=[8, 4], ids=["x86_64", "i386"])
def word_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def still(build: Builder, word_size: int) -> Iterator[subprocess.Popen[str]]:
    program = build("still.S", "-no-pie", i386=word_size == 4)
    with running(program) as process:
        await_line(process)
        await_true(lambda: place_of(process.pid) == symbols_of(program)["here"], "the program's coming to rest")
        yield process


def test_a_call_returns_what_the_kernel_says_and_leaves_no_trace(still: subprocess.Popen[str], word_size: int) -> None:
    with stopped(still, word_size) as thread:
        before, below = state_of(thread.tid), stack_below(thread)
        maps = Path(f"/proc/{still.pid}/maps").read_text()
        with call_injection.injecting(thread) as call:
            assert call(GETPID[word_size]) == still.pid
            assert call(KILL[word_size], 0x7FFFFFFF, 0) == -errno.ESRCH
            assert call(MMAP[word_size], 0, 0, 0, 0x22, -1, 0) == -errno.EINVAL
        assert state_of(thread.tid) == before
        assert stack_below(thread) == below
        assert Path(f"/proc/{still.pid}/maps").read_text() == maps


def test_a_thread_goes_on_where_it_was_when_its_tracer_dies_in_a_call(
    still: subprocess.Popen[str], word_size: int
) -> None:
    with stopped(still, word_size) as thread:
        before = state_of(thread.tid)
    # A tracer that dies at once, between the two stops of the call, and at the stop behind it.
    for stops in range(3):
        tracer = os.fork()
        if tracer == 0:
            die_in_a_call(still.pid, word_size, stops)
        assert os.waitpid(tracer, 0)[1] == signal.SIGKILL
        await_true(lambda: status_field(still.pid, "TracerPid") == "0", "the end of tracing")
        # It runs through the call and back, as soon as it gets a processor.
        await_true(lambda: kernel_state(still.pid) == "R" and stopped_state(still, word_size) == before, "its return")


def stopped_state(process: subprocess.Popen[str], word_size: int) -> object:
    """Stop a process for a moment, and return its thread's registers and mask of signals."""
    with stopped(process, word_size) as thread:
        return state_of(thread.tid)


def die_in_a_call(pid: int, word_size: int, stops: int) -> None:
    """Trace a process, begin a call in it, and die after so many of its stops."""
    try:
        thread = seize(pid, word_size)
        resume, left = ptrace_calls.resume_to_syscall, stops

        def resume_or_die(tid: int, number: int = 0) -> None:
            nonlocal left
            if not left:
                resume(tid)
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            resume(tid, number)

        ptrace_calls.resume_to_syscall = resume_or_die
        with call_injection.injecting(thread) as call:
            call(GETPID[word_size])
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def test_a_thread_is_as_it_was_whichever_request_of_its_tracer_is_the_last(
    still: subprocess.Popen[str], word_size: int
) -> None:
    with stopped(still, word_size) as thread:
        before = state_of(thread.tid)
    for requests in range(100):
        tracer = os.fork()
        if tracer == 0:
            die_after(still.pid, word_size, requests)
        _, status = os.waitpid(tracer, 0)
        assert status in (0, signal.SIGKILL)
        await_true(lambda: status_field(still.pid, "TracerPid") == "0", "the end of tracing")
        await_true(lambda: kernel_state(still.pid) == "R" and stopped_state(still, word_size) == before, "its return")
        if not status:
            return
    raise AssertionError("a call takes more than 100 requests")


def die_after(pid: int, word_size: int, requests: int) -> None:
    """Trace a process, make a call in it, and die in place of the request after so many, or end with status 0."""
    try:
        thread = seize(pid, word_size)
        request, left = ptrace_calls._ptrace, requests

        def request_or_die(*arguments: Any) -> int:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return int(request(*arguments))

        ptrace_calls._ptrace = request_or_die  # type: ignore[assignment]
        with call_injection.injecting(thread) as call:
            call(GETPID[word_size])
        ptrace_calls._ptrace = request
        os._exit(0)
    finally:
        os._exit(1)


def test_a_signal_that_comes_during_a_call_is_delivered_after_it(still: subprocess.Popen[str], word_size: int) -> None:
    with stopped(still, word_size) as thread:
        before = state_of(thread.tid)
        with call_injection.injecting(thread) as call:
            os.kill(still.pid, signal.SIGTERM)
            assert call(GETPID[word_size]) == still.pid
        assert state_of(thread.tid) == before
    assert still.wait(TIMEOUT) == -signal.SIGTERM


def test_a_stop_signal_that_comes_during_a_call_stops_the_process_after_it(
    still: subprocess.Popen[str], word_size: int
) -> None:
    with stopped(still, word_size) as thread, call_injection.injecting(thread) as call:
        os.kill(still.pid, signal.SIGSTOP)
        assert call(GETPID[word_size]) == still.pid
    await_true(lambda: kernel_state(still.pid) == "T", "the stop")
    os.kill(still.pid, signal.SIGCONT)
    await_true(lambda: kernel_state(still.pid) == "R", "the going on")


def test_a_process_that_is_killed_during_a_call_is_reported(still: subprocess.Popen[str], word_size: int) -> None:
    thread = seize(still.pid, word_size)
    # Either its end is reported at once, or the next request finds nobody, and the end is still to be reported.
    with pytest.raises((ThreadGoneError, ProcessLookupError)):
        kill_in_a_call(thread, word_size)
    assert still.wait(TIMEOUT) in (-signal.SIGKILL, 0)  # 0: the end was reported to us already


def test_the_end_of_a_first_thread_is_not_waited_for_while_others_are_not_reaped(build: Builder) -> None:
    with running(build("threads.c"), 3, 1000000000) as process:
        await_true(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1, "the threads")
        thread = seize(process.pid, 8)
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if int(task.name) != process.pid:
                ptrace_calls.seize(int(task.name))
        with pytest.raises(ProcessLookupError):
            pause_until_killed(thread)
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if int(task.name) != process.pid:
                os.waitpid(int(task.name), ptrace_calls.WALL)


def pause_until_killed(thread: Thread) -> None:
    timer = threading.Timer(0.2, os.kill, (thread.pid, signal.SIGKILL))
    with call_injection.injecting(thread) as call:
        timer.start()
        call(PAUSE)


def kill_in_a_call(thread: Thread, word_size: int) -> None:
    with call_injection.injecting(thread) as call:
        os.kill(thread.pid, signal.SIGKILL)
        call(GETPID[word_size])


def test_a_thread_in_the_middle_of_a_system_call_is_not_asked(still: subprocess.Popen[str], word_size: int) -> None:
    with stopped(still, word_size) as thread:
        registers = ptrace_calls.Registers()
        ptrace_calls.get_registers(thread.tid, registers)
        before = list(registers)
        with call_injection.injecting(thread) as call:
            # As the registers are at the stop of clone, before the kernel has put its result there.
            registers[Register.ORIG_RAX], registers[Register.RAX] = GETPID[word_size], (1 << 64) - errno.ENOSYS
            ptrace_calls.set_registers(thread.tid, registers)
            with (
                pytest.raises(ThreadBusyError, match="in the middle of a system call"),
                call_injection.injecting(thread),
            ):
                raise AssertionError
            assert call(GETPID[word_size]) == still.pid
        assert state_of(thread.tid)[0] == before
