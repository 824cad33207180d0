"""Measure what a check of the accessed address costs an instruction, and an access that is counted."""

from __future__ import annotations

import subprocess
from pathlib import Path

from table import BenchmarkError, Measurement
from tracing import DPROBES

__all__ = ["accesses"]

SOURCE = Path(__file__).with_name("accesses.c")
ROWS = ("a store elsewhere", "a load elsewhere", "a store that is counted")


def accesses(directory: Path) -> list[Measurement]:
    """Return the rows about instructions that ``dprobes storage`` checks, above their own time."""
    program = directory / "accesses"
    subprocess.run(["gcc", "-O2", "-g", "-o", program, SOURCE], check=True)
    plain = _times([program])
    checked = _times([*DPROBES, "storage", f"{program}:watched", "--json", "--", program])
    return [
        Measurement(f"check an access in the process: {what}", (after - before) / 1000)
        for what, before, after in zip(ROWS, plain, checked, strict=True)
    ]


def _times(command: list[str | Path]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    times = [float(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("time ")]
    if done.returncode or len(times) != len(ROWS):
        raise BenchmarkError(f"dprobes storage failed: {done.stderr}")
    return times
