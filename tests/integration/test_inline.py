"""Handlers in the probed process: the same records and counts as with breakpoints, and an unharmed program."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    DPROBES,
    TIMEOUT,
    await_line,
    await_message,
    await_traced,
    await_true,
    children_of,
    code_is_original,
    command_of,
    environment,
    is_traced,
    memory_at,
    running,
    symbols_of,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

INLINE = ["--engine", "inline"]
LOOP = "name = hotloop\nlogmax = 16\noffset = tick\nminor = 1\npush r, rdi\nlog 1\nexit\n"
COUNT = "name = hotloop\noffset = tick\nminor = 1\nabort\n"
HOT = "name = torture\noffset = stepped\nminor = 1\nabort\noffset = emulated\nminor = 2\npush 2\nlog 1\nexit\n"


def ways(result: Result, minor: int = 1) -> set[str]:
    """Return how the probed instruction was executed."""
    return {way.partition(" (")[0] for way in result.counts[minor].executed.split(", ")}


def jump_is_at(pid: int, program: Path) -> bool:
    """Return whether there is a jump in the place of the first instruction of ``stepped``."""
    return memory_at(pid, program, "stepped", 1) == b"\xe9"


def test_every_hit_is_counted_and_the_program_computes_the_same(build: Builder, run: Runner) -> None:
    result = run(COUNT, ["--exit-status", "--", str(build("hotloop.c")), "3000000"], INLINE)
    assert (result.status, result.stdout) == (0, f"{3000000 * 2999999 // 2}\n")
    assert result.counts[1].hits == 3_000_000
    assert ways(result) == {"inline"}  # not one of them met a breakpoint


def test_records_have_what_the_handler_saw_and_those_without_room_are_counted(build: Builder, run: Runner) -> None:
    result = run(LOOP, ["--exit-status", "--", str(build("hotloop.c")), "200000"], INLINE)
    counts = result.counts[1]
    assert result.status == 0
    assert "inline" in ways(result)
    assert counts.hits == counts.records + counts.lost == 200_000
    values = [value for (value,) in result.words()]
    assert len(values) == counts.records
    assert len(set(values)) == len(values)
    assert values[-1] == max(values)


def test_what_a_command_starts_or_loads_meets_no_breakpoint(build: Builder, run: Runner) -> None:
    program, library = build("hotloop.c"), build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    result = run(COUNT, ["--exit-status", "--", "sh", "-c", f"{program} 50; {program} 7; {program} 900"], INLINE)
    assert (result.status, result.counts[1].hits, ways(result)) == (0, 957, {"inline"})
    source = f'name = "{library}"\noffset = plugin_call\nminor = 1\nabort\n'
    result = run(source, ["--exit-status", "--", str(build("loader.c", "-ldl")), str(library), "9"], INLINE)
    assert (result.status, result.counts[1].hits, ways(result)) == (0, 27, {"inline"})


def test_children_of_a_process_whose_loader_waits_miss_no_hit(build: Builder, run: Runner) -> None:
    library = build("plugin.c", "-shared", "-fPIC", name="libplugin.so")
    source = f'name = "{library}"\noffset = plugin_call\nminor = 1\nabort\n'
    command = [str(build("early_children.c", "-ldl")), str(library), str(symbols_of(library)["plugin_call"])]
    result = run(source, ["--exit-status", "--", *command], INLINE)
    assert result.status == 0
    assert result.counts[1].hits == int(result.stdout) >= 3


@pytest.mark.parametrize("rounds", [8, pytest.param(300, marks=[pytest.mark.torture, pytest.mark.timeout(3600)])])
def test_a_command_runs_to_its_end_whenever_we_are_killed(build: Builder, run: Runner, rounds: int) -> None:
    """
    It may be waiting for its jumps just then.

    One thing cannot be prevented: that a thread ends by SIGTRAP which has just come to the breakpoint at the loader, or
    to one without a jump, and of which a tracer that is killed has not heard yet.
    """
    program, dice = build("hotloop.c"), random.Random(rounds)
    sources = COUNT, 'name = "libc.so.6"\noffset = m*\nminor = 1\nabort\n'
    trapped = 0
    for number in range(rounds):
        place = program.parent / f"{rounds}-{number}"
        with_tracer = _kill_during(program, place, sources[number % 2], run, dice)
        status = Path(f"{place}.status").read_text()
        if with_tracer and status == f"{128 + signal.SIGTRAP}\n":
            trapped += 1
            continue
        assert status == "0\n"
        assert Path(f"{place}.sum").read_text() == f"{20000 * 19999 // 2}\n"
    print(f"{trapped} of {rounds} ended by SIGTRAP")
    assert trapped <= max(1, rounds // 100)


def _kill_during(program: Path, place: Path, source: str, run: Runner, dice: random.Random) -> bool:
    """
    Kill client or tracer, or both, while a command runs that leaves files at ``place``; wait for its end.

    Return whether the tracer was among them.
    """
    begun, status = Path(f"{place}.begun"), Path(f"{place}.status")
    script = f"echo > {begun}; {program} 20000 > {place}.sum; echo $? > {status}"
    client, _ = run.start(source, ["--", "sh", "-c", script], INLINE)
    since = time.monotonic()
    await_true(lambda: begun.exists() or client.poll() is not None, "the beginning of the command", TIMEOUT)
    time.sleep(dice.random() * (time.monotonic() - since))
    tracers = tracers_of(client.pid) if dice.randrange(2) else []
    for pid in (*tracers, client.pid) if dice.randrange(2) else (client.pid, *tracers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, said = client.communicate(timeout=TIMEOUT)
    assert begun.exists(), said
    await_true(lambda: status.exists() and status.read_text().endswith("\n"), "the end of the command", TIMEOUT)
    return bool(tracers)


def tracers_of(client: int) -> list[int]:
    """Return the tracer that a client has started, if there is one."""
    return [pid for pid in children_of(client) if "dprobes.engines.ptrace.tracer.tracer_process" in command_of(pid)]


def test_limits_are_kept(build: Builder, run: Runner) -> None:
    source = LOOP.replace("minor = 1\n", "minor = 1\npasscount = 500\nmaxhits = 3\n")
    result = run(source, ["--", str(build("hotloop.c")), "3000"], INLINE)
    assert [value for (value,) in result.words()] == [500, 501, 502]
    assert (result.counts[1].hits, result.counts[1].passed) == (503, 500)


def test_keyed_tables_are_exact(build: Builder) -> None:
    source = f'"{build("hotloop.c")}":tick {{ @calls[arg0 % 3] = count(); @sums = sum(arg0); }}'
    command = [*DPROBES, "run", "-e", source, *INLINE, "--", str(build("hotloop.c")), "300000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    total = 300000 * 299999 // 2
    assert done.stdout.split() == [
        str(total), *(word for n in range(3) for word in (f"@calls[{n}]:", "100000")), "@sums:", str(total)
    ]  # fmt: skip
    assert "inline" in done.stderr


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_hot_program_is_as_before_whatever_ends_the_client(build: Builder, tmp_path: Path, way: int) -> None:
    program, source = build("torture.c"), tmp_path / "hot.rpn"
    source.write_text(HOT)
    run = [*DPROBES, "run", str(source), *INLINE, "-o", str(tmp_path / "hot.dpt")]  # a text would take long to write
    with running(program, 600, 3) as target:
        await_line(target)
        before = Path(f"/proc/{target.pid}/maps").read_text()
        for _ in range(3):
            with running(*run, "-p", target.pid, stderr=subprocess.PIPE, env=environment()) as client:
                await_traced(target.pid)
                await_true(lambda: jump_is_at(target.pid, program), "a jump", TIMEOUT)
                client.send_signal(way)
                _, stderr = client.communicate(timeout=TIMEOUT)
            assert "Traceback" not in stderr, stderr
            await_true(lambda: not is_traced(target.pid), "the end of tracing", TIMEOUT)
            assert target.poll() is None
            assert code_is_original(target.pid, program)
        after = Path(f"/proc/{target.pid}/maps").read_text()
        assert len(after.splitlines()) <= len(before.splitlines()) + 12
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_a_killed_tracer_leaves_a_program_that_goes_on_without_jumps(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    source = "name = torture\noffset = stepped\nminor = 1\nabort\n"
    with running(program, 600, 2) as target:
        await_line(target)
        client, _ = run.start(source, ["-p", str(target.pid)], INLINE)
        tracer = await_traced(target.pid)
        await_true(lambda: jump_is_at(target.pid, program), "a jump")
        os.kill(tracer, signal.SIGKILL)
        _, stderr = client.communicate(timeout=TIMEOUT)
        assert "Traceback" not in stderr, stderr
        assert target.poll() is None
        assert code_is_original(target.pid, program)


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_a_tracer_that_somebody_stops_goes_on_afterwards(build: Builder, run: Runner, engine: str) -> None:
    source = "name = torture\noffset = stepped\nminor = 1\nabort\n"
    with running(build("torture.c"), 600, 2) as target:
        await_line(target)
        client, output = run.start(source, ["-p", str(target.pid)], ["--engine", engine])
        tracer = await_traced(target.pid)
        await_message(client, "active")
        for _ in range(2):
            os.kill(tracer, signal.SIGSTOP)
            time.sleep(1.2)  # longer than it waits for anything
            os.kill(tracer, signal.SIGCONT)
            time.sleep(0.1)
        assert is_traced(target.pid)
        assert tracer_of(target.pid) == tracer
        result = run.end(client, output)
        assert "received SIGTERM" not in result.stderr
        assert result.counts[1].hits > 0


def test_what_no_jump_is_good_for_has_a_breakpoint(build: Builder, run: Runner) -> None:
    source = "name = repeated\noffset = copying\nminor = 1\nexit\n"
    result = run(source, ["--", str(build("repeated.c")), "5000"], INLINE)
    assert result.counts[1].hits == 1
    assert "inline" not in ways(result)
    reason = "faults of its instruction cannot be predicted: it repeats, and may stop in the middle"
    assert f"dprobes: note: a probepoint used a breakpoint instead of a jump: {reason}\n" in result.stderr


def test_records_of_jumps_and_of_breakpoints_are_in_the_order_of_their_times() -> None:
    """The handler at the return reads the user id, so it keeps its breakpoint."""
    program = (
        'libc.so.6:getppid() { printf("call"); } return libc.so.6:getppid when (uid < 1 << 30) { printf("return"); }'
    )
    calls = "import os\nfor _ in range(2000): os.getppid()"
    command = [*DPROBES, "run", "--engine", "inline", "-e", program, "--", sys.executable, "-c", calls]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT, check=True)
    assert "keeps" in done.stderr or "a breakpoint instead of a jump" in done.stderr
    found = [line.split()[2] for line in done.stdout.splitlines() if line.endswith(("  call", "  return"))]
    assert found == ["call", "return"] * (len(found) // 2)
    assert len(found) >= 4000
