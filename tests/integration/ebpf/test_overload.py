"""The overload guard of programs in the kernel: what takes too much of a CPU is thinned, then disabled; all is said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached, is_attached
from integration.overload import EMPTY, LONG, await_records, endless, skipped
from integration.support import await_message, await_true

if TYPE_CHECKING:
    from integration.support import Builder, Runner

ENGINE = ("--engine", "ebpf")
LESS = "hint: the other hits are counted as skipped; '--overhead off' runs it at each hit\n"
MORE = "hint: allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often\n"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def test_a_handler_that_takes_too_long_runs_at_some_hits_only(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    client, output = run.start(f"vars = 1\n{LONG.format(path=path)}", [], [*ENGINE, "--overhead", "2%"])
    await_attached(client)
    with endless(path, 500) as target:
        said = await_message(client, LESS)
        await_records(output, 4)
        calls = target.end()
    result = run.end(client, output)
    counts = result.counts[1]
    assert counts.hits == calls == counts.records + skipped(result)
    assert (counts.lost, len(result.records)) == (0, counts.records)
    assert 0 < counts.records < calls
    assert re.search(
        r"^dprobes: warning: 0,1 at spot: \d+ hits a second took [\d.]+% of a CPU, where 2% are allowed: its handler "
        r"runs at one hit of \d+ from now on$",
        said,
        re.MULTILINE,
    )
    assert "is disabled" not in said + result.stderr


@pytest.mark.parametrize(("options", "budget", "handler"), [((), "25%", "abort"), (("--overhead", "1"), "1%", "exit")])
def test_a_place_that_is_hit_too_often_is_left(
    build: Builder, run: Runner, options: tuple[str, ...], budget: str, handler: str
) -> None:
    path = build("endless.c")
    client, output = run.start(EMPTY.format(path=path, handler=handler), [], [*ENGINE, *options])
    await_attached(client)
    with endless(path, 0) as target:
        said = await_message(client, MORE)
        calls = target.end()
    await_true(lambda: not is_attached(client.pid), "the end of the probepoint")  # though the run goes on
    result = run.end(client, output)
    counts = result.counts[1]
    assert counts.hits < calls
    if handler == "exit":
        assert counts.hits == counts.records + counts.lost + skipped(result)
    assert re.search(
        rf"^dprobes: warning: 0,1 at spot is disabled: \d+ hits a second took [\d.]+% of a CPU, where {budget} are "
        r"allowed$",
        said,
        re.MULTILINE,
    )


def test_what_takes_little_is_left_alone(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    client, output = run.start(EMPTY.format(path=path, handler="exit"), [], ENGINE)
    await_attached(client)
    with endless(path, 2000) as target:
        await_records(output, 1000)  # some looks long
        calls = target.end()
    result = run.end(client, output)
    counts = result.counts[1]
    assert (counts.hits, counts.records, counts.lost, len(result.records)) == (calls, calls, 0, calls)
    assert "overhead" not in result.stderr


def test_the_processes_of_a_command_have_no_limit_unless_it_is_given(build: Builder, run: Runner) -> None:
    path = build("endless.c")
    result = run(
        EMPTY.format(path=path, handler="abort"), ["--", "sh", "-c", f"sleep 3 | {path}"], ENGINE
    )  # some looks long
    assert (result.counts[1].hits, skipped(result)) == (int(result.stdout), 0)
    assert "overhead" not in result.stderr
