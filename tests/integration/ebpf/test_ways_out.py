"""Whatever ends a run, nothing of it is left: no breakpoint in memory, no object in the kernel."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import KernelObjects, await_attached, await_gone, kernel_objects
from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_true,
    code_is_original,
    read_result,
    running,
)

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf", "--overhead", "off")
# Hits by the million, which leave records that nobody has time to read, or none; in all processes they are too many.
TORTURE = 'name = "{path}"\noffset = emulated\nminor = 1\nexit\noffset = stepped\nminor = 2\nexit\n'
QUIET = TORTURE.replace("exit", "abort")


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@contextlib.contextmanager
def _not_ignored(number: signal.Signals) -> Iterator[None]:
    """Let what is started meanwhile not inherit that a signal is ignored, as under nohup(1)."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("number", "scope"),
    [
        (signal.SIGINT, "all"),
        (signal.SIGINT, "process"),
        (signal.SIGTERM, "process"),
        (signal.SIGKILL, "all"),
        (signal.SIGHUP, "process"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_signal_leaves_nothing(build: Builder, run: Runner, number: signal.Signals, scope: str) -> None:
    path = build("torture.c")
    with running(path, 600, 2) as target:
        await_line(target)
        with _not_ignored(signal.SIGHUP):
            client, output = run.start(
                QUIET.format(path=path), ["-p", str(target.pid)] if scope == "process" else [], ENGINE
            )
        objects = await_attached(client)
        await_breakpoint(target.pid, path, "emulated")
        await_breakpoint(target.pid, path, "stepped")
        client.send_signal(number)
        read_result(client, output)
        await_true(lambda: code_is_original(target.pid, path), "the original code")
        await_gone(objects)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def test_the_end_of_a_command_leaves_nothing(build: Builder, run: Runner) -> None:
    path = build("torture.c")
    client, output = run.start(TORTURE.format(path=path), ["--exit-status", "--", str(path), "0.3", "2"], ENGINE)
    objects = await_attached(client)
    result = read_result(client, output)
    assert result.status == 0, result.stderr
    await_gone(objects)


def test_a_client_that_is_killed_at_any_time_leaves_nothing(build: Builder, run: Runner) -> None:
    """In the middle of the start as well, and of the end."""
    path = build("torture.c")
    times = random.Random(1)
    with running(path, 600, 2) as target:
        await_line(target)
        for turn in range(8):
            what = ["-p", str(target.pid)] if turn % 2 else ["--", str(path), "0.1", "1"]
            client, _ = run.start(TORTURE.format(path=path), what, ENGINE)
            objects = kill_within(client, 0.1 + 0.5 * times.random())
            await_gone(objects)
            await_true(lambda: code_is_original(target.pid, path), "the original code")
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0


def kill_within(client: subprocess.Popen[str], seconds: float) -> KernelObjects:
    """Kill a client after some time, and return what it was last seen to have in the kernel."""
    until = time.monotonic() + seconds
    objects = kernel_objects(client.pid)
    while time.monotonic() < until and client.poll() is None:
        objects = kernel_objects(client.pid)
    client.kill()
    client.wait(TIMEOUT)
    return objects
