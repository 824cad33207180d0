"""Memory of another user's process whose readers wait for ever: a run that looks at the process goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.support import (
    PROGRAMS,
    TIMEOUT,
    as_nobody,
    await_line,
    await_message,
    await_true,
    kernel_state,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder, Runner

CALLS = 100
NAME = 3 * 4096 * "a"


@pytest.fixture
def hostile(build: Builder, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose arguments are partly in a file of which no page ever comes."""
    if os.geteuid() or not Path("/dev/fuse").exists():
        pytest.skip("no file system can be mounted here")
    directory = tmp_path / "mounted"
    directory.mkdir()
    tmp_path.chmod(0o755)
    path = build("silentargs.c", "-pthread")
    # The server ends before the process does, which may wait for it.
    with (
        contextlib.ExitStack() as process,
        running(sys.executable, PROGRAMS / "silentfiles.py", directory, stderr=subprocess.DEVNULL) as server,
    ):
        assert await_line(server) == "mounted\n"
        arguments: dict[str, Any] = {"executable": path, "stdin": subprocess.PIPE, **as_nobody()}
        started = process.enter_context(running(NAME, directory / "silent", **arguments))
        try:
            assert await_line(started) == "ready\n"
            yield started
        finally:
            ctypes.CDLL(None).umount2(os.fsencode(directory), 2)  # MNT_DETACH


def program(path: Path) -> str:
    """Return a program that logs a number, and at another place what a pointer into that file points to."""
    numbers = "offset = stepped\nminor = 1\npush r, arg0\nlog 1\nexit\n"
    texts = "offset = shown\nminor = 2\npush 16\npush r, arg0\nlog str\nexit\n"
    return f'name = "{path}"\n{numbers}{texts}'


def call(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    assert await_line(process, TIMEOUT) == "called\n"


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_a_run_of_such_a_process_goes_on(
    build: Builder, run: Runner, hostile: subprocess.Popen[str], engine: str
) -> None:
    client, output = run.start(
        program(build("silentargs.c", "-pthread")), ["-p", str(hostile.pid)], ["--engine", engine]
    )
    await_message(client, "2 probepoints are active")
    if engine == "inline":  # the process reads its memory itself, and waits
        assert hostile.stdin is not None
        hostile.stdin.write("x")
        hostile.stdin.flush()
        await_true(lambda: kernel_state(hostile.pid) == "D", "a handler that waits")
        assert run.end(client, output).words(1) == [[0]]
        return
    call(hostile)
    result = run.end(client, output)
    assert result.words(1) == [[n] for n in range(10)]
    assert sorted({record["data"][:2] for record in result.records if record["minor"] == 2}) == ["ff"]
    call(hostile)


def shown(build: Builder, run: Runner, engine: str, process: subprocess.Popen[str]) -> set[str]:
    """Return the kinds and lengths of what a run logs of the page."""
    assert await_line(process) == "ready\n"
    options = ["--engine", engine]
    client, output = run.start(program(build("silentargs.c", "-pthread")), ["-p", str(process.pid)], options)
    await_message(client, "2 probepoints are active")
    call(process)
    result = run.end(client, output)
    assert result.words(1) == [[n] for n in range(10)]
    return {record["data"][:6] for record in result.records if record["minor"] == 2}


FAULT = "ff0800"
EMPTY = "010000"
"""A string of no characters."""


@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_memory_that_another_process_has_to_deliver_is_not_waited_for(build: Builder, run: Runner, engine: str) -> None:
    if os.geteuid():
        pytest.skip("only root lets the kernel wait for such memory")
    path = build("silentargs.c", "-pthread")
    with running(NAME, "userfault", executable=path, stdin=subprocess.PIPE) as process:
        assert shown(build, run, engine, process) == {FAULT}


@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
@pytest.mark.parametrize("kind", ["fresh", "threads"])
def test_memory_that_the_kernel_delivers_is_read(
    build: Builder, run: Runner, tmp_path: Path, engine: str, kind: str
) -> None:
    if os.geteuid():
        pytest.skip("only root probes processes of other users")
    path = build("silentargs.c", "-pthread")
    tmp_path.chmod(0o755)
    arguments: dict[str, Any] = {"executable": path, "stdin": subprocess.PIPE, **as_nobody()}
    with running(NAME, kind, **arguments) as process:
        waits = engine == "ptrace" or Feature.SLEEPABLE_UPROBE in Features()
        assert shown(build, run, engine, process) == {EMPTY if waits else FAULT}


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_others_lose_nothing_by_such_a_process(
    build: Builder, sandbox: Sandbox, target: Service, hostile: subprocess.Popen[str], engine: str
) -> None:
    honest = f'name = "{target.library}"\noffset = write_file\nlog 0\nexit\n'
    source = sandbox.write("honest.rpn", honest)
    sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as honest")
    source = sandbox.write("hostile.rpn", program(build("silentargs.c", "-pthread")))
    sandbox(f"dprobes insert {source} --engine {engine} -p {hostile.pid} --as hostile")
    assert hostile.stdin is not None
    hostile.stdin.write("x")
    hostile.stdin.flush()
    target.call("write_file", CALLS)
    sandbox("dprobes query")
    assert str(build("silentargs.c", "-pthread")) in sandbox(f"dprobes list --pid {hostile.pid}")
    await_true(lambda: sandbox.counts("honest")[0] == CALLS, "all hits of the other program")
    sandbox("dprobes remove --name hostile")
    target.end()
