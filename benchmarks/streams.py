"""
Measure how many records of busy threads of one process come into a trace file in a second, and what is lost of them.

Two threads call a function as fast as they can, and share two processors with the reader, which is allowed to lose
records: more of them are made than anybody could write. Beside it stands what others reached with two threads when they
were measured on such a machine: LTTng-UST 2.13 with two integers, uftrace 0.13 with entry and return.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from table import Measurement, Unit
from tracing import HERE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["streams"]

ROUNDS = 3
THREADS, SECONDS = 2, 3
LOG = "push r, rdi\npush r, rsi\npush r, rdx\npush r, rcx\nlog 4\nexit\n"
PEERS = (("LTTng-UST, once", 5_600_000), ("uftrace, once", 4_600_000))
WHAT = (
    ("the time, process and thread", "TSC,PID,TID"),
    ("all header items", "ALL"),
)


class _Stream(NamedTuple):
    """Say how many records came in a second, how many of all were lost, and what the tool took for one in seconds."""

    rate: float
    lost: int
    hits: int
    each: float


def streams(directory: Path) -> list[Measurement]:
    """Return the rows about records of two threads."""
    program, source, trace = directory / "pair", directory / "pair.rpn", directory / "pair.dpt"
    subprocess.run(["gcc", "-O2", "-o", program, HERE / "pair.c", "-lpthread"], check=True)
    source.write_text(f'name = "{program}"\noffset = called\n{LOG}')
    rows = []
    for (what, items), (peer, figure) in zip(WHAT, PEERS, strict=True):
        best = max((_run(program, source, trace, items) for _ in range(ROUNDS)), key=lambda stream: stream.rate)
        text = f"records of {THREADS} threads into a trace file, 4 words with {what}"
        rows += [
            Measurement(f"{text}, lost {best.lost} of {best.hits}", best.rate, peer, figure, Unit.RATE),
            Measurement(f"{text}: processor time of the tool for each", best.each * 1e6),
        ]
    return rows


def _run(program: Path, source: Path, trace: Path, items: str) -> _Stream:
    trace.unlink(missing_ok=True)
    command = [sys.executable, "-m", "dprobes", "run", "--engine", "inline", "--log", items, str(source)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "-o", str(trace), "--", str(program), str(THREADS), str(SECONDS)],
        check=True,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = re.search(r"^0,\d+ +\w+ +(\d+) +(\d+) +(\d+)", done.stderr, re.MULTILINE)
    assert found is not None, done.stderr
    hits, records, lost = map(int, found.groups())
    assert hits == records + lost, done.stderr
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    threads = float(done.stdout.split()[1])
    return _Stream(records / SECONDS, lost, hits, max(0.0, used - threads) / records)
