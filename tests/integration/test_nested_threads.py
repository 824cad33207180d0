"""Handlers in processes of nested PID namespaces show, count and tell threads by the ids that they have out here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import (
    TIMEOUT,
    await_breakpoint,
    await_line,
    await_true,
    children_of,
    memory_at,
    read_result,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.support import Builder, Result, Runner

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OPTIONS = ["--engine", "inline", "--log", "ALL"]
SOURCE = (
    "name = nestedthreads\ntvars = 1\noffset = work\nminor = 1\ninc tv, 0\npush tv, 0\n"
    "push r, arg0\npush r, arg1\npush r, arg2\npush tid\nlog 5\nexit\n"
)
COUNT, THREADS, CROWD = 20, 4, 192
LIBRARIES = pytest.mark.parametrize(
    ("compiler", "flags"), [("gcc", ()), ("gcc", ("-static",)), ("musl-gcc", ())], ids=["glibc", "static", "musl"]
)


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made")


class Target:
    """The program, which was started by a command, and runs; ``pid`` is its id out here."""

    def __init__(self, process: subprocess.Popen[str], program: Path, pid: int) -> None:
        self._process = process
        self._program = program
        self.pid = pid
        self._original = memory_at(pid, program, "work", 4)

    def await_jump(self) -> None:
        def has_jump() -> bool:
            found = memory_at(self.pid, self._program, "work", 4)
            return found != self._original and found[:1] != b"\xcc"

        await_true(has_jump, "a jump", TIMEOUT)

    def await_breakpoint(self) -> None:
        await_breakpoint(self.pid, self._program, "work")

    def carry_out(self, letters: str, answer: str = "done\n") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{letters}\n")
        self._process.stdin.flush()
        assert await_line(self._process) == answer

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(TIMEOUT) == 0


@contextlib.contextmanager
def started(program: Path, *before: str) -> Iterator[Target]:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with running(*before, program, proc, stdin=subprocess.PIPE, pass_fds=(proc,)) as process:
            assert await_line(process) == "ready\n"
            yield Target(process, program, children_of(process.pid)[0] if before else process.pid)
    finally:
        os.close(proc)


def ids_in(pid: int) -> dict[int, int]:
    """Return the ids of the threads of a process, each with that in its own namespace."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        (line,) = [each for each in (task / "status").read_text().splitlines() if each.startswith("NSpid:")]
        ids = [int(number) for number in line.split()[1:]]
        assert ids[0] == int(task.name)
        found[ids[0]] = ids[-1]
    return found


def check(result: Result) -> set[tuple[int, int]]:
    """Compare each record with what the kernel calls its thread; return all ids of threads, here and there."""
    assert result.status == 0, result.stderr
    for record, (tid, _, own, pid, _) in zip(result.records, result.words(1), strict=True):
        assert (record["pid"], record["tid"], tid) == (pid, own, own)
        assert record["name"] in ("nestedthreads", "exe")
    return {(own, local) for _, local, own, _, _ in result.words(1)}


def check_variables(result: Result) -> None:
    """See that each thread has counted its own calls."""
    counts: Counter[int] = Counter()
    for _, _, own, _, count in result.words(1):
        counts[own] += 1
        assert count == counts[own]


def check_way(result: Result) -> None:
    assert {way.partition(" (")[0] for way in result.counts[1].executed.split(", ")} == {"inline"}


def followed(run: Runner, target: Target, *options: str, **popen: Any) -> tuple[subprocess.Popen[str], Path]:
    client = run.start(SOURCE, ["-p", str(target.pid)], [*OPTIONS, *options], **popen)
    target.await_jump()
    return client


@LIBRARIES
def test_threads_have_the_ids_that_they_have_here(
    build: Builder, run: Runner, compiler: str, flags: tuple[str, ...]
) -> None:
    """Those that were there before, and those that have ended when their records are read."""
    with started(build("nestedthreads.c", *flags, compiler=compiler), *UNSHARE) as target:
        client = followed(run, target)
        present = ids_in(target.pid)
        assert len(present) == THREADS
        assert all(outer != local for outer, local in present.items())
        target.carry_out("aattaf")
        target.end()
        result = read_result(*client)
    found = check(result)
    assert present.items() <= found
    assert len(found) == THREADS + 4
    assert len(result.records) == 3 * THREADS * COUNT + 2 + COUNT + 1
    check_variables(result)
    check_way(result)


def test_an_id_of_the_namespace_that_is_used_again_is_another_thread(build: Builder, run: Runner) -> None:
    with started(build("nestedthreads.c"), *UNSHARE) as target:
        client = followed(run, target)
        target.carry_out("rr")
        target.end()
        result = read_result(*client)
    found = check(result)
    locals_ = [local for _, local in found]
    assert len(set(locals_)) < len(locals_)
    check_way(result)


