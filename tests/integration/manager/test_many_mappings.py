"""A process that maps its code as often as it can, and goes on to do so, holds up no run."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.process_maps import PAGE_SIZE, mappings_of
from integration.ebpf.kernel import require_bpf
from integration.support import (
    TIMEOUT,
    as_nobody,
    await_line,
    await_message,
    await_true,
    code_is_original,
    read_memory,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder, Runner

WANTED = 60_000
"""Fewer than a process may have (vm.max_map_count, 65530)."""
CALLS = 200


def program(path: Path) -> str:
    return f'name = "{path}"\noffset = stepped\npush r, arg0\nlog 1\nexit\n'


def ask(target: subprocess.Popen[str], byte: str) -> None:
    """Have the program do something, and wait until it is done."""
    assert target.stdin is not None
    target.stdin.write(byte)
    target.stdin.flush()
    assert await_line(target, TIMEOUT) == f"{byte}\n"


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_the_first_mappings_are_probed(build: Builder, run: Runner, engine: str) -> None:
    path = build("manymaps.c")
    with running(path, WANTED, stdin=subprocess.PIPE) as target:
        assert await_line(target) == f"{WANTED}\n"
        client, output = run.start(program(path), ["-p", str(target.pid)], ["--engine", engine])
        said = await_message(client, "1 probepoint is active")
        ask(target, "x")
        result = run.end(client, output)
        assert code_is_original(target.pid, path)
    warning = f"process {target.pid} maps code of files more than 4096 times: later mappings are not probed"
    assert f"dprobes: warning: {warning}\n" in said
    assert result.words() == [[n] for n in range(10)]


@pytest.mark.parametrize("engine", ["ptrace", "inline"])
def test_code_that_is_mapped_twice_stays_probed_when_more_comes(build: Builder, run: Runner, engine: str) -> None:
    path = build("manymaps.c")
    with running(path, 1, stdin=subprocess.PIPE) as target:
        assert await_line(target) == "1\n"
        client, output = run.start(program(path), ["-p", str(target.pid)], ["--engine", engine])
        await_message(client, "1 probepoint is active")
        for byte in "fxllfx":
            ask(target, byte)
        result = run.end(client, output)
        pages = [
            each for each in mappings_of(target.pid) if each.path == str(path) and each.end - each.start == PAGE_SIZE
        ]
        code = {read_memory(target.pid, each.start, 16) for each in pages if each.executable}
        assert code_is_original(target.pid, path)
    assert result.words() == 4 * [[n] for n in range(10)]
    assert len(code) == 1


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_others_lose_nothing_by_one_that_changes_its_mappings(
    build: Builder, sandbox: Sandbox, target: Service, engine: str
) -> None:
    if engine == "ebpf":
        require_bpf()
    path = build("manymaps.c")
    honest = f'name = "{target.library}"\noffset = write_file\nlog 0\nexit\n'
    source, hostile = sandbox.write("honest.rpn", honest), sandbox.write("hostile.rpn", program(path))
    with running(path, WANTED, "changes", stdin=subprocess.PIPE, **as_nobody()) as process:
        assert await_line(process, TIMEOUT) == f"{WANTED}\n"
        sandbox(f"dprobes insert {source} --engine {engine} -p {target.pid} --as honest")
        sandbox(f"dprobes insert {hostile} --engine {engine} -p {process.pid} --as hostile")
        target.call("write_file", CALLS)
        ask(process, "x")
        await_true(lambda: sandbox.counts("honest")[0] == CALLS, "all hits of the other program")
        sandbox("dprobes remove --name hostile")
        target.call("write_file", CALLS)
        ask(process, "x")
        assert process.poll() is None
    await_true(lambda: sandbox.counts("honest")[0] == 2 * CALLS, "all hits of the other program")
    target.end()


@pytest.mark.parametrize("engine", ["ptrace", "inline", "ebpf"])
def test_a_run_ends_while_mappings_change(build: Builder, run: Runner, engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
    path = build("manymaps.c")
    with running(path, WANTED, "changes", stdin=subprocess.PIPE, **as_nobody()) as target:
        assert await_line(target, TIMEOUT) == f"{WANTED}\n"
        client, output = run.start(program(path), ["-p", str(target.pid)], ["--engine", engine])
        await_message(client, "1 probepoint is active")
        ask(target, "x")
        result = run.end(client, output)
        ask(target, "x")
        assert code_is_original(target.pid, path)
    assert result.words() == [[n] for n in range(10)]
