"""The overload guard of the ptrace engine: the tracer's own time is watched, if that is asked for."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from integration.overload import EMPTY, LONG, await_records, endless, skipped
from integration.support import await_breakpoint, await_message, await_true, code_is_original

if TYPE_CHECKING:
    from integration.support import Builder, Runner

LESS = "hint: the other hits are counted as skipped; '--overhead off' runs it at each hit\n"
MORE = "hint: allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often\n"


def test_a_handler_that_takes_too_long_runs_at_some_hits_only(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    with endless(path, 10_000) as target:
        source = f"vars = 1\n{LONG.format(path=path)}"
        client, output = run.start(source, ["-p", str(target.pid)], ["--overhead", "5%"])
        await_breakpoint(target.pid, path, "spot")
        said = await_message(client, LESS)
        await_records(output, 4)
        result = run.end(client, output)
        assert code_is_original(target.pid, path)
        assert target.end() >= result.counts[1].hits
    counts = result.counts[1]
    assert counts.hits == counts.records + skipped(result)
    assert 0 < counts.records < counts.hits
    assert (counts.lost, len(result.records)) == (0, counts.records)
    assert re.search(
        r"^dprobes: warning: 0,1 at spot: \d+ hits a second took [\d.]+% of a CPU, where 5% are allowed: its handler "
        r"runs at one hit of \d+ from now on$",
        said,
        re.MULTILINE,
    )


def test_a_place_that_is_hit_too_often_is_left(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    with endless(path, 0) as target:
        client, output = run.start(
            EMPTY.format(path=path, handler="exit"), ["-p", str(target.pid)], ["--overhead", "1%"]
        )
        said = await_message(client, MORE)
        await_true(lambda: code_is_original(target.pid, path), "the end of the breakpoint")  # though the run goes on
        result = run.end(client, output)
        assert target.end() > result.counts[1].hits
    counts = result.counts[1]
    assert counts.hits == counts.records + counts.lost + skipped(result)
    assert re.search(
        r"^dprobes: warning: 0,1 at spot is disabled: \d+ hits a second took [\d.]+% of a CPU, where 1% are allowed$",
        said,
        re.MULTILINE,
    )


def test_what_takes_little_is_left_alone(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    some_looks = ["--", "sh", "-c", f"sleep 3 | {path} 20000"]
    result = run(EMPTY.format(path=path, handler="exit"), some_looks, ["--overhead", "100%"])
    assert (result.counts[1].hits, result.counts[1].records) == (int(result.stdout), int(result.stdout))
    assert "overhead" not in result.stderr


def test_there_is_no_limit_unless_it_is_given(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    some_looks = ["--", "sh", "-c", f"sleep 3 | {path}"]
    for options in ((), ("--overhead", "off")):
        result = run(EMPTY.format(path=path, handler="abort"), some_looks, options)
        assert result.counts[1].hits == int(result.stdout)
        assert "overhead" not in result.stderr


def test_an_overhead_that_is_none_is_refused(build: Builder, run: Runner) -> None:
    result = run(EMPTY.format(path=build("endless.c"), handler="exit"), ["-p", str(os.getpid())], ["--overhead", "2x"])
    assert result.status == 2
    assert (
        "Invalid value for '--overhead': an overhead is more than 0 and at most 100 percent of a CPU, not '2x'; "
        "write it as 10% or 10; 'off' is for no limit\n"
    ) in result.stderr
