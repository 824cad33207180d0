"""The policy of the overload guard, on made-up measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Notice, Scope
from dprobes.engines.overload_guard import (
    DEFAULT_OVERHEAD,
    UNLIMITED,
    Load,
    OverloadNotices,
    OverloadPolicy,
    Verdict,
    budget_of,
    check_overhead,
    overhead_of,
)
from dprobes.errors import EngineError
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.resolve.probepoints import Probepoint

BUDGET = 0.1
NOTHING = Verdict()
CALM = Load(7, 10, 0.001, 0.001)


def busy(in_handler: float, in_traps: float, thinning: int = 1, number: int = 0) -> Load:
    """Return the load of a probepoint in half a second."""
    return Load(number, 1000, in_handler, in_traps, thinning)


def test_what_is_within_the_budget_is_left_alone_and_not_even_looked_at() -> None:
    policy = OverloadPolicy(BUDGET)
    assert [policy.judge(0.1, [busy(0.05, 0)]) for _ in range(9)] == [NOTHING] * 9
    assert not policy.is_watching


def test_a_burst_of_one_look_is_left_alone() -> None:
    policy = OverloadPolicy(BUDGET)
    for _ in range(5):
        assert policy.judge(0.9, []) == NOTHING
        assert policy.is_watching
        assert policy.judge(0.01, [busy(0.005, 0)]) == NOTHING
        assert not policy.is_watching


def test_at_the_second_look_the_handler_is_thinned_to_three_quarters_of_the_budget() -> None:
    policy = OverloadPolicy(BUDGET)
    policy.judge(0.6, [])
    verdict = policy.judge(0.6, [busy(0.3, 0.0)])
    assert (verdict.thinned, verdict.disabled) == ({0: 8}, ())  # 0.6 / 8 is 0.075
    assert verdict.shares == {0: pytest.approx(0.6)}
    assert policy.judge(0.075, [busy(0.0375, 0.0, 8)]) == NOTHING
    assert policy.is_watching


def test_handlers_that_take_little_run_as_before() -> None:
    policy = OverloadPolicy(BUDGET)
    policy.judge(0.6, [])
    verdict = policy.judge(0.602, [busy(0.2, 0.0), CALM, busy(0.1, 0.0, number=1)])
    assert sorted(verdict.thinned) == [0, 1]
    # What is left for the two is shared out alike.
    assert verdict.thinned[0] == pytest.approx(2 * verdict.thinned[1], abs=1)


def test_traps_that_cost_too_much_disable_the_probepoint_after_thinning_was_tried() -> None:
    policy = OverloadPolicy(BUDGET)
    policy.judge(0.9, [])
    assert policy.judge(0.9, [busy(0.05, 0.4), CALM]).thinned.keys() == {0}
    verdict = policy.judge(0.82, [busy(0.005, 0.4, 5), CALM])
    assert (verdict.thinned, verdict.disabled) == ({}, [0])
    assert verdict.shares == {0: pytest.approx(0.82 * 0.405 / 0.407)}


def test_as_few_as_possible_are_disabled_the_most_costly_first() -> None:
    policy = OverloadPolicy(BUDGET)
    loads = [busy(0, 0.01, number=0), busy(0, 0.2, number=1), busy(0, 0.15, number=2), busy(0, 0.02, number=3)]
    policy.judge(0.76, [])
    assert policy.judge(0.76, loads) == NOTHING  # there is no handler that could be thinned
    assert policy.judge(0.76, loads).disabled == [1, 2]
    left = [loads[0], loads[3]]
    assert policy.judge(0.06, left) == NOTHING


def test_what_stays_above_the_budget_however_thin_is_disabled_in_the_end() -> None:
    policy = OverloadPolicy(BUDGET)
    found = [policy.judge(0.5, [busy(0.2, 0.01, 3), CALM]) for _ in range(6)]
    assert found[0] == NOTHING
    assert [set(each.thinned) for each in found[1:5]] == [{0}] * 4
    assert found[5].disabled == [0]


def test_a_thinned_handler_runs_more_often_again_when_there_is_room() -> None:
    policy = OverloadPolicy(BUDGET)
    policy.judge(0.6, [])
    policy.judge(0.6, [busy(0.3, 0.0)])
    assert policy.judge(0.049, [busy(0.02, 0.0045, 8)]) == NOTHING  # twice that would be too near
    assert policy.judge(0.02, [busy(0.01, 0.0, 8)]).thinned == {0: 4}
    assert policy.judge(0.02, [busy(0.01, 0.0, 4)]).thinned == {0: 2}
    assert policy.judge(0.02, [busy(0.01, 0.0, 2)]).thinned == {0: 1}
    assert policy.judge(0.02, [busy(0.01, 0.0, 1)]) == NOTHING
    assert not policy.is_watching


def test_a_probepoint_that_does_nothing_for_a_while_is_not_forgotten() -> None:
    policy = OverloadPolicy(BUDGET)
    policy.judge(0.6, [])
    policy.judge(0.6, [busy(0.3, 0.0)])
    assert policy.judge(0.0, [Load(0, 0, 0.0, 0.0, 8)]).thinned == {0: 4}


def test_a_look_without_any_load_changes_nothing() -> None:
    policy = OverloadPolicy(BUDGET)
    assert [policy.judge(0.9, []) for _ in range(9)] == [NOTHING] * 9


# What is said of hits that take too much of a CPU.


LESS = "the other hits are counted as skipped; '--overhead off' runs it at each hit"
GONE = "allow more, as in '--overhead 50%', or any overhead with 'off'; or probe a place that is hit less often"


PROGRAM = "name = x\nmajor = 1\n" + "".join(f"offset = f{n}\nminor = {n}\nexit\n" for n in range(10))


def notices(*, at_return: bool = False) -> OverloadNotices:
    program = parse_source(SourceFile("x.rpn", PROGRAM), Diagnostics())
    probes = [
        SimpleNamespace(definition=each, where=f"f{n}", at_return=at_return)
        for n, each in enumerate(program.definitions)
    ]
    return OverloadNotices(0.1, program.major, cast("list[Probepoint]", probes))


def test_a_thinned_handler_is_reported_once() -> None:
    said = notices()
    assert list(said.of(Verdict({3: 8}, (), {3: 0.4321}), {3: 123456.7})) == [
        Notice(
            "1,3 at f3: 123457 hits a second took 43.2% of a CPU, where 10% are allowed: its handler runs at one hit "
            "of 8 from now on",
            LESS,
        )
    ]
    assert list(said.of(Verdict({3: 16}, (), {3: 0.4}), {3: 9.0})) == []
    assert list(said.of(Verdict({3: 4}), {})) == []  # more often again


def test_a_disabled_probepoint_is_reported() -> None:
    assert list(notices().of(Verdict({}, [3], {3: 1.07}), {3: 2e6})) == [
        Notice("1,3 at f3 is disabled: 2000000 hits a second took 100% of a CPU, where 10% are allowed", GONE)
    ]


def test_a_return_is_named_as_such() -> None:
    (notice,) = notices(at_return=True).of(Verdict({}, [3], {3: 0.5}), {3: 10.0})
    assert notice.message.startswith("1,3 at f3 (return) is disabled: ")


def test_of_many_the_worst_are_named() -> None:
    shares = {n: n / 100 for n in range(10)}
    rates = dict.fromkeys(range(10), 50.0)
    thinned = list(notices().of(Verdict(dict.fromkeys(range(10), 2), (), shares), rates))
    assert [each.message.split(":")[0] for each in thinned[:3]] == ["1,9 at f9", "1,8 at f8", "1,7 at f7"]
    assert thinned[3:] == [Notice("the handlers of 7 more probepoints run at some of their hits only", LESS)]
    disabled = list(notices().of(Verdict({}, list(range(10)), shares), rates))
    assert [each.message.split(" is")[0] for each in disabled[:3]] == ["1,9 at f9", "1,8 at f8", "1,7 at f7"]
    assert disabled[3:] == [Notice("7 more probepoints are disabled for the same reason", GONE)]


# What users say of the overhead, and what holds where they say nothing.


@pytest.mark.parametrize(
    ("text", "percent"),
    [("10%", 10), ("10", 10), (" 10 % ", 10), ("0.5%", 0.5), ("100", 100), ("off", UNLIMITED), ("none", UNLIMITED)],
)
def test_a_percentage_or_a_word(text: str, percent: float) -> None:
    assert overhead_of(text) == percent


@pytest.mark.parametrize("text", ["", "much", "-1", "101%", "1e1", "10%%", "0x10", "1/2"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(EngineError) as caught:
        overhead_of(text)
    assert caught.value.message == f"an overhead is more than 0 and at most 100 percent of a CPU, not '{text}'"
    assert caught.value.hint == "write it as 10% or 10; 'off' is for no limit"


def test_so_is_a_number_that_is_none() -> None:
    with pytest.raises(EngineError, match="not '250'"):
        check_overhead(250)
    with pytest.raises(EngineError, match="not '-1'"):
        check_overhead(-1)
    assert check_overhead(0) == UNLIMITED


DEFAULT = DEFAULT_OVERHEAD / 100


@pytest.mark.parametrize(
    ("header", "scope", "budget"),
    [
        ("name = libc", Scope(), DEFAULT),
        ("name = libc", Scope(pid=1), None),
        ("name = libc", Scope(command=("ls",)), None),
        ("name = libc", Scope(cgroup="/sys/fs/cgroup"), None),
        ("name = libc", Scope(uid=0), None),
        ("name = vmlinux\nmodtype = kernel", Scope(), DEFAULT),
        ("name = vmlinux\nmodtype = kernel", Scope(pid=1), DEFAULT),
    ],
)
def test_all_processes_and_the_kernel_have_a_limit_by_default(header: str, scope: Scope, budget: float | None) -> None:
    program = parse_source(SourceFile("x.rpn", f"{header}\noffset = f\nexit\n"), Diagnostics())
    assert budget_of(None, scope, program) == budget
    assert budget_of(40.0, scope, program) == 0.4
    assert budget_of(UNLIMITED, scope, program) is None
