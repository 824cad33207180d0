"""The page docs/how-to/count-events.md: its commands show what it says."""

from __future__ import annotations

import random
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.documented_commands import ROOT, Step, steps_of, under_test
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

EACH_CALL, HISTOGRAM, LOCKS_PROGRAM, LOCKS, WHERE = steps_of(ROOT / "docs" / "how-to" / "count-events.md")
ROWS = 200_000
CALLS = 6
"""Calls of sqlite3_step in ``TABLES``."""

TABLES = """
import sqlite3
base = sqlite3.connect("base")
print(base.execute("select count(distinct b) from t").fetchone())
print(base.execute("select a from t where a = 1000").fetchone())
"""
LOCKS_PY = """
import threading, time
lock = threading.Lock()
def work():
    for _ in range(200):
        with lock:
            time.sleep(0.0005)
threads = [threading.Thread(target=work) for _ in range(3)]
for each in threads: each.start()
for each in threads: each.join()
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def output_of(step: Step, directory: Path) -> str:
    """Return what a command of the page prints in a directory with its files."""
    command = under_test(step).replace("python3 ", "/usr/bin/python3 ").replace("python3:", "/usr/bin/python3:")
    done = subprocess.run(
        ["sh", "-c", command], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Return a directory with the program of the page and its data base."""
    import sqlite3

    with sqlite3.connect(tmp_path / "base") as base:
        base.execute("create table t(a, b)")
        base.executemany("insert into t values(?, ?)", ((n, str(n) * 20) for n in range(ROWS)))
    base.close()
    (tmp_path / "tables.py").write_text(TABLES)
    return tmp_path


def test_one_call_fills_the_cache(tables: Path) -> None:
    faults = [
        int(number) for number in re.findall(r"\]  (\d+) page faults$", output_of(EACH_CALL, tables), re.MULTILINE)
    ]
    assert len(faults) == CALLS
    assert faults[2] > 500 > 10 * (sum(faults) - faults[2])
    assert f"\n{CALLS} in all;" in output_of(HISTOGRAM, tables)


def test_threads_that_wait_for_a_lock_leave_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "locks.py").write_text(LOCKS_PY)
    (tmp_path / "locks.dpc").write_text(LOCKS_PROGRAM.output)
    printed = output_of(LOCKS, tmp_path)
    waits = {int(key): int(value) for key, value in re.findall(r"^@waits\[(\d+)\]: (\d+)$", printed, re.MULTILINE)}
    assert sum(waits.values()) > 2 * waits.get(0, 0)
    units = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
    times = {
        name: float(value) * units[unit]
        for name, value, unit in re.findall(r"^@(wall|cpu): (\S+) (\w+)$", printed, re.MULTILINE)
    }
    assert times["cpu"] < times["wall"] / 10


def test_sort_takes_page_faults_in_the_kernel(tmp_path: Path) -> None:
    generator = random.Random(1)
    (tmp_path / "data").write_text("".join(f"{generator.getrandbits(300):076x}\n" for _ in range(50_000)))
    printed = output_of(WHERE, tmp_path)
    most = max(re.findall(r"^@\[(.*)\]: (\d+)$", printed, re.MULTILINE), key=lambda row: int(row[1]))
    assert "[vmlinux]" in most[0], printed
