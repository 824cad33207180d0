"""Signals reach the program as they would without us, and each execution of the probed instruction is still one hit."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import system_call_of
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_traced,
    await_true,
    read_result,
    running,
    status_field,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Runner


def tick_of(name: str) -> str:
    return f"name = {name}\nvars = 1\noffset = tick\nminor = 1\ninc lv, 0\npush lv, 0\npush r, arg0\nlog 2\nexit\n"


def test_a_storm_of_signals_loses_neither_signals_nor_hits(build: Builder, run: Runner) -> None:
    result = run.command(tick_of("signals"), build("signals.c"), 3000)
    alarms, values = (int(n) for n in result.stdout.split())
    assert alarms > 10
    assert values == 300
    arguments = [words[0] for words in result.words() if words[0] < 3000]
    assert sorted(set(arguments)) == list(range(3000))
    assert result.counts[1].hits == len(result.records)
    # The handler ran once for each hit, although signals came in between.
    assert [words[1] for words in result.words()] == list(range(1, len(result.records) + 1))


@pytest.mark.parametrize("meanwhile", ["stepped", "stopped"])
def test_signals_keep_what_was_sent_with_them_although_stops_come_in_between(
    build: Builder, run: Runner, meanwhile: str
) -> None:
    source = "name = heldsignals\noffset = tick\nminor = 1\nexit\noffset = aside\nminor = 2\nexit\n"
    result = run.command(source, build("heldsignals.c"), 300, meanwhile)
    assert result.stdout == "300\n"
    assert result.counts[1].hits > 0
    assert result.counts[2].hits == (300 if meanwhile == "stepped" else 0)


def test_a_fault_that_the_program_repairs_is_one_record(build: Builder, run: Runner) -> None:
    source = "name = repair\noffset = touch\nminor = 1\npush r, arg1\nlog 1\nexit\n"
    result = run.command(source, build("repair.c"), 50)
    assert result.stdout == "50\n"
    assert [words[0] for words in result.words()] == list(range(50))
    assert result.counts[1].hits == 50


def test_logonfault_keeps_the_record_of_each_attempt(build: Builder, run: Runner) -> None:
    source = "name = repair\noffset = touch\nminor = 1\nlogonfault = yes\npush r, arg1\nlog 1\nexit\n"
    result = run.command(source, build("repair.c"), 50)
    assert [words[0] for words in result.words()] == [n for n in range(50) for _ in range(2)]


def test_a_program_with_breakpoints_of_its_own_gets_their_traps(build: Builder, run: Runner) -> None:
    result = run.command(tick_of("owntrap"), build("owntrap.c"), 100)
    assert result.stdout == "100\n"
    assert result.counts[1].hits == 100


TRAPS = "name = traps\n" + "".join(f"offset = site_{site}\nexit\n" for site in ("emulated", "load", "free"))


def test_a_program_with_a_handler_for_sigtrap_gets_each_of_its_own(build: Builder, run: Runner) -> None:
    program = build("traps.c")
    unprobed = subprocess.run([program, "handled"], capture_output=True, text=True, check=True, timeout=20).stdout
    turns = "".join(f"int3 0\nkill 0\nqueue {n}\n" for n in range(3))
    assert unprobed == f"not blocked, handled\n{turns}not blocked, handled\n"
    result = run.command(TRAPS, program, "handled")
    assert result.stdout == unprobed
    assert result.counts[0].hits == 3


@pytest.mark.parametrize("mode", ["blocked", "ignored"])
def test_a_breakpoint_resets_what_a_program_does_with_sigtrap(build: Builder, run: Runner, mode: str) -> None:
    # The kernel does that before the tracer hears of it (docs/reference/engine-ptrace.md); all else is as it was.
    result = run.command(TRAPS, build("traps.c"), mode)
    before = {"blocked": "blocked, default", "ignored": "not blocked, ignored"}
    assert result.stdout == f"{before[mode]}\nnot blocked, default\n"
    assert result.counts[0].hits == 3


def test_a_deadly_signal_at_the_probed_instruction_ends_the_program_as_usual(build: Builder, run: Runner) -> None:
    source = "name = crash\noffset = main\nminor = 1\npush 1\nlog 1\nexit\n"
    result = run(source, ["--exit-status", "--", str(build("crash.S", name="crash"))])
    assert result.status == 128 + signal.SIGSEGV
    assert result.records == []
    assert result.counts[1].hits == 0


def test_a_stopped_process_stays_stopped_and_goes_on_with_sigcont(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\npush 1\nlog 1\nexit\n"
    with running(program, 12, 2) as target:
        await_line(target)
        process, output = run.start(source, ["-p", str(target.pid)])
        await_traced(target.pid)
        await_true(lambda: output.exists() and output.stat().st_size > 0, "records")
        for _ in range(5):
            target.send_signal(signal.SIGSTOP)
            await_true(lambda: status_field(target.pid, "State").startswith("t"), "a traced stop")
            target.send_signal(signal.SIGCONT)
        target.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        result = read_result(process, output)
        assert result.status == 0, result.stderr
        await_true(lambda: status_field(target.pid, "State").startswith("T"), "the stop without us")
        assert tracer_of(target.pid) == 0
        target.send_signal(signal.SIGCONT)
        assert target.wait(TIMEOUT) == 0


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_a_killed_process_ends_the_run(build: Builder, run: Runner, delay: float) -> None:
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\npush 1\nlog 1\nexit\n"
    with running(program, 60, 3) as target:
        await_line(target)
        process, output = run.start(source, ["-p", str(target.pid)])
        await_traced(target.pid)
        time.sleep(delay)
        target.kill()
        result = read_result(process, output)
    assert "Traceback" not in result.stderr
    assert "internal error" not in result.stderr


def test_waiting_calls_are_not_interrupted_by_hits_of_other_threads(build: Builder, run: Runner) -> None:
    program = build("waiting.c")
    source = (
        "name = waiting\noffset = tick\nminor = 1\npush 1\nlog 1\nexit\n"
        "offset = site_read\nminor = 2\npush 1\nlog 1\nexit\n"
    )
    subprocess.run([program], check=True, timeout=20)
    result = run.command(source, program)
    assert result.counts[1].hits == 200
    assert result.counts[2].hits == 1


def test_a_call_that_is_made_once_more_because_of_the_insertion_is_no_hit(build: Builder, run: Runner) -> None:
    program = build("blocked.c")
    with running(program, stdin=subprocess.PIPE) as target:

        def say(byte: str) -> None:
            assert target.stdin is not None
            target.stdin.write(byte)
            target.stdin.flush()
            assert await_line(target).strip() == byte

        say("1")
        await_true(lambda: system_call_of(target.pid) == 0, "a wait in read")
        client, output = run.start("name = blocked\noffset = site_read\nminor = 1\nexit\n", ["-p", str(target.pid)])
        await_breakpoint(target.pid, program, "site_read")
        say("2")
        say("3")
        await_true(lambda: system_call_of(target.pid) == 0, "a wait in read")
        result = run.end(client, output)
        assert result.counts[1].hits == 2
        say("4")
