"""Watchpoints that no debug register holds: counts against programs that know them, and what is left after a kill."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.target.process_maps import mappings_of
from integration.support import (
    TIMEOUT,
    await_line,
    await_message,
    await_true,
    is_traced,
    read_result,
    running,
    tracer_of,
)

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

pytestmark = pytest.mark.usefixtures("page_protection")

OBJECT = "name = protected\naddress = shared+1000:shared+1099\nwatchpoint = w\nminor = 1\npush 1\nlog 1\nexit\n"


def neighbours(result: Result) -> dict[int, int]:
    """Return the numbers of neighbours that the summary names, by minor code."""
    found = re.finditer(r"^\d+,(\d+)  (\d+) writes? to the pages of .* did not touch it", result.stderr, re.MULTILINE)
    return {int(each[1]): int(each[2]) for each in found}


def check(result: Result, hits: int, others: int) -> None:
    counts = result.counts[1]
    assert (counts.hits, counts.records, counts.lost) == (hits, hits, 0)
    assert neighbours(result) == ({1: others} if others else {})
    assert "protected page" in result.stderr


def test_every_write_of_eight_threads_is_a_hit_or_a_neighbour(build: Builder, run: Runner) -> None:
    result = run.command(OBJECT, build("protected.c", "-pthread"), "threads", 40, 8)
    assert result.stdout == "320 320 0\n"
    check(result, 320, 320)


def test_writes_of_the_kernel_are_hits(build: Builder, run: Runner) -> None:
    result = run.command(OBJECT, build("protected.c", "-pthread"), "reads", 25, 8)
    assert result.stdout == "200 200 200\n"
    check(result, 400, 200)


def test_children_of_fork_are_watched(build: Builder, run: Runner) -> None:
    result = run.command(OBJECT, build("protected.c", "-pthread"), "fork", 10, 6)
    assert result.stdout == "60 60 0\n"
    check(result, 60, 60)
    assert len({record["pid"] for record in result.records}) == 6


def test_a_program_without_children_is_not_followed(build: Builder, run: Runner) -> None:
    result = run.command(OBJECT, build("protected.c", "-pthread"), "fork", 10, 3, options=["--no-follow"])
    assert result.stdout == "30 30 0\n"
    assert result.counts[1].hits == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_sixty_four_ranges_agree_with_a_model(build: Builder, run: Runner, seed: int) -> None:
    count, size = 200, 8 * 4096
    state, writes = 12345, []
    for number in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        writes.append(((state >> 33) % (size - 8), 1 << number % 4))
    chance = random.Random(seed)
    ranges: dict[tuple[int, int], None] = {(0, 10_000): None}
    while len(ranges) < 64:
        length = chance.choice([chance.randint(1, 10), chance.randint(1, 300), chance.randint(1, 10_000)])
        ranges[chance.randrange(size - length), length] = None
    source = "name = protected\n" + "".join(
        f"address = area+{start}:area+{start + length - 1}\nwatchpoint = w\nminor = {minor}\npush 1\nlog 1\nexit\n"
        for minor, (start, length) in enumerate(ranges)
    )
    result = run.command(source, build("protected.c", "-pthread"), "pieces", count, options=["--rows", "64"])
    expected = {
        minor: sum(at < start + length and start < at + width for at, width in writes)
        for minor, (start, length) in enumerate(ranges)
    }
    assert len(result.records) == sum(expected.values())
    for minor, hits in expected.items():
        assert sum(record["minor"] == minor for record in result.records) == hits


def test_reads_get_the_debug_registers_and_writes_the_pages(build: Builder, run: Runner) -> None:
    definitions = [("w", "bytes"), *(("rw", f"bytes+{n}") for n in range(1, 5)), ("w", "bytes+9:bytes+11")]
    source = "name = watched\n" + "".join(
        f"address = {place}\nwatchpoint = {access}\nminor = {minor}\npush 1\nlog 1\nexit\n"
        for minor, (access, place) in enumerate(definitions)
    )
    result = run.command(source, build("watched.c"), "parts")
    assert {minor: count.hits for minor, count in result.counts.items()} == {0: 2, 1: 2, 2: 2, 3: 2, 4: 2, 5: 4}
    rows = re.findall(r"^\d+,(\d+) .*?(debug register|protected page)$", result.stderr, re.MULTILINE)
    assert {int(minor): way for minor, way in rows} == {
        0: "protected page", 1: "debug register", 2: "debug register", 3: "debug register", 4: "debug register",
        5: "protected page",
    }  # fmt: skip


def test_a_range_that_is_too_long(build: Builder, run: Runner) -> None:
    source = OBJECT + "address = area:area+10000\nwatchpoint = w\nminor = 2\nexit\n"
    result = run.command(source, build("protected.c", "-pthread"), "threads", 1, 1)
    assert re.search(
        r"WATCHPOINT_LEN_INVALID: 10001 bytes at 0x[0-9a-f]+, but protected pages watch at most 10000 bytes; "
        "not inserted",
        result.stderr,
    )
    assert result.counts[1].hits == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.torture) for n in range(1, 31))])
def test_a_killed_tracer_harms_nothing(build: Builder, run: Runner, seed: int) -> None:
    """The kills are at random moments of a program that does nothing but write to the page."""
    chance = random.Random(seed)
    with running(build("protected.c", "-pthread"), "endless", 0, 4) as target:
        assert await_line(target) == "ready\n"
        for _ in range(10):
            kill_the_tracer(run, target.pid, chance.random() / 50)
            assert target.poll() is None
        target.send_signal(signal.SIGUSR1)
        assert await_line(target) == "right\n"
        assert target.wait(TIMEOUT) == 0


def kill_the_tracer(run: Runner, pid: int, delay: float, *options: str) -> None:
    """Watch a process until the first record, and kill the tracer ``delay`` seconds later."""
    process, output = run.start(OBJECT, ["-p", str(pid)], list(options))
    await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
    time.sleep(delay)
    os.kill(tracer_of(pid), signal.SIGKILL)
    assert read_result(process, output).status == 1
    await_true(lambda: not is_traced(pid), "the end of tracing")


def test_a_run_ends_while_threads_write_without_a_pause(build: Builder, run: Runner) -> None:
    with running(build("protected.c", "-pthread"), "endless", 0, 4) as target:
        assert await_line(target) == "ready\n"
        process, output = run.start(OBJECT, ["-p", str(target.pid)])
        await_true(lambda: output.exists() and output.stat().st_size > 0, "a record")
        result = run.end(process, output)
        assert result.status == 0, result.stderr
        assert result.counts[1].hits >= 1
        assert neighbours(result)[1] >= 1
        target.send_signal(signal.SIGUSR1)
        assert await_line(target) == "right\n"


def test_the_overload_guard_counts_neighbours(build: Builder, run: Runner) -> None:
    """The program never writes to the object, only beside it, and is free again when the watchpoint is disabled."""
    with running(build("protected.c", "-pthread"), "beside", 0, 2) as target:
        assert await_line(target) == "ready\n"
        process, output = run.start(OBJECT, ["-p", str(target.pid)], ["--overhead", "1%"])
        said = await_message(process, "0,1 at shared+0x3e8 is disabled: ")
        result = run.end(process, output)
        assert re.search(
            r"^dprobes: warning: 0,1 at shared\+0x3e8 is disabled: "
            r"\d+ hits and neighbours a second took [\d.]+% of a CPU, where 1% are allowed$",
            said,
            re.MULTILINE,
        )
        assert result.counts[1].hits == 0
        before = neighbours(result)[1]
        target.send_signal(signal.SIGUSR1)
        assert await_line(target) == "right\n"
        assert before > 0


def test_the_restorer_of_the_inline_engine_unmaps_the_copies(build: Builder, run: Runner) -> None:
    with running(build("protected.c", "-pthread"), "endless", 0, 4) as target:
        assert await_line(target) == "ready\n"
        kill_the_tracer(run, target.pid, 0, "--engine", "inline")
        assert not [m for m in mappings_of(target.pid) if m.permissions == "r-xp" and not m.path]
        target.send_signal(signal.SIGUSR1)
        assert await_line(target) == "right\n"
        assert target.wait(TIMEOUT) == 0
