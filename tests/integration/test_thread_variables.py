"""Variables of threads: each has its own, zero at first, until it ends or executes a program; in both engines alike."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder, Runner

ENGINES = ("ptrace", "ebpf")

SOURCE = """
name = threadvariables
tvars = 3
offset = tick
inc tv, 2
push tv, 2
push r, arg0
log 2
push 1
push 2
log tv
exit
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_each_thread_counts_for_itself(build: Builder, run: Runner, engine: str) -> None:
    threads, calls = 8, 50
    program = build("threadvariables.c")
    result = run.command(SOURCE, program, threads, calls, options=("--engine", engine))
    lives = 2 * threads + 1 + 1 + 1  # of threads; the child; what it executes
    assert result.counts[0].hits == result.counts[0].records == lives * calls + 1
    seen = [bytes.fromhex(record["data"]) for record in result.records]
    words = [[int.from_bytes(data[n : n + 8], "little") for n in (0, 8)] for data in seen]
    assert all(expected == found for expected, found in words)
    assert Counter(expected for expected, _ in words) == {n: lives + (n == 1) for n in range(1, calls + 1)}
    assert [data[16:] for data in seen] == [
        b"\x0b\x02\0" + bytes(8) + expected.to_bytes(8, "little") for expected, _ in words
    ]
    assert len({record["tid"] for record in result.records}) >= threads


@pytest.mark.parametrize("engine", ENGINES)
def test_more_threads_than_have_room_one_after_another(build: Builder, run: Runner, engine: str) -> None:
    # Each leaves its room to others: with 1024 variables an engine has room for some thousand threads.
    source = "name = threads\ntvars = 1024\noffset = tick\ninc tv, 1023\npush tv, 1023\nlog 1\nexit\n"
    result = run.command(source, build("threads.c"), 2, 600, "short", options=("--engine", engine))
    assert (result.counts[0].hits, result.counts[0].records) == (1200, 1200)
    assert result.words(0) == [[1]] * 1200


@pytest.mark.parametrize("engine", ENGINES)
def test_programs_have_variables_of_their_own(build: Builder, run: Runner, engine: str) -> None:
    source = "name = hotloop\ntvars = 1\noffset = tick\ninc tv, 0\npush tv, 0\nlog 1\nexit\n"
    result = run.command(source, build("hotloop.c"), 4, options=("--engine", engine))
    assert result.words(0) == [[1], [2], [3], [4]]
