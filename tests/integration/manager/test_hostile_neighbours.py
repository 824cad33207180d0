"""
A hostile process of another user does to what it shares with runs what it can: they go on, and others lose nothing.

``tests/programs/neighbour.c`` scribbles over memory, unmaps, replaces and protects it, shortens files, swaps
descriptors, forges what killed runs leave, or changes and replaces its files and names, as its seed says.
``tests/programs/lyingstub.py`` changes what a stub says. ``make torture`` has 500 seeds.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import (
    DPROBES,
    NOBODY,
    TIMEOUT,
    as_nobody,
    await_line,
    await_true,
    environment,
    nobody_python,
    running,
)

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder

CALLS = 500
SHORT = (3, 4, 12)
"""Seeds by which runs and managers ended before anything was done about that."""
FILE_SEEDS = [n if n in (0, 1, 3) else pytest.param(n, marks=pytest.mark.torture) for n in range(500)]
STUB_SEEDS = [n if n in (0, 1) else pytest.param(n, marks=pytest.mark.torture) for n in range(500)]
SEEDS = [*SHORT, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(500) if seed not in SHORT)]

HONEST = 'name = "{0}"\nvars = 1\noffset = write_file\nminor = 1\ninc lv, 0\npush lv, 0\nlog 1\nexit\n'
HOSTILE = """name = "{0}"
vars = 2
gvars = 1
table = t, count, word, room = 64
{1}offset = work
minor = 2
inc lv, 0
push lv, 0
log 1
push r, rdi
push 7
and
tally t
{2}exit
"""
PIPED: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
QUIET: dict[str, Any] = {"stderr": subprocess.DEVNULL}
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What disturbs a line or a terminal."""
STACKS = "table = stacks, count, ustack[4], room = 64\n", "tally stacks\n"


def tracebacks(sandbox: Sandbox) -> list[Path]:
    """Return the files of a manager in which it says that something was not foreseen."""
    places = [place for place in (sandbox.state, sandbox.runtime) if place.exists()]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and path.stat().st_size < 1 << 24]
    return [path for path in files if b"Traceback" in path.read_bytes()]


@pytest.fixture
def library(build: Builder, tmp_path: Path) -> Path:
    """A library that belongs to another user, as its directory does."""
    directory = tmp_path / "theirs"
    directory.mkdir()
    made = directory / "libneighbour.so"
    shutil.copy(build("neighbour.c", "-DLIBRARY", "-shared", "-fPIC", name="libneighbour.so"), made)
    for each in (directory, made):
        os.chown(each, NOBODY, NOBODY)
    return made


def hostile_program(program: Path, choose: random.Random) -> str:
    return HOSTILE.format(program, *(STACKS if choose.random() < 0.3 else ("", "")))


class Honest:
    """A program in the manager that must lose no hit, whatever becomes of another one."""

    def __init__(self, sandbox: Sandbox, target: Service) -> None:
        self._sandbox = sandbox
        self._target = target
        self._said: list[subprocess.CompletedProcess[str]] = []
        self._calls = 0
        source = sandbox.write("honest.rpn", HONEST.format(target.library))
        sandbox(f"dprobes insert {source} --engine inline -p {target.pid} --as honest")
        self._manager = sandbox.manager

    def call(self) -> None:
        """Have its function called."""
        self._target.call("write_file", CALLS)
        self._calls += CALLS

    def shell(self, line: str) -> None:
        """Run a line about the other program, which may fail."""
        self._said.append(self._sandbox.shell(line))

    def verify(self) -> None:
        """Raise AssertionError if something was lost, or not foreseen."""
        sandbox = self._sandbox
        assert not [each for each in self._said if "Traceback" in each.stderr or each.returncode not in (0, 1)]
        assert not [each for each in self._said if HARMFUL.search(each.stdout + each.stderr)]
        await_true(lambda: sandbox.counts("honest") == {1: self._calls}, "all hits of the other program")
        assert (sandbox.probes("honest")[0]["counts"]["records"], sandbox.manager) == (self._calls, self._manager)
        sandbox("dprobes remove --name honest")
        records = [json.loads(line) for line in sandbox("dprobes log --format json").splitlines()]
        # The hostile process may write any minor number into records of its own program.
        assert sum(record.get("program") == "honest" for record in records) == self._calls
        assert tracebacks(sandbox) == []
        self._target.end()

    def go_on_beside(self, process: subprocess.Popen[str], *, is_killed: bool) -> None:
        """Call the honest target while the hostile program is asked about, and removed; perhaps after its end."""
        self.call()
        self.shell("dprobes query")
        self.shell("dprobes query --json")
        self.call()
        self.shell("dprobes getvars --name hostile --local")
        if is_killed:
            process.kill()
        self.shell("dprobes remove --name hostile")


