"""Requests come again, ever more rarely, and not for ever."""

from __future__ import annotations

import time

import pytest

from dprobes.engines.ptrace.tracer.native.jump_patcher import Retries
from dprobes.engines.ptrace.tracer_messages import ShareMemory

FIRST, SECOND = ShareMemory(0, 7, 3, 4096), ShareMemory(0, 8, 3, 4096)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def test_what_is_due_comes_once_with_how_often_it_was_tried(now: list[float]) -> None:
    retries = Retries()
    assert retries.delay() is None
    assert retries.add(FIRST, 0)
    assert retries.add(SECOND, 3)
    assert retries.delay() == pytest.approx(0.01)
    assert retries.take_due() == []
    now[0] += 0.02
    assert retries.take_due() == [(FIRST, 1)]
    assert retries.delay() == pytest.approx(0.06)
    now[0] += 1
    assert retries.delay() == 0
    assert retries.take_due() == [(SECOND, 4)]
    assert retries.take_due() == []
    assert retries.delay() is None


def test_there_is_an_end() -> None:
    assert not Retries().add(FIRST, 18)
