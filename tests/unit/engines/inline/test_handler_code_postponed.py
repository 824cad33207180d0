"""Probepoints wait until it is time, longer and longer, and not for ever."""

from __future__ import annotations

import time

import pytest

from dprobes.engines.inline.handler_code import Postponed


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def test_what_waits_is_due_once(now: list[float]) -> None:
    postponed = Postponed()
    assert postponed.take_due() is None
    assert postponed.add(7, [1, 2])
    assert postponed.add(7, [3])
    assert postponed.take_due() is None
    now[0] += 0.02
    assert postponed.take_due() == (7, {1, 2, 3})
    assert postponed.take_due() is None


def test_what_was_asked_for_by_others_waits_no_longer(now: list[float]) -> None:
    postponed = Postponed()
    assert postponed.add(7, [1, 2])
    postponed.drop(7, [1])
    postponed.drop(8, [1])
    now[0] += 0.02
    assert postponed.is_due
    postponed.drop(7, [2])
    assert not postponed.is_due
    assert postponed.take_due() is None
    assert postponed.add(7, [3])
    now[0] += 1
    assert postponed.take_due() == (7, {3})


def test_nobody_waits_for_ever(now: list[float]) -> None:
    postponed = Postponed()
    begun = now[0]
    tries = 0
    while postponed.add(7, [1]):
        tries += 1
        while postponed.take_due() is None:
            now[0] += 0.01
    assert tries == 11
    assert 20 < now[0] - begun < 25
    assert postponed.add(8, [1]), "another process has not waited"
    postponed.forget(7)
    assert postponed.add(7, [1])