@pytest.mark.parametrize("seed", SEEDS)
def test_no_neighbour_can_end_the_manager_or_take_hits_from_others(
    build: Builder, sandbox: Sandbox, target: Service, seed: int
) -> None:
    choose = random.Random(seed)
    program = build("neighbour.c", "-pthread")
    honest = Honest(sandbox, target)
    hostile = sandbox.write("hostile.rpn", hostile_program(program, choose))
    engine = choose.choice(("inline", "inline", "inline", "ptrace"))
    with running(program, seed, **PIPED, **as_nobody()) as process:
        assert await_line(process) == "ready\n"
        honest.shell(f"dprobes insert {hostile} --engine {engine} -p {process.pid} --as hostile")
        honest.go_on_beside(process, is_killed=choose.random() < 0.5)
    honest.verify()


@pytest.mark.parametrize("seed", FILE_SEEDS)
def test_no_neighbour_can_do_so_by_its_files_and_names(
    build: Builder, sandbox: Sandbox, target: Service, library: Path, seed: int
) -> None:
    require_bpf()
    choose = random.Random(seed)
    program = build("neighbour.c", "-pthread")
    honest = Honest(sandbox, target)
    hostile = sandbox.write("hostile.rpn", hostile_program(library, choose))
    engine = ("ebpf", "inline", "ebpf", "ptrace")[seed % 4]
    scope = choose.choice(("-p {0}", "-p {0}", "")).format("{0}") if engine == "ebpf" else "-p {0}"
    with running(program, seed, library, **PIPED, **as_nobody()) as process:
        assert await_line(process) == "ready\n"
        honest.shell(f"dprobes insert {hostile} --engine {engine} {scope.format(process.pid)} --as hostile")
        honest.go_on_beside(process, is_killed=choose.random() < 0.5)
    honest.verify()


@pytest.mark.parametrize("seed", STUB_SEEDS)
def test_no_stub_can_do_so_by_lies(build: Builder, sandbox: Sandbox, target: Service, seed: int) -> None:
    if shutil.which("gdbserver") is None:
        pytest.skip("gdbserver is not installed")
    program = build("neighbour.c", "-pthread", "-DHARMLESS", name="harmless")
    honest = Honest(sandbox, target)
    source = hostile_program(program, random.Random(seed)).replace("offset = work\n", "offset = work\nmaxhits = 200\n")
    hostile = sandbox.write("hostile.rpn", source)
    python, liar = nobody_python(), Path(__file__).parents[2] / "programs" / "lyingstub.py"
    with liar.open() as script, running(python, "-", seed, program, stdin=script, **QUIET, **as_nobody()) as stub:
        port = await_line(stub).strip()
        honest.shell(f"dprobes insert {hostile} --engine gdb=127.0.0.1:{port} --as hostile")
        honest.call()
        honest.shell("dprobes query")
        honest.shell("dprobes query --json")
        honest.call()
        honest.shell("dprobes getvars --name hostile --local")
        honest.shell("dprobes remove --name hostile")
    honest.verify()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_ends_when_it_is_asked_to(build: Builder, tmp_path: Path, seed: int) -> None:
    program = build("neighbour.c", "-pthread")
    source = tmp_path / "hostile.rpn"
    source.write_text(hostile_program(program, random.Random(seed)))
    output, errors = tmp_path / "records", tmp_path / "said"
    with running(program, seed, **PIPED, **as_nobody()) as process, errors.open("w") as said:
        assert await_line(process) == "ready\n"
        client = subprocess.Popen(
            [*DPROBES, "run", source, "--engine", "inline", "-p", str(process.pid), "-o", output],
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=environment(),
        )
        try:
            await_true(lambda: client.poll() is not None or "active" in errors.read_text(), "the probepoint", TIMEOUT)
            await_true(lambda: client.poll() is not None or output.exists(), "the output", TIMEOUT)
            is_there = process.poll() is None
            client.send_signal(signal.SIGINT)
            status = client.wait(TIMEOUT)
        finally:
            client.kill()
            client.wait()
    assert "Traceback" not in errors.read_text()
    # It may be over before that, but only if the process is.
    assert status in ((0,) if is_there else (0, 1)), errors.read_text()
