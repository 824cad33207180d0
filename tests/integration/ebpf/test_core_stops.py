"""``exit 3`` in the kernel: no process stays stopped that a handler has stopped, whoever is killed, and when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.platform.linux.procfs import threads_of
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import (
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    children_of,
    code_is_original,
    command_of,
    is_traced,
    kernel_state,
    read_result,
    running,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from integration.support import Builder, Runner

OPTIONS = ["--engine", "ebpf"]
# One thread calls it all the time; those that main creates call it once, with 1, perhaps at the same time as that one.
STEPPED = "name = torture\noffset = stepped\nminor = 1\npush r, arg0\npush 1\nsub\njz once\nexit 3\nonce: abort\n"
RANDOM_KILLS = 25
SEED = 3


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.fixture
def target(build: Builder) -> Iterator[subprocess.Popen[str]]:
    """A program of which one thread calls a probed function all the time: there is one stop of ours at a time."""
    with running(build("torture.c"), 600, 1) as process:
        await_line(process)
        yield process


def helpers(client: int, name: str) -> list[int]:
    return [pid for pid in children_of(client) if name in command_of(pid)]


def program_of(process: subprocess.Popen[str]) -> Path:
    return Path(f"/proc/{process.pid}/exe").readlink()


def guard_of(client: int) -> int:
    found: list[int] = []

    def look() -> bool:
        found[:] = helpers(client, "stop_guard")
        return bool(found)

    await_true(look, "the guard")
    return found[0]


def goes_on(process: subprocess.Popen[str], program: Path) -> None:
    """Wait until a program goes on as if nothing had been, and ends by itself."""
    await_true(lambda: kernel_state(process.pid) not in ("T", "t") and not is_traced(process.pid), "its going on")
    await_true(lambda: code_is_original(process.pid, program), "the original code")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(TIMEOUT) == 0


def stays_stopped(client: subprocess.Popen[str], process: subprocess.Popen[str], program: Path) -> None:
    """Kill a client, and see that its guard leaves a program stopped until somebody lets it go on."""
    guard = guard_of(client.pid)
    client.kill()
    await_true(lambda: not command_of(guard), "the end of the guard")
    assert kernel_state(process.pid) == "T"
    process.send_signal(signal.SIGCONT)
    goes_on(process, program)


def hit_beside_a_still_client(
    run: Runner, directory: Path, target: subprocess.Popen[str]
) -> tuple[subprocess.Popen[str], Path]:
    """Return a client that stands still, with a process whose stop it has not seen."""
    target.send_signal(signal.SIGSTOP)
    await_true(lambda: kernel_state(target.pid) == "T", "the stop of the program")
    options = [*OPTIONS, "--core-dir", str(directory)]
    client, output = run.start(STEPPED, ["-p", str(target.pid), "--no-follow"], options)
    await_true(lambda: not code_is_original(target.pid, program_of(target)), "the breakpoint")
    client.send_signal(signal.SIGSTOP)
    await_true(lambda: kernel_state(client.pid) == "T", "the stop of the client")
    target.send_signal(signal.SIGCONT)
    # Until all threads have come to the stop of the hit, another SIGSTOP is taken by one of them, and is not seen.
    await_true(lambda: set(map(kernel_state, threads_of(target.pid))) == {"T"}, "the stop of the hit")
    return client, output


def test_a_client_that_is_killed_between_the_hit_and_the_writer(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    client, _ = hit_beside_a_still_client(run, tmp_path, target)
    assert not helpers(client.pid, "core_dumper")
    guard = guard_of(client.pid)
    client.kill()
    goes_on(target, build("torture.c"))
    await_true(lambda: not command_of(guard), "the end of the guard")
    assert list(tmp_path.glob("core*")) == []


def test_a_process_that_somebody_else_stops_too_stays_stopped(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    client, _ = hit_beside_a_still_client(run, tmp_path, target)
    target.send_signal(signal.SIGSTOP)
    stays_stopped(client, target, build("torture.c"))


def test_such_a_process_stays_stopped_when_its_core_is_written(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    client, output = hit_beside_a_still_client(run, tmp_path, target)
    target.send_signal(signal.SIGSTOP)
    client.send_signal(signal.SIGCONT)
    await_message(client, "is in")
    assert kernel_state(target.pid) == "T"
    client.send_signal(signal.SIGINT)
    assert read_result(client, output).status == 0
    assert kernel_state(target.pid) == "T"
    target.send_signal(signal.SIGCONT)
    goes_on(target, build("torture.c"))


def test_a_process_that_was_never_hit_stays_as_it_was_stopped(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    target.send_signal(signal.SIGSTOP)
    client, _ = run.start(STEPPED, ["-p", str(target.pid), "--no-follow"], [*OPTIONS, "--core-dir", str(tmp_path)])
    await_true(lambda: not code_is_original(target.pid, program_of(target)), "the breakpoint")
    stays_stopped(client, target, build("torture.c"))


def test_a_process_that_is_stopped_after_its_core_was_written_stays_stopped(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    options = [*OPTIONS, "--core-dir", str(tmp_path)]
    client, _ = run.start(STEPPED, ["-p", str(target.pid), "--no-follow"], options)
    await_message(client, "is in")
    target.send_signal(signal.SIGSTOP)
    await_true(lambda: kernel_state(target.pid) == "T", "the stop")
    stays_stopped(client, target, build("torture.c"))


def test_client_and_writer_that_are_both_killed(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    client, _ = hit_beside_a_still_client(run, tmp_path, target)
    guard_of(client.pid)
    client.send_signal(signal.SIGCONT)
    writers: list[int] = []

    def look() -> bool:
        writers[:] = helpers(client.pid, "core_dumper")
        return bool(writers)

    await_true(look, "the writer")
    os.kill(writers[0], signal.SIGSTOP)
    client.kill()
    time.sleep(0.2)  # the guard sees the writer, which keeps the process
    with contextlib.suppress(ProcessLookupError):
        os.kill(writers[0], signal.SIGKILL)
    goes_on(target, build("torture.c"))


def test_a_guard_that_is_killed_gets_a_successor(
    build: Builder, run: Runner, tmp_path: Path, target: subprocess.Popen[str]
) -> None:
    target.send_signal(signal.SIGSTOP)
    client, _ = run.start(STEPPED, ["-p", str(target.pid), "--no-follow"], [*OPTIONS, "--core-dir", str(tmp_path)])
    await_true(lambda: not code_is_original(target.pid, program_of(target)), "the breakpoint")
    first = guard_of(client.pid)
    os.kill(first, signal.SIGKILL)
    await_true(lambda: guard_of(client.pid) != first, "the successor")
    client.send_signal(signal.SIGSTOP)
    await_true(lambda: kernel_state(client.pid) == "T", "the stop of the client")
    target.send_signal(signal.SIGCONT)
    await_true(lambda: kernel_state(target.pid) == "T", "the stop of the hit")
    client.kill()
    goes_on(target, build("torture.c"))


def test_kills_at_random_moments(build: Builder, run: Runner, tmp_path: Path) -> None:
    program, choice = build("torture.c"), random.Random(SEED)
    for _ in range(RANDOM_KILLS):
        with running(program, 600, 2) as target:
            await_line(target)
            client, _ = run.start(
                STEPPED, ["-p", str(target.pid), "--no-follow"], [*OPTIONS, "--core-dir", str(tmp_path)]
            )
            guard_of(client.pid)
            time.sleep(choice.uniform(0, 0.4))
            client.kill()
            goes_on(target, program)
