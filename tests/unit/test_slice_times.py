"""``--slices``: the seconds of tests, added up by what the tests are about."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import pytest
from _pytest.config import get_config
from _pytest.terminal import TerminalReporter

from support.slice_times import SLICES, SliceTimes

TESTS = Path(__file__).parents[1]


def report(nodeid: str, when: Literal["setup", "call", "teardown"], duration: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration)


def test_all_phases_of_a_test_count_and_the_longest_slice_comes_first() -> None:
    times = SliceTimes()
    times.pytest_runtest_logreport(report("tests/unit/test_globs.py::test_one", "setup", 0.5))
    times.pytest_runtest_logreport(report("tests/unit/test_globs.py::test_one", "call", 1))
    times.pytest_runtest_logreport(report("tests/unit/vm/test_rules.py::test_a_rule[1]", "setup", 0.1))
    times.pytest_runtest_logreport(report("tests/kernel/test_guest.py::test_two", "setup", 20))
    times.pytest_runtest_logreport(report("tests/kernel/test_guest.py::test_two", "teardown", 3))
    written = io.StringIO()
    times.pytest_terminal_summary(TerminalReporter(get_config(), written))
    assert [line.split() for line in written.getvalue().splitlines() if not line.startswith("=")] == [
        ["guests", "1", "items", "23", "s"],
        ["unit", "2", "items", "2", "s"],
    ]


@pytest.mark.parametrize(("pattern", "name"), SLICES)
def test_each_slice_has_files(pattern: str, name: str) -> None:
    assert any(TESTS.glob(pattern.removeprefix("tests/"))), name
