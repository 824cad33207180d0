"""Several programs of the ptrace engine for one process: the manager has one tracer for all of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.insessions import on_demand
from integration.manager.sandbox import rows
from integration.support import (
    DPROBES,
    TIMEOUT,
    await_true,
    children_of,
    code_is_original,
    command_of,
    is_traced,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox, Service
    from integration.support import Builder

OF_LIBRARY = 'name = "{0}"\nvars = 1\noffset = write_file\nminor = 1\ninc lv, 0\nexit\n'
OF_PROGRAM = 'name = "{0}"\noffset = call\nminor = 2\nexit\n'
WRITES_AND_RELEASES = OF_LIBRARY + "offset = release_memory\nminor = 3\nexit\n"


class Insertions:
    """Insert programs into a process with the ptrace engine."""

    def __init__(self, sandbox: Sandbox, target: Service) -> None:
        self.sandbox = sandbox
        self.target = target

    def __call__(self, text: str, options: str = "", pid: int = 0) -> str:
        return self.sandbox(self.line(text, options, pid))

    def line(self, text: str, options: str = "", pid: int = 0) -> str:
        source = self.sandbox.write("p.rpn", text)
        return f"dprobes insert {source} --engine ptrace -p {pid or self.target.pid} {options}"


@pytest.fixture
def insert(sandbox: Sandbox, target: Service) -> Insertions:
    return Insertions(sandbox, target)


def ticks(target: Service) -> str:
    return OF_LIBRARY.format(target.library)


def test_a_second_program_is_inserted_into_the_descendants_that_the_first_one_leaves_out(
    sandbox: Sandbox, build: Builder, insert: Insertions
) -> None:
    program = build("generations.c")
    with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        text = f'name = "{program}"\noffset = step\nexit\n'
        try:
            insert(text, "--as alone --no-follow", pids[0])
            assert [is_traced(pid) for pid in pids] == [True, False, False]
            insert(text, "--as all", pids[0])
            assert [is_traced(pid) for pid in pids] == [True] * 3
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
                assert int(process.stdout.readline()) == pid
            await_true(lambda: sandbox.counts("all") == {0: 15}, "all hits")
            assert sandbox.counts("alone") == {0: 5}
            sandbox("dprobes remove --name all")
            assert [is_traced(pid) for pid in pids] == [True, False, False]
            assert all(code_is_original(pid, program) for pid in pids[1:])
        finally:
            process.kill()


def test_programs_of_two_modules_and_two_of_one(sandbox: Sandbox, target: Service, insert: Insertions) -> None:
    insert(ticks(target))
    tracer = tracer_of(target.pid)
    said = insert(OF_PROGRAM.format(target.program))
    assert "1 of 1 probepoints active" in said
    insert(WRITES_AND_RELEASES.format(target.library), "--as both")
    insert(f'name = "{target.library}"\nmajor = 7\noffset = release_memory\nmaxhits = 2\nminor = 4\nexit\n', "--merge")
    assert tracer_of(target.pid) == tracer
    target.call("write_file", 5, threads=2)
    target.call("release_memory", 3)
    library, program = str(target.library), str(target.program)

    def hits() -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for each in sandbox.json("dprobes query --json")["programs"]:
            counts = {probe["minor"]: probe["counts"]["hits"] for probe in each["probes"]}
            found.setdefault(each["name"], {}).update(counts)
        return found

    expected = {library: {1: 10, 4: 2}, program: {2: 3}, "both": {1: 10, 3: 3}}
    await_true(lambda: hits() == expected, "the hits of all")
    variables = sandbox.json("dprobes getvars --local --json")["programs"]
    assert {each["name"]: each["locals"] for each in variables} == {library: [10], "both": [10]}
    sandbox(f"dprobes remove --name {program}")
    sandbox("dprobes remove 0,3")
    target.call("write_file", 1)
    target.call("release_memory", 1)
    await_true(lambda: hits() == {library: {1: 11, 4: 2}, "both": {1: 11, 3: 3}}, "the hits of the others")
    sandbox(f"dprobes remove --name {library}")
    target.call("write_file", 1)
    await_true(lambda: hits() == {"both": {1: 12, 3: 3}}, "the hits of the last one")
    assert tracer_of(target.pid) == tracer
    sandbox("dprobes remove --name both")
    assert not is_traced(target.pid)
    assert code_is_original(target.pid, target.library)
    assert code_is_original(target.pid, target.program)
    records = sandbox("dprobes log --format json").splitlines()
    assert len(records) == 11 + 2 + 3 + 12 + 3
    target.end()


def test_one_of_two_programs_is_replaced(sandbox: Sandbox, target: Service, insert: Insertions) -> None:
    insert(ticks(target), "--as first")
    insert(ticks(target), "--as second")
    target.start("write_file", 20_000, threads=2)
    for _ in range(10):
        insert(ticks(target), "--as first --replace")
    target.finish(40_000)
    await_true(lambda: sandbox.counts("second") == {1: 40_000}, "all hits of the other one")
    (described,) = sandbox.json("dprobes getvars --name second --json")["programs"]
    assert described["locals"] == [40_000]
    # Each of the other hits is one of exactly one of the programs that were called so.
    records = len(sandbox("dprobes log --format json").splitlines())
    assert records == 80_000
    target.end()


def traced_below(pid: int, program: Path) -> list[int]:
    """Return the traced processes of a program that a process has started, at any distance."""
    found = [child for child in children_of(pid) if is_traced(child) and command_of(child).startswith(f"{program}\0")]
    return found + [each for child in children_of(pid) for each in traced_below(child, program)]


def test_a_started_command_takes_a_second_program(sandbox: Sandbox, target: Service, insert: Insertions) -> None:
    source = sandbox.write("first.rpn", ticks(target))
    process = sandbox.start(
        f"dprobes insert {source} --engine ptrace --as first -- {target.program} > inserted", stdin=subprocess.PIPE
    )
    await_true(lambda: len(traced_below(process.pid, target.program)) == 1, "the command being traced")
    (pid,) = traced_below(process.pid, target.program)
    await_true(lambda: "inserted" in (sandbox.directory / "inserted").read_text(), "the first program")
    insert(ticks(target), "--as second", pid=pid)
    process.communicate("write_file 9\n", timeout=TIMEOUT)
    await_true(lambda: sandbox.counts("first") == sandbox.counts("second") == {1: 9}, "the hits of both")
    await_true(lambda: all(p["ended"] for p in sandbox.json("dprobes query --json")["programs"]), "the end of both")


@pytest.mark.parametrize("whose", ["manager", "tracer"])
def test_nothing_remains_of_two_programs_when_one_is_killed(
    sandbox: Sandbox, target: Service, insert: Insertions, whose: str
) -> None:
    insert(ticks(target), "--as first")
    insert(WRITES_AND_RELEASES.format(target.library), "--as second")
    target.call("write_file", 5)
    if whose == "manager":
        sandbox.kill()
    else:
        os.kill(tracer_of(target.pid), signal.SIGKILL)
    await_true(lambda: not is_traced(target.pid) and code_is_original(target.pid, target.library), "the original code")
    target.call("write_file", 100)
    target.call("release_memory", 100)
    if whose == "tracer":
        programs = sandbox.json("dprobes query --json")["programs"]
        await_true(lambda: all(p["ended"] for p in sandbox.json("dprobes query --json")["programs"]), "their end")
        assert [program["name"] for program in programs] == ["first", "second"]
        sandbox("dprobes remove --all")
    insert(ticks(target), "--as first")
    insert(ticks(target), "--as second")
    target.call("write_file", 3)
    await_true(lambda: sandbox.counts("first") == sandbox.counts("second") == {1: 3}, "the hits of new ones")
    target.end()


def test_programs_are_inserted_and_removed_by_many_at_once(
    sandbox: Sandbox, target: Service, insert: Insertions
) -> None:
    insert(ticks(target), "--as always")
    source = sandbox.write("p.rpn", ticks(target))
    target.start("write_file", 60_000, threads=2)
    line = (
        f"for n in 1 2 3; do dprobes insert {source} --engine ptrace -p {target.pid} --as {{0}} && "
        "dprobes remove --name {0}; done"
    )
    clients = [sandbox.start(line.format(f"p{number}")) for number in range(4)]
    for client in clients:
        _, stderr = client.communicate(timeout=TIMEOUT)
        assert client.returncode == 0, stderr
    target.finish(120_000)
    await_true(lambda: sandbox.counts("always") == {1: 120_000}, "every hit of the one that stays")
    assert rows(sandbox("dprobes query"))
    sandbox("dprobes stop")
    assert not is_traced(target.pid)
    assert code_is_original(target.pid, target.library)
    target.end()


def test_the_process_of_another_dprobes_is_refused(sandbox: Sandbox, target: Service, insert: Insertions) -> None:
    source = sandbox.write("run.rpn", ticks(target))
    with running(*DPROBES, "run", source, "--engine", "ptrace", "-p", target.pid) as other:
        await_true(lambda: is_traced(target.pid), "the process being traced")
        assert sandbox.refused(insert.line(ticks(target), "--as svc")) == (
            f"dprobes: error: process {target.pid} (service) is already traced by the dprobes of process "
            f"{other.pid}, which began with a program for '{target.library}'\n"
            "hint: a process has one tracer: insert all programs with 'dprobes insert', which lets them share it, "
            "or use --engine ebpf\n"
        )
        other.send_signal(signal.SIGINT)
        assert other.wait(TIMEOUT) in (0, 130)
    insert(ticks(target), "--as svc")
    target.call("write_file", 1)
    await_true(lambda: sandbox.counts("svc") == {1: 1}, "the hit")


def test_the_file_of_several_programs_is_in_memory_once(
    sandbox: Sandbox, build: Builder, tmp_path: Path, engine: str
) -> None:
    size = 16 << 20
    path = tmp_path / "large"
    shutil.copy(build("ondemand.c", "-pthread"), path)
    with path.open("ab") as file:
        file.write(os.urandom(size))

    def memory() -> int:
        text = Path(f"/proc/{sandbox.manager}/smaps_rollup").read_text()
        return int(re.findall(r"^Pss_Anon: +(\d+) kB$", text, re.MULTILINE)[0]) << 10

    with on_demand(path) as target:
        source = sandbox.write("p.rpn", f'name = "{path}"\noffset = stepped\nminor = 1\nexit\n')
        line = f"dprobes insert {source} --engine {engine} -p {target.process.pid}"
        sandbox(f"{line} --as first")
        before = memory()
        assert before > size
        for number in range(4):
            sandbox(f"{line} --as other{number}")
        # Each is inserted by a thread of its own.
        for process in [sandbox.start(f"{line} --as other{number}") for number in range(4, 8)]:
            _, stderr = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 0, stderr
        # A program without the file takes some 100 KB, threads that work at the same time a megabyte.
        assert memory() - before < size // 2
        target.say("call 3")
        assert {sandbox.counts(f"other{number}")[1] for number in range(8)} == {3}
        assert target.end() == 0
