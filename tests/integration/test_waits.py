"""System calls that wait are neither cut short nor prolonged by stops; each is held against the program's own clock."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import dprobes
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.interrupted_calls import EINTR, Waits
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register
from integration.ebpf.insessions import on_demand
from integration.support import PATIENCE, TIMEOUT, await_line, await_traced, await_true, is_traced, running

if TYPE_CHECKING:
    from integration.support import Builder, Runner

PERIOD = 300
"""For how long each call waits, in milliseconds."""

PROLONGED = 5 * PERIOD * PATIENCE
"""From here on a wait is longer than a busy machine makes it."""


class Waited(NamedTuple):
    """The shortest and the longest wait in a call, and how many ended otherwise than expected."""

    shortest: int
    longest: int
    failed: int


def waits_in(output: str) -> dict[str, Waited]:
    rows = [line.split() for line in output.splitlines()]
    found = {row[0]: Waited(*map(int, row[1:])) for row in rows if len(row) == 4}
    assert len(found) + sum(row[0] == "skip" for row in rows) >= 60, output
    return found


def assert_exact(waits: dict[str, Waited], period: int = PERIOD, prolonged: int = PROLONGED) -> None:
    assert {name: wait for name, wait in waits.items() if wait.failed} == {}
    assert {name: wait for name, wait in waits.items() if wait.shortest < 0.95 * period} == {}
    assert {name: wait for name, wait in waits.items() if wait.longest > prolonged} == {}


def probe_at(symbol: str) -> str:
    return f"name = timedwaits\noffset = {symbol}\nminor = 1\nexit\n"


def await_hit(output: Path) -> None:
    await_true(lambda: output.exists() and output.stat().st_size > 0, "records")


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_no_wait_notices_that_other_threads_are_stopped_at_each_hit(build: Builder, run: Runner, *, i386: bool) -> None:
    program = build("timedwaits.c", i386=i386)
    assert_exact(waits_in(subprocess.run([program, str(PERIOD), "1"], stdout=subprocess.PIPE, text=True, check=True,
                                         timeout=TIMEOUT).stdout))  # fmt: skip
    result = run.command(probe_at("tick"), program, PERIOD, 2)
    assert result.counts[1].executed == "in place"
    assert result.counts[1].hits > 50
    assert_exact(waits_in(result.stdout))


PAUSING = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); signal.pause(); print('over')"


def test_a_signal_on_the_way_back_into_a_call_ends_it() -> None:
    """As where a busy machine runs others when the thread leaves its stop, before it enters the kernel again."""
    pause = 34
    registers = ptrace_calls.Registers()
    with running(sys.executable, "-c", PAUSING) as target:
        call = Path(f"/proc/{target.pid}/syscall")
        await_true(lambda: call.read_text().startswith(f"{pause} "), "the call")
        ptrace_calls.seize(target.pid)
        ptrace_calls.interrupt(target.pid)
        os.waitpid(target.pid, ptrace_calls.WALL)
        space = AddressSpace.of_thread(target.pid, 8)
        with contextlib.closing(space):
            thread, waits = Thread(target.pid, target.pid, space, ThreadState.STOPPED), Waits()
            waits.hide_interruption(thread)
            ptrace_calls.get_registers(target.pid, registers)
            registers[Register.RIP] -= 2
            registers[Register.RAX], registers[Register.ORIG_RAX] = pause, (1 << 64) - 1
            ptrace_calls.set_registers(target.pid, registers)
            os.kill(target.pid, signal.SIGUSR1)
            ptrace_calls.resume(target.pid)
            _, status = os.waitpid(target.pid, ptrace_calls.WALL)
            assert os.WSTOPSIG(status) == signal.SIGUSR1
            waits.hide_interruption(thread, signal.SIGUSR1)
            ptrace_calls.detach(target.pid, signal.SIGUSR1)
        assert await_line(target) == "over\n"
        assert target.wait(TIMEOUT) == 0


WAITING = """
import ctypes, select
events, file = (ctypes.c_char * 12)(), select.epoll()
ctypes.CDLL(None).epoll_wait(file.fileno(), events, 1, -1)
print("over")
"""


def test_a_wait_without_timeout_is_restarted_when_it_fails_without_a_stop() -> None:
    """As when another thread has taken the ignored signal that woke this one: only the return of the call shows it."""
    epolls = (232, 281)
    registers = ptrace_calls.Registers()

    def next_stop(tid: int) -> tuple[ptrace_calls.StopKind, int]:
        found = ptrace_calls.classify_stop(os.waitpid(tid, ptrace_calls.WALL)[1])
        ptrace_calls.get_registers(tid, registers)
        return found

    with running(sys.executable, "-c", WAITING) as target:
        tid = target.pid
        call = Path(f"/proc/{tid}/syscall")
        await_true(lambda: call.read_text().split()[0] in map(str, epolls), "the call")
        ptrace_calls.seize(tid)
        ptrace_calls.interrupt(tid)
        next_stop(tid)
        space = AddressSpace.of_thread(tid, 8)
        with contextlib.closing(space):
            thread, waits = Thread(tid, tid, space, ThreadState.STOPPED), Waits()
            waits.hide_interruption(thread)
            assert thread.wait is not None
            assert waits.look_after() is None
            ptrace_calls.resume_to_syscall(tid)
            assert next_stop(tid)[0] is ptrace_calls.StopKind.SYSCALL
            waits.on_system_call(thread)
            os.kill(tid, signal.SIGWINCH)  # the call returns before the signal is taken
            ptrace_calls.resume_to_syscall(tid)
            assert next_stop(tid)[0] is ptrace_calls.StopKind.SYSCALL
            assert registers[Register.RAX] == EINTR
            waits.on_system_call(thread)
            kind = None
            while kind is not ptrace_calls.StopKind.SYSCALL:  # the requested stop, and that for the signal
                waits.hide_interruption(thread)
                ptrace_calls.resume_to_syscall(tid)
                kind, _ = next_stop(tid)
            waits.on_system_call(thread)
            assert registers[Register.ORIG_RAX] in epolls
            assert registers[Register.RAX] == -errno.ENOSYS & (1 << 64) - 1
            assert thread.wait is not None
            ptrace_calls.detach(tid)


def test_no_wait_notices_signals_that_the_program_ignores(build: Builder, run: Runner) -> None:
    result = run.command(probe_at("main"), build("timedwaits.c"), PERIOD, 2)
    assert_exact(waits_in(result.stdout))


def test_waits_of_event_loops_last_their_time_while_probes_come_and_go(build: Builder, run: Runner) -> None:
    program = build("timedwaits.c")
    period = 2 * PERIOD
    with running(program, period, 8) as target:
        await_line(target)
        rounds = 0
        until = time.monotonic() + 6 * period / 1000
        while time.monotonic() < until:
            client, output = run.start(probe_at("tick"), ["-p", str(target.pid)])
            await_traced(target.pid)
            await_hit(output)
            time.sleep(period / 1000)
            assert run.end(client, output).status == 0
            assert not is_traced(target.pid)
            # A wait begins anew when it is first interrupted, and once more when the tracer goes: each ends in between.
            time.sleep(period / 1000)
            rounds += 1
        assert rounds > 0
        assert target.stdout is not None
        waits = waits_in(target.stdout.read())
    # When the tracer goes, connect is called once more by the kernel, which then has another name for the time out.
    assert waits.pop("tcp_connect").shortest >= 0.95 * period
    assert_exact(waits, period, prolonged=2 * PROLONGED)


@pytest.mark.parametrize(
    "engine", ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="it needs root"))]
)
def test_records_do_not_wait_for_threads_that_wait(build: Builder, engine: str) -> None:
    path = build("ondemand.c")
    program = dprobes.ProgramBuilder(str(path))
    with program.probe("stepped", minor=1) as handler:
        handler.push_r("arg0").log(1).exit()
    delays = []
    with on_demand(path) as target:
        with dprobes.attach(target.process.pid, engine=engine, items=dprobes.Item.TIME) as session:
            session.insert(program)
            for _ in range(5):
                target.say("call 1")  # now it reads its standard input
                record = next(session.records(timeout=20))
                assert record.time is not None
                delays.append(time.monotonic() - record.time / 1e9)
        assert target.end() == 0
    # Some milliseconds, up to a second when nobody looks for what became of the instruction.
    assert statistics.median(delays) < 0.5
