"""The table at the end of a run fits a terminal, and leaves out files in which nothing happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.cli.output.run_summary import SummaryOptions, summary
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Counts
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.engines.engine_interface import Attachment

LIBC, LIBC32 = "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib32/libc.so.6"
PROGRAM = parse_source(SourceFile("p", "name = x\noffset = f\nexit\noffset = g\nexit\n"), Diagnostics())


PTRACE = SummaryOptions("ptrace")


def told(*probes: tuple[int, str, str, Counts], width: int | None = 80, options: SummaryOptions = PTRACE) -> str:
    found: list[Any] = [
        SimpleNamespace(number=number, where=where, path=path, at_return=False) for number, where, path, _ in probes
    ]
    session = SimpleNamespace(probes=found, left_out=[])
    return summary(PROGRAM, cast("Attachment", session), [counts for *_, counts in probes], options, width)


def test_a_file_in_which_nothing_was_hit_is_one_line() -> None:
    hit = Counts(5, 5, executed=("emulated",))
    idle = Counts(executed=("emulated",))
    assert told((0, "f", LIBC, hit), (0, "f", LIBC32, idle), (1, "g", LIBC, Counts()), (1, "g", LIBC32, idle)) == (
        "probe  place  hits  records  lost  ptrace engine\n"
        "0,0    f         5        5     0  emulated\n"
        "0,0    g         0        0     0  -\n"
        f"and 2 probepoints in {LIBC32} that were not hit"
    )


def test_names_of_probes_replace_codes() -> None:
    hit = Counts(5, 5, executed=("emulated",))
    named = SummaryOptions("ptrace", names={PROGRAM.definitions[0].minor: "sample.call.begin"})
    assert told((0, "f", LIBC, hit), (1, "g", LIBC, hit), options=named) == (
        "probe              place  hits  records  lost  ptrace engine\n"
        "sample.call.begin  f         5        5     0  emulated\n"
        "sample.call.begin  g         5        5     0  emulated"
    )


def test_several_files_that_were_hit_are_numbered_where_that_is_shorter() -> None:
    hit = Counts(5, 5, executed=("emulated",))
    probes = [(0, "f", LIBC, hit), (0, "f", LIBC32, hit), (1, "g", LIBC, hit)]
    assert told(*probes) == (
        "probe  place  hits  records  lost  ptrace engine\n"
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
        "probe  place                          hits  records  lost  ptrace engine\n"
        f"0,0    {place}  500000   {500_000 - lost}     {lost}  single-stepped\n"
        f"0,0    g                            500000   {500_000 - lost}     {lost}  single-stepped"
    )
    long = "a_namespace::" * 8 + "f"
    text = told((0, long, LIBC, hit), (1, "g", LIBC, Counts(1, 1, passed=2, executed=("emulated",))))
    first, second, third, fourth = text.splitlines()
    assert second == f"0,0  {long}"
    assert third.split() == ["500000", str(500_000 - lost), str(lost), "0", "single-stepped"]
    assert fourth.split() == ["0,0", "g", "1", "1", "0", "2", "emulated"]
    assert max(len(line) for line in (first, third, fourth)) <= 80


def test_counts_that_are_rare_have_a_column_only_if_they_are_not_zero() -> None:
    lines = told((0, "f", LIBC, Counts(5, 3, passed=2)), (1, "g", LIBC, Counts(1))).splitlines()
    assert lines == [
        "probe  place  hits  records  lost  passed  ptrace engine",
        "0,0    f         5        3     0       2  -",
        "0,0    g         1        0     0       0  -",
    ]


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (("inline (punned jump)", "inline (window)"), "jump"),
        (("in a page", "in padding", "inline (jump)"), "breakpoint, jump"),
        (("emulated", "in place"), "emulated, single-stepped"),
        (("kprobe (breakpoint, moved)", "ftrace return"), "kprobe, ftrace return"),
        (("at least: of several processors at once one",), "at least"),
        ((), "-"),
    ],
)
def test_what_an_engine_does_is_one_word_that_is_explained_on_request(ways: tuple[str, ...], words: str) -> None:
    hit = Counts(5, 5, executed=ways)
    plain = told((0, "f", LIBC, hit), (1, "g", LIBC, hit)).splitlines()
    assert [line.split("  ")[-1] for line in plain[1:]] == [words, words]
    explained = told((0, "f", LIBC, hit), (1, "g", LIBC, hit), options=SummaryOptions("ptrace", explain=True))
    rows, _, legend = explained.partition("\n\n")
    assert rows.splitlines()[0] == "probe  place  hits  records  lost  passed  ptrace engine"
    assert [line.split("  ")[-1] for line in rows.splitlines()[1:]] == [", ".join(ways) or "-"] * 2
    for term in ("hits", "records", "lost", "passed", *ways):
        assert sum(line.startswith(f"{term}  ") for line in legend.splitlines()) == 1


def test_only_the_rows_with_the_most_hits_are_printed_in_their_order() -> None:
    probes = [(0, f"f{n}", LIBC, Counts(hits)) for n, hits in enumerate([3, 9, 0, 5, 1])] + [(1, "g", LIBC, Counts(7))]
    assert [line.split()[1] for line in told(*probes, options=SummaryOptions("ptrace", 3)).splitlines()[1:4]] == [
        "f1",
        "f3",
        "g",
    ]
    assert told(*probes, options=SummaryOptions("ptrace", 3)).splitlines()[4:] == [
        "and 2 more probepoints with 4 hits (--rows N prints more)",
        "and 1 probepoint that was not hit",
    ]
    many = [(0, f"f{n}", LIBC, Counts(n + 1)) for n in range(60)] + [(1, "g", LIBC, Counts(1))]
    lines = told(*many).splitlines()
    assert lines[1].split()[:3] == ["0,0", "f10", "11"]
    assert lines[51:] == ["and 11 more probepoints with 56 hits (--rows N prints more)"]
    assert len(told(*many, options=SummaryOptions("ptrace", explain=True)).split("\n\n")[0].splitlines()) == 62
