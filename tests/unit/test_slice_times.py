"""``--slices``: the seconds and CPU seconds of tests, added up by what the tests are about, and by file."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from _pytest.config import get_config
from _pytest.terminal import TerminalReporter

from support.slice_times import SLICES, CpuClock, SliceTimes

TESTS = Path(__file__).parents[1]


def report(nodeid: str, when: Literal["setup", "call", "teardown"], duration: float, cpu: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=duration, cpu_seconds=cpu)


def test_all_phases_of_a_test_count_and_the_dearest_slice_and_file_come_first() -> None:
    times = SliceTimes()
    times.pytest_runtest_logreport(report("tests/unit/test_globs.py::test_one", "setup", 0.5, 0.25))
    times.pytest_runtest_logreport(report("tests/unit/test_globs.py::test_one", "call", 1, 1))
    times.pytest_runtest_logreport(report("tests/unit/vm/test_rules.py::test_a_rule[1]", "setup", 0.1, 5))
    times.pytest_runtest_logreport(report("tests/kernel/test_guest.py::test_two", "setup", 2, 30))
    times.pytest_runtest_logreport(report("tests/kernel/test_guest.py::test_two", "teardown", 3, 4))
    written = io.StringIO()
    times.pytest_terminal_summary(TerminalReporter(get_config(), written))
    assert [line.split() for line in written.getvalue().splitlines() if not line.startswith("=")] == [
        ["guests", "1", "items", "5", "s", "34", "CPU", "s"],
        ["unit", "2", "items", "2", "s", "6", "CPU", "s"],
        ["tests/kernel/test_guest.py", "1", "items", "5", "s", "34", "CPU", "s"],
        ["tests/unit/vm/test_rules.py", "1", "items", "0", "s", "5", "CPU", "s"],
        ["tests/unit/test_globs.py", "1", "items", "2", "s", "1", "CPU", "s"],
    ]


def test_cpu_seconds_are_those_of_this_process_and_its_descendants() -> None:
    clock = CpuClock()
    try:
        clock.lap()
        script = "import time\nwhile time.process_time() < 0.2: pass"
        subprocess.run([sys.executable, "-c", script], check=True)
        assert clock.lap() >= 0.2
    finally:
        clock.close()


@pytest.mark.parametrize(("pattern", "name"), SLICES)
def test_each_slice_has_files(pattern: str, name: str) -> None:
    assert any(TESTS.glob(pattern.removeprefix("tests/"))), name
