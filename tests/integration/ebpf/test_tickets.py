"""Pass count, max hits and ``remove`` count hits whose instruction completes; ptrace is what eBPF is compared with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

EBPF = ("--engine", "ebpf")
ENGINES = pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
SOURCE = "name = repair\noffset = {offset}\nminor = 1\n{header}\npush r, arg1\nlog 1\n{end}\n"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def faulted(result: Result, minor: int = 1) -> int:
    found = re.search(rf"^0,{minor}  (\d+) handler runs? at \S+ left no record, because the instruction faulted$",
                      result.stderr, re.MULTILINE)  # fmt: skip
    return int(found[1]) if found else 0


@ENGINES
@pytest.mark.parametrize("offset", ["touch", "tou[a-d]h"])
@pytest.mark.parametrize(
    ("header", "end", "values", "passed", "runs"),
    [
        ("maxhits = 1", "exit", [0], 0, 1),
        ("maxhits = 3", "exit", [0, 1, 2], 0, 3),
        ("maxhits = 6", "exit", [0, 1, 2, 3, 4, 5], 0, 6),
        ("passcount = 2", "exit", [2, 3, 4, 5], 2, 4),
        ("passcount = 1; maxhits = 2", "exit", [1, 2], 1, 2),
        ("passcount = 1", "remove", [1], 1, 1),
        ("", "remove", [0], 0, 1),
        ("maxhits = 2; logonfault = yes", "exit", [0, 0], 0, 0),
    ],
)
def test_a_hit_whose_instruction_faults_takes_nothing_from_a_limit(
    build: Builder,
    run: Runner,
    engine: str,
    offset: str,
    header: str,
    end: str,
    values: list[int],
    passed: int,
    runs: int,
) -> None:
    """Each write faults, is repaired, and is done again: that is one hit."""
    source = SOURCE.format(offset=offset, header=header, end=end)
    result = run.command(source, build("repair.c"), 6, options=("--engine", engine))
    assert result.stdout == "6\n"
    assert [words[0] for words in result.words()] == values
    counts = result.counts[1]
    assert (counts.hits, counts.records, counts.passed) == (len(values) + passed, len(values), passed)
    assert faulted(result) == runs


def test_a_limit_is_used_up_to_the_last_hit_by_many_threads(build: Builder, run: Runner) -> None:
    """Every other hit of each thread faults: the limit is reached by those that do not, all of which have a record."""
    source = "name = jumps\noffset = at_load\nminor = 1\nmaxhits = 800\npush r, arg0\nlog 1\nexit\n"
    result = run.command(source, build("jumps.c"), 400, 8, options=EBPF)
    assert result.stdout == "1600 1600\n"
    counts = result.counts[1]
    assert (counts.hits, counts.records, counts.passed, len(result.records)) == (800, 800, 0, 800)
    assert 8 not in {words[0] for words in result.words()}


@ENGINES
def test_who_was_hit_but_always_faulted_is_not_said_to_be_never_reached(
    build: Builder, run: Runner, engine: str
) -> None:
    source = "name = crash\noffset = main\nminor = 1\nmaxhits = 1\nexit\n"
    result = run(source, ["--", str(build("crash.S"))], ["--engine", engine])
    assert "the probepoints were inserted, but the probed instruction faulted at every hit" in result.stderr
    assert (result.counts[1].hits, faulted(result)) == (0, 1)
