"""Every execution of a probed instruction is one hit, in every kind of program; the program itself counts as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

HOTLOOP = "name = hotloop\noffset = tick\nminor = 1\npush r, arg0\nlog 1\nexit\n"

KINDS = {
    "pie": ("-pie", "-fPIE"),
    "no-pie": ("-no-pie", "-fno-pie"),
    "static": ("-static", "-no-pie"),
    "static-pie": ("-static-pie", "-fPIE"),
}

SITES = (
    "ret", "ret_n", "jump", "branch", "call", "push", "pushf", "popf", "move", "nop", "long_nop", "leave", "locked",
    "fill", "getpid",
)  # fmt: skip


def count(result: Result, minor: int = 1) -> int:
    counts = result.counts[minor]
    assert counts.hits == counts.records + counts.lost
    assert len([r for r in result.records if r["minor"] == minor]) == counts.records
    return counts.hits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_each_call_is_one_record_with_its_argument(build: Builder, run: Runner, kind: str, i386: bool) -> None:
    program = build("hotloop.c", *KINDS[kind], i386=i386)
    source = HOTLOOP.replace("push r, arg0", "push r, esp\npush 4\nadd\npush mem, u32") if i386 else HOTLOOP
    result = run.command(source, program, 200)
    assert [words[0] for words in result.words(size=4 if i386 else 8)] == list(range(200))
    assert count(result) == 200


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_every_kind_of_instruction_does_what_it_should_and_is_counted(build: Builder, run: Runner, i386: bool) -> None:
    program = build("insns.c", i386=i386)
    sites = [site for site in SITES if not (i386 and site == "getpid")]
    source = "name = insns\n" + "".join(
        f"offset = site_{site}\nminor = {n}\npush r, sp\nlog 1\nexit\n" for n, site in enumerate(sites)
    )
    result = run.command(source, program, 50)
    assert {site: count(result, n) for n, site in enumerate(sites)} == dict.fromkeys(sites, 50)


@pytest.mark.parametrize("i386", [False, True], ids=["x86_64", "i386"])
def test_threads_at_one_stepped_instruction_miss_nothing(build: Builder, run: Runner, i386: bool) -> None:
    source = "name = threads\nvars = 1\noffset = tick\nminor = 1\ninc lv, 0\npush lv, 0\nlog 1\nexit\n"
    result = run.command(source, build("threads.c", i386=i386), 4, 400)
    assert result.stdout == "1600\n"
    assert count(result) == 1600
    assert [words[0] for words in result.words(size=4 if i386 else 8)] == list(range(1, 1601))
    assert len({r["tid"] for r in result.records}) == 4


def test_threads_that_begin_and_end_all_the_time_miss_nothing(build: Builder, run: Runner) -> None:
    source = "name = threads\noffset = tick\nminor = 1\npush tid\nlog 1\nexit\n"
    result = run.command(source, build("threads.c"), 4, 60, "short")
    assert count(result) == 240
    assert all(r["tid"] == words[0] for r, words in zip(result.records, result.words(), strict=True))


@pytest.mark.parametrize(("limit", "first"), [(100, 0), (1, 0), (70, 30)])
def test_maxhits_and_passcount_are_exact_under_threads(build: Builder, run: Runner, limit: int, first: int) -> None:
    source = f"name = threads\noffset = tick\nminor = 1\nmaxhits = {limit}\npasscount = {first}\npush 1\nlog 1\nexit\n"
    result = run.command(source, build("threads.c"), 4, 300)
    assert result.stdout == "1200\n"
    assert len(result.records) == limit
    assert result.counts[1].passed == first
    assert result.counts[1].hits == limit + first


def test_remove_takes_the_probepoint_away_at_once(build: Builder, run: Runner) -> None:
    source = "name = threads\noffset = tick\nminor = 1\npush 1\nlog 1\nremove\n"
    result = run.command(source, build("threads.c"), 4, 300)
    assert len(result.records) == 1
    assert result.counts[1].hits == 1


def test_abort_keeps_no_record_but_the_hit_counts(build: Builder, run: Runner) -> None:
    source = (
        "name = hotloop\noffset = tick\nminor = 1\npush r, arg0\npush 1\nand\njz even\nabort\neven:\npush r, arg0\n"
        "log 1\nexit\n"
    )
    result = run.command(source, build("hotloop.c"), 100)
    assert [words[0] for words in result.words()] == list(range(0, 100, 2))
    assert result.counts[1].hits == 100


def test_setmin_changes_the_code_of_one_record(build: Builder, run: Runner) -> None:
    source = (
        "name = hotloop\nmajor = 5\noffset = tick\nminor = 1\npush r, arg0\npush 3\nsub\njnz other\nsetmin 9\nother:\n"
        "push r, arg0\nlog 1\nexit\n"
    )
    result = run.command(source, build("hotloop.c"), 6)
    assert [r["minor"] for r in result.records] == [1, 1, 1, 9, 1, 1]


def test_variables_are_common_to_all_processes(build: Builder, run: Runner) -> None:
    source = (
        "name = family\nvars = 1\ngvars = 2\noffset = tick\nminor = 1\ninc lv, 0\ninc gv, 1\npush lv, 0\npush gv, 1\n"
        "log 2\nexit\n"
    )
    result = run.command(source, build("family.c"), "spawn", 4)
    assert sorted(max(words) for words in result.words()) == [1, 2, 3, 4, 5]
    assert len({r["pid"] for r in result.records}) == 5
