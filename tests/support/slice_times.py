"""How long the slices of the suite take: with ``--slices``, a table at the end of a test run."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["SLICES", "SliceTimes"]

SLICES = (
    ("tests/unit/*", "unit"),
    ("tests/cases/*", "cases"),
    ("tests/integration/test_*forms.py", "forms"),
    ("tests/integration/*inline*", "inline engine"),
    ("tests/integration/ebpf/*", "eBPF engine"),
    ("tests/integration/usdt/*", "USDT"),
    ("tests/integration/gdb/*", "stubs"),
    ("tests/integration/manager/*", "manager"),
    ("tests/integration/sinks/*", "sinks"),
    ("tests/integration/*", "runs"),
    ("tests/kernel/*", "guests"),
)
"""Files, and the slice they belong to; the first row that fits."""


class SliceTimes:
    """What adds up the seconds of tests, of all workers; set-up and clearing up are counted as well."""

    def __init__(self) -> None:
        self.items: Counter[str] = Counter()
        self.milliseconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        name = next((name for pattern, name in SLICES if fnmatch(path, pattern)), "others")
        self.items[name] += report.when == "setup"
        self.milliseconds[name] += round(report.duration * 1000)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slices")
        for name in sorted(self.items, key=lambda name: -self.milliseconds[name]):
            terminalreporter.write_line(f"{name:15}{self.items[name]:7} items{self.milliseconds[name] / 1000:9.0f} s")
