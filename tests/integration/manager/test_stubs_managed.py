"""Programs behind stubs in the manager: inserted, looked at and removed like all others, several at one stub."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.gdb.processors import PROCESSORS
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Sandbox
    from integration.support import Builder

COUNT = 100
PROGRAM = """module "{path}";
static long calls;
handle(request, n) {{ calls++; printf("%d %s", n, request->name); @names[str(request->name)] = count(); }}
"""


@pytest.fixture
def path(build: Builder) -> Path:
    return PROCESSORS["aarch64"].build(build, "handled.c")


@pytest.fixture
def emulated(path: Path, sandbox: Sandbox) -> Iterator[subprocess.Popen[str]]:
    """A program with a stub at the socket ``stub`` of the sandbox's directory."""
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-aarch64 is not installed")
    command = ["qemu-aarch64", "-L", PROCESSORS["aarch64"].root, "-g", "stub", str(path), str(COUNT), "100000"]
    process = subprocess.Popen(command, cwd=sandbox.directory, stdout=subprocess.PIPE, text=True)
    await_true((sandbox.directory / "stub").is_socket, "the stub's socket")
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=TIMEOUT)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_program_behind_a_stub(
    sandbox: Sandbox, path: Path, emulated: subprocess.Popen[str], *, is_compiled: bool
) -> None:
    source = sandbox.write("handled.dpc", PROGRAM.format(path=path))
    if is_compiled:
        sandbox(f"dprobes build {source} -o handled.ppdf")
        source = sandbox.directory / "handled.ppdf"
    said = sandbox(f"dprobes insert {source} --as handled --engine gdb=stub")
    assert said == "inserted 'handled': 1 of 1 probepoints active\n"
    await_true(lambda: sandbox.counts("handled")[0] > 3, "hits")
    stub = f"{sandbox.directory / 'stub'}"
    assert f"engine gdb, behind the stub {stub}, since" in sandbox("dprobes query --name handled")
    assert sandbox.json("dprobes query --json")["programs"][0]["scope"] == {"endpoint": stub}
    assert "@names[second]: " in sandbox("dprobes getvars --name handled")
    other = sandbox.write("other.dpc", f'module "{path}"; handle {{ @calls = count(); }}')
    said = sandbox(f"dprobes insert {other} --as other --engine gdb={stub}")
    assert said == "inserted 'other': 1 of 1 probepoints active\n"
    await_true(lambda: sandbox.counts("other")[0] > 3, "hits of both")
    removed = sandbox("dprobes remove --name handled")
    assert removed.startswith("removed handled\n")
    counted = int(removed.splitlines()[2].split()[3])
    lines = [line.split("]  ")[1] for line in sandbox("dprobes log").splitlines() if "]  " in line]
    assert lines == [f"{n} {('first', 'second')[n % 2]}" for n in range(counted)]
    more = sandbox.counts("other")[0]
    await_true(lambda: sandbox.counts("other")[0] > more, "hits of the other one alone")
    said = sandbox(f"dprobes insert {other} --as other --replace --engine gdb={stub}")
    assert "1 of 1 probepoints active" in said
    await_true(lambda: 2 < sandbox.counts("other")[0] < COUNT - counted - 3, "hits of what has replaced it")
    output, _ = emulated.communicate(timeout=TIMEOUT)
    assert output == f"{sum((9 if n % 2 else 7) * n for n in range(COUNT))}\n"


def test_the_end_of_the_manager_lets_the_program_go_on(
    sandbox: Sandbox, path: Path, emulated: subprocess.Popen[str]
) -> None:
    source = sandbox.write("handled.dpc", PROGRAM.format(path=path))
    sandbox(f"dprobes insert {source} --as handled --engine gdb=stub")
    await_true(lambda: sandbox.counts("handled")[0] > 3, "hits")
    sandbox.kill()
    output, _ = emulated.communicate(timeout=TIMEOUT)
    assert output == f"{sum((9 if n % 2 else 7) * n for n in range(COUNT))}\n"


def test_the_manager_starts_no_stubs(sandbox: Sandbox) -> None:
    source = sandbox.write("true.dpc", "libc.so.6:abs { @ = count() }")
    with_command = sandbox.refused(f"dprobes insert {source} --engine gdb=stub -c {os.devnull}", 2)
    assert "leave out -c: the probe manager starts no command that has a stub" in with_command
    assert sandbox.refused(f"dprobes insert {source} --engine 'gdb=|gdbserver - true'").splitlines() == [
        "dprobes: error: the probe manager starts no command that has a stub",
        "hint: start it yourself, and name the stub: HOST:PORT or the path of a socket",
    ]
    replayed = sandbox.refused(f"dprobes insert {source} --engine replay=hits", 2)
    assert "a program that is inserted cannot have the replay engine; use 'dprobes run'" in replayed
