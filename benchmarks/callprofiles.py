"""
Measure what a profiled call costs, beside other profilers that see each call.

The program measures itself: the fastest of many rounds, so that the start of a profiler does not count. uftrace and
gprof need a program that was compiled with ``-pg``; DProbes and callgrind take the program as it is. uftrace records
each entry and return with its time, callgrind counts instructions, gprof counts the calls and samples the time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from table import BenchmarkError, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["call_profiles"]

HERE = Path(__file__).parent
ROUNDS, CALLGRIND_ROUNDS = "400", "100"
REPETITIONS = 3


def call_profiles(directory: Path) -> list[Measurement]:
    """Return the rows: what a call takes more with each profiler, and without one."""
    plain, instrumented = _built(directory, "nested"), _built(directory, "nested-pg", "-pg")
    bare = _best([str(plain), ROUNDS], directory)
    profile = [sys.executable, "-m", "dprobes", "profile", f"{plain}:*"]
    ours = _best([*profile, "--", str(plain), ROUNDS], directory) - bare
    peers = {
        "uftrace": (["uftrace", "record", "-d", str(directory / "uftrace"), str(instrumented), ROUNDS], "uftrace"),
        "callgrind": (
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(plain), CALLGRIND_ROUNDS],
            "valgrind",
        ),
        "gcc -pg": ([str(instrumented), ROUNDS], None),
    }
    rows = [Measurement("a call without a profiler", bare / 1000)]
    for name, (command, needed) in peers.items():
        there = needed is None or shutil.which(needed) is not None
        figure = (_best(command, directory) - bare) / 1000 if there else None
        rows.append(Measurement("a call more, profiled", ours / 1000, name, figure))
    return rows


def _built(directory: Path, name: str, *flags: str) -> Path:
    program = directory / name
    subprocess.run(["gcc", "-O2", *flags, "-o", program, HERE / "nested.c"], check=True)
    return program


def _best(command: Sequence[str], directory: Path) -> float:
    """Return the least number of nanoseconds that the program has printed for a call."""
    found = []
    for _ in range(REPETITIONS):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
        took = re.search(r"took ([0-9.]+)", done.stderr)
        if took is None:
            raise BenchmarkError(f"{command[0]}: {done.stderr.strip()[-200:]}")
        found.append(float(took[1]))
    return min(found)
