"""
A record is emitted, and a hit counted, when the probed instruction has completed; what faults is not yet a hit.

The program repairs each fault in a handler and counts them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

COUNT = 20
KINDS = ("protected", "pointer", "divide", "bus", "stack", "thread")
EACH = [(kind, i386) for i386 in (False, True) for kind in KINDS] + [("bound", True)]
IDS = [f"{'i386' if i386 else 'x86_64'}-{kind}" for kind, i386 in EACH]

PROGRAM = (
    "name = faults\nvars = 1\noffset = at_{kind}\nminor = 1\n{extra}inc lv, 0\npush lv, 0\npush r, eip\nlog 2\nexit\n"
)


def run_kind(build: Builder, run: Runner, kind: str, *, i386: bool, extra: str = "") -> tuple[Result, int]:
    """Return the result, and how many faults the program saw."""
    result = run.command(PROGRAM.format(kind=kind, extra=extra), build("faults.c", i386=i386), kind, COUNT)
    return result, int(result.stdout)


@pytest.mark.parametrize(("kind", "i386"), EACH, ids=IDS)
def test_only_the_attempt_that_succeeds_is_a_hit(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    result, faults = run_kind(build, run, kind, i386=i386)
    assert faults >= COUNT
    assert result.counts[1].hits == result.counts[1].records == len(result.records) == COUNT
    # The handler ran for each attempt; the record is that of the last one.
    runs = [words[1] for words in result.words(size=4 if i386 else 8)]
    assert runs == sorted(runs)
    assert runs[-1] == faults + COUNT


@pytest.mark.parametrize(("kind", "i386"), EACH, ids=IDS)
def test_logonfault_counts_and_keeps_every_attempt(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    result, faults = run_kind(build, run, kind, i386=i386, extra="logonfault = yes\n")
    assert faults >= COUNT
    assert result.counts[1].hits == len(result.records) == faults + COUNT
    runs = [words[1] for words in result.words(size=4 if i386 else 8)]
    assert runs == list(range(1, faults + COUNT + 1))
    assert len({words[0] for words in result.words(size=4 if i386 else 8)}) == 1


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_an_instruction_that_never_completes_is_never_a_hit(build: Builder, run: Runner, i386: bool) -> None:
    result, faults = run_kind(build, run, "skipped", i386=i386)
    assert faults == COUNT
    assert result.records == []
    assert result.counts[1].hits == 0
    result, _ = run_kind(build, run, "skipped", i386=i386, extra="logonfault = yes\n")
    assert result.counts[1].hits == len(result.records) == COUNT


def test_a_fault_does_not_use_up_maxhits_or_passcount(build: Builder, run: Runner) -> None:
    result, faults = run_kind(build, run, "divide", i386=False, extra="passcount = 5\nmaxhits = 6\n")
    assert faults == COUNT
    assert len(result.records) == 6
    assert result.counts[1].hits == 11
