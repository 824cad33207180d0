"""Elapsed and CPU seconds of test slices and files: ``--slices`` prints two tables at the end of a test run."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["SLICES", "CpuClock", "SliceTimes"]

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
"""Patterns of test files with the slice of each; the first match applies."""

_SHOWN_FILES = 40


class CpuClock:
    """
    A clock of the CPU seconds of this process and its descendants, including those that it does not wait for.

    They run in a cgroup of their own if that can be created. Otherwise, descendants count when they are waited for.
    """

    def __init__(self) -> None:
        self._outer: Path | None = None
        self._cgroup: Path | None = None
        self._last = 0.0
        with contextlib.suppress(OSError, StopIteration):
            mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
            mount = next(Path(fields[1]) for fields in mounts if fields[2] == "cgroup2")
            rows = Path("/proc/self/cgroup").read_text().splitlines()
            outer = mount / next(row[4:] for row in rows if row.startswith("0::/"))
            cgroup = outer / f"dprobes-tests-{os.getpid()}"
            cgroup.mkdir()
            self._outer, self._cgroup = outer, cgroup
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        self.lap()

    def seconds(self) -> float:
        """Return the CPU seconds since the clock's creation; without a cgroup, since the start of the process."""
        if self._cgroup is None:
            return sum(os.times()[:4])
        return int((self._cgroup / "cpu.stat").read_text().split()[1]) / 1e6  # usage_usec is the first row

    def lap(self) -> float:
        """Return the CPU seconds since the last call of ``lap``."""
        before, self._last = self._last, self.seconds()
        return self._last - before

    def close(self) -> None:
        """Leave the cgroup and remove it; it remains if a descendant is still in it."""
        if self._outer is not None and self._cgroup is not None:
            with contextlib.suppress(OSError):
                (self._outer / "cgroup.procs").write_text(str(os.getpid()))
                self._cgroup.rmdir()


class SliceTimes:
    """
    Sums of the seconds of tests in all workers, including set-up and teardown.

    Each worker adds the attribute ``cpu_seconds`` to its reports; the controlling process adds these up.
    """

    def __init__(self) -> None:
        self.items: Counter[str] = Counter()
        self.milliseconds: Counter[str] = Counter()
        self.cpu_milliseconds: Counter[str] = Counter()
        self._clock: CpuClock | None = None

    def pytest_sessionstart(self) -> None:
        self._clock = CpuClock()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        if self._clock is not None:
            self._clock.lap()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._clock is not None:
            vars(report)["cpu_seconds"] = self._clock.lap()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        name = next((name for pattern, name in SLICES if fnmatch(path, pattern)), "others")
        for row in (name, path):
            self.items[row] += report.when == "setup"
            self.milliseconds[row] += round(report.duration * 1000)
            self.cpu_milliseconds[row] += round(getattr(report, "cpu_seconds", 0) * 1000)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slices = {name for _, name in SLICES} | {"others"}
        dearest = sorted(self.items, key=lambda row: (-self.cpu_milliseconds[row], -self.milliseconds[row]))
        for title, rows in (
            ("slices", [row for row in dearest if row in slices]),
            ("files", [row for row in dearest if row not in slices][:_SHOWN_FILES]),
        ):
            terminalreporter.section(title)
            width = max(map(len, rows), default=0)
            for row in rows:
                seconds, cpu = self.milliseconds[row] / 1000, self.cpu_milliseconds[row] / 1000
                terminalreporter.write_line(
                    f"{row:{width}} {self.items[row]:6} items {seconds:7.0f} s {cpu:7.0f} CPU s"
                )
        if self._clock is not None:
            terminalreporter.write_line(f"with workers and collection: {self._clock.seconds():.0f} CPU s")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self._clock is not None:
            self._clock.close()
