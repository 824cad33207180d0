"""Measure how long after its hit a record is with the user, by what the thread does right behind the instruction."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from table import Measurement
from tracing import HERE

import dprobes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["latency"]

HITS = 8
PAUSE = 0.3
"""Seconds between two hits, so that no record is sent because of the next hit."""

MODES = {
    "read": "blocks in read",
    "sleep": "sleeps",
    "exit": "ends",
    "run": "runs on",
}


def latency(directory: Path) -> list[Measurement]:
    """Return the rows about both engines: the median, and beside it the longest."""
    program = directory / "blocking"
    subprocess.run(["gcc", "-O2", "-o", program, HERE / "blocking.c", "-lpthread"], check=True)
    engines = ["ptrace", "ebpf"] if os.geteuid() == 0 else ["ptrace"]
    rows = []
    for engine in engines:
        for mode, does in MODES.items():
            delays = [delay * 1e6 for delay in delays_of(program, mode, engine)]
            what = f"record latency, {engine}, the thread {does}: median"
            rows.append(Measurement(what, statistics.median(delays), "longest", max(delays)))
    return rows


def delays_of(path: Path, mode: str, engine: str) -> list[float]:
    """Return the seconds from each hit to its record's arrival in the Python API."""
    builder = dprobes.ProgramBuilder(str(path))
    with builder.probe("touched", minor=1) as handler:
        handler.push(1).log(1).exit()
    delays = []
    with subprocess.Popen([path, mode, str(HITS)], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with dprobes.attach(process.pid, engine=engine, items=dprobes.Item.TIME) as session:
            session.insert(builder)
            writer = threading.Thread(target=write_bytes, args=(process, mode))
            writer.start()
            for record in session.records():
                assert record.time is not None
                delays.append((time.monotonic_ns() - record.time) / 1e9)
            writer.join()
    assert len(delays) == HITS, f"{mode}: {len(delays)} records"
    return delays


def write_bytes(process: subprocess.Popen[bytes], mode: str) -> None:
    """Let the program begin, and in its mode "read" go on."""
    for _ in range(1 + HITS * (mode == "read")):
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        time.sleep(PAUSE)
