"""The policy of the overload guard, on made-up measurements."""

from __future__ import annotations

import pytest

from dprobes.engines.overload_guard import Load, OverloadPolicy, Verdict

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
