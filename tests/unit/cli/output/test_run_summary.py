"""The table at the end of a run fits a terminal, and leaves out files in which nothing happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.cli.output.run_summary import summary
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Counts
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.engines.engine_interface import Attachment

LIBC, LIBC32 = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib32/libc.so.6"
PROGRAM = parse_source(SourceFile("p", "name = x\noffset = f\nexit\noffset = g\nexit\n"), Diagnostics())


def told(*probes: tuple[int, str, str, Counts], width: int | None = 80) -> str:
    found: list[Any] = [
        SimpleNamespace(number=number, where=where, path=path, at_return=False) for number, where, path, _ in probes
    ]
    session = SimpleNamespace(probes=found, left_out=[])
    return summary(PROGRAM, cast("Attachment", session), [counts for *_, counts in probes], width)


def test_a_file_in_which_nothing_was_hit_is_one_line() -> None:
    hit = Counts(5, 5, executed=("emulated",))
    idle = Counts(executed=("emulated",))
    assert told((0, "f", LIBC, hit), (0, "f", LIBC32, idle), (1, "g", LIBC, Counts()), (1, "g", LIBC32, idle)) == (
        "probe  place  hits  records  lost  passed  recursed  executed\n"
        "0,0    f         5        5     0       0         0  emulated\n"
        "0,0    g         0        0     0       0         0  -\n"
        f"nothing was hit in {LIBC32}"
    )


def test_several_files_that_were_hit_are_numbered_where_that_is_shorter() -> None:
    hit = Counts(5, 5, executed=("emulated",))
    probes = [(0, "f", LIBC, hit), (0, "f", LIBC32, hit), (1, "g", LIBC, hit)]
    assert told(*probes) == (
        "probe  place  hits  records  lost  executed\n"
        "0,0    f [1]     5        5     0  emulated\n"
        "0,0    f [2]     5        5     0  emulated\n"
        "0,0    g [1]     5        5     0  emulated\n"
        f"[1] {LIBC}\n"
        f"[2] {LIBC32}"
    )
    wide = told(*probes, width=None)
    assert wide == told(*probes, width=200)
    for place in (f"f in {LIBC} ", f"f in {LIBC32} ", f"g in {LIBC} "):
        assert f"0,0    {place}" in wide


def test_if_nothing_was_hit_anywhere_all_is_listed() -> None:
    assert told((0, "f", LIBC, Counts()), (1, "g", LIBC32, Counts())).splitlines()[1:] == [
        "0,0    f [1]     0        0     0  -",
        "0,0    g [2]     0        0     0  -",
        f"[1] {LIBC}",
        f"[2] {LIBC32}",
    ]


@pytest.mark.parametrize("lost", [0, 3])
def test_a_table_that_is_too_wide_is_made_narrow(lost: int) -> None:
    hit = Counts(500_000, 500_000 - lost, lost, executed=("single-stepped",))
    place = "std::vector<int>::push_back"
    assert told((0, place, LIBC, hit), (1, "g", LIBC, hit)) == (
        "probe  place                          hits  records  lost  executed\n"
        f"0,0    {place}  500000   {500_000 - lost}     {lost}  single-stepped\n"
        f"0,0    g                            500000   {500_000 - lost}     {lost}  single-stepped"
    )
    long = "a_namespace::" * 8 + "f"
    text = told((0, long, LIBC, hit), (1, "g", LIBC, Counts(1, 1, recursed=2, executed=("emulated",))))
    first, second, third, fourth = text.splitlines()
    assert second == f"0,0  {long}"
    assert third.split() == ["500000", str(500_000 - lost), str(lost), "0", "single-stepped"]
    assert fourth.split() == ["0,0", "g", "1", "1", "0", "2", "emulated"]
    assert max(len(line) for line in (first, third, fourth)) <= 80
