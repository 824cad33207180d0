"""Handlers in the process know its threads, whichever C library it has, and wherever it has that."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import TIMEOUT, await_line, await_traced, await_true, memory_at, running

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

OPTIONS = ["--engine", "inline", "--log", "ALL"]
SOURCE = "name = threadids\noffset = work\nminor = 1\npush r, arg0\npush tid\nlog 2\nexit\n"
COUNT = 100
LIBRARIES = pytest.mark.parametrize(
    ("compiler", "flags"), [("gcc", ()), ("gcc", ("-static",)), ("musl-gcc", ())], ids=["glibc", "static", "musl"]
)


def check(result: Result) -> None:
    """Compare what handlers have taken for the id of a thread with what the kernel has told the program."""
    assert result.status == 0, result.stderr
    assert len(result.records) == 4 * COUNT
    threads = {(record["pid"], record["tid"]) for record in result.records}
    assert len(threads) == 4
    assert len({pid for pid, _ in threads}) == 2
    for record, (tid, own) in zip(result.records, result.words(1), strict=True):
        assert tid == own == record["tid"]


@LIBRARIES
def test_each_record_has_the_thread(build: Builder, run: Runner, compiler: str, flags: tuple[str, ...]) -> None:
    result = run(SOURCE, ["--", str(build("threadids.c", *flags, compiler=compiler))], OPTIONS)
    check(result)
    ways = {way.partition(" (")[0] for way in result.counts[1].executed.split(", ")}
    # The loader of musl says that libraries are there when their constructors have run.
    assert "inline" in ways if compiler == "musl-gcc" else ways == {"inline"}


@LIBRARIES
def test_so_it_has_in_a_process_that_runs(build: Builder, run: Runner, compiler: str, flags: tuple[str, ...]) -> None:
    program = build("threadids.c", *flags, compiler=compiler)
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        original = memory_at(target.pid, program, "work", 4)
        client, output = run.start(SOURCE, ["-p", str(target.pid)], OPTIONS)
        await_traced(target.pid)
        await_true(lambda: memory_at(target.pid, program, "work", 4) != original, "a jump", TIMEOUT)
        assert target.stdin is not None
        target.stdin.write("go\n")
        target.stdin.flush()
        assert target.wait(TIMEOUT) == 0
        result = run.end(client, output)
        check(result)
        assert {way.partition(" (")[0] for way in result.counts[1].executed.split(", ")} == {"inline"}