def test_a_thread_that_executes_another_program_is_the_first_one_there(build: Builder, run: Runner) -> None:
    with started(build("nestedthreads.c"), *UNSHARE) as target:
        client = followed(run, target)
        target.carry_out("a")
        before = ids_in(target.pid)
        target.carry_out("x", answer="ready\n")
        target.await_jump()
        after = ids_in(target.pid)
        assert before.keys() & after.keys() == {target.pid}
        target.carry_out("at")
        target.end()
        result = read_result(*client)
    found = check(result)
    assert before.items() | after.items() <= found
    assert len(result.records) == 2 * THREADS * COUNT + 1
    check_way(result)


@pytest.mark.parametrize("before", [(), UNSHARE], ids=["here", "nested"])
def test_a_child_in_a_namespace_of_its_own_is_one_of_here(build: Builder, run: Runner, before: tuple[str, ...]) -> None:
    """It has a copy of the handlers of a parent whose ids need no translation, or another one."""
    with started(build("nestedthreads.c"), *before) as target:
        client = followed(run, target)
        present = ids_in(target.pid)
        target.carry_out("an")
        target.end()
        result = read_result(*client)
    found = check(result)
    assert present.items() <= found
    assert {local for outer, local in found - set(present.items())} == {1, 2}
    assert len(result.records) == THREADS * COUNT + COUNT + 1
    check_way(result)


def test_a_process_that_its_c_library_does_not_know_has_no_id_of_another_thread(build: Builder, run: Runner) -> None:
    """The bare system call leaves the id of the parent's thread where the library has it."""
    with started(build("nestedthreads.c"), *UNSHARE) as target:
        client = followed(run, target)
        target.carry_out("sa")
        target.end()
        result = read_result(*client)
    assert result.status == 0, result.stderr
    assert {record["name"] for record in result.records} == {"nestedthreads"}
    unknown = [words for record, words in zip(result.records, result.words(1), strict=True) if not record["tid"]]
    assert len(unknown) == COUNT
    assert all(words[0] == 0 and words[2] != target.pid for words in unknown)
    known = [words for words in result.words(1) if words[0]]
    assert len(known) == THREADS * COUNT
    assert all(words[0] == words[2] for words in known)


def test_more_threads_than_there_is_room_for_are_hit_at_breakpoints(build: Builder, run: Runner) -> None:
    """There are 127 places for 192 threads, by the last parts of their ids there."""
    with started(build("nestedthreads.c"), *UNSHARE) as target:
        client = followed(run, target)
        target.carry_out("ac")
        target.await_breakpoint()
        present = ids_in(target.pid)
        target.carry_out("at")
        target.end()
        result = read_result(*client)
    assert present.items() <= check(result)
    assert len(present) == THREADS + CROWD
    assert len(result.records) == 2 * THREADS * COUNT + 2 + CROWD
    check_variables(result)
    assert "inline" in result.counts[1].executed
    assert "," in result.counts[1].executed


def test_so_it_is_from_the_start(build: Builder, run: Runner, tmp_path: Path) -> None:
    program, letters = build("nestedthreads.c"), tmp_path / "letters"
    letters.write_text("atrf\na\n")
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with letters.open() as file:
            words = ["--", *UNSHARE, str(program), str(proc)]
            result = run(SOURCE, words, OPTIONS, stdin=file, pass_fds=(proc,))
    finally:
        os.close(proc)
    check(result)
    assert result.stdout.count("done") == 2
    assert len(result.records) == 2 * THREADS * COUNT + 1 + 2 + COUNT + 1
    check_variables(result)


def test_tables_have_the_ids_of_here_as_keys(build: Builder, run: Runner) -> None:
    source = "name = nestedthreads\ntable = calls, count, word, word\noffset = work\nminor = 1\n"
    source += "push r, arg1\npush tid\ntally calls\nabort\n"
    with started(build("nestedthreads.c"), *UNSHARE) as target:
        client = run.start(source, ["-p", str(target.pid)], OPTIONS)
        target.await_jump()
        present = ids_in(target.pid)
        target.carry_out("atat")
        target.end()
        result = read_result(*client)
    assert result.status == 0, result.stderr
    counts = {tuple(row["keys"]): row["value"] for row in map(json.loads, result.stdout.splitlines())}
    assert all(own == tid for own, tid in counts)
    assert {tid: counts[tid, tid] for tid in present} == dict.fromkeys(present, 2 * COUNT)
    assert sorted(counts.values()) == [1, 1, *[2 * COUNT] * THREADS]
    check_way(result)
