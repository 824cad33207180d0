"""
Measure by how much whole programs become slower with hundreds and thousands of probepoints in their libraries.

The programs use copies of the libraries, so that nobody else's processes are probed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from table import Measurement
from tracing import CPUS, Tracer, dprobes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["workloads"]

ROUNDS = 2
INSERTS = 1000
ARCHIVED = 1 << 20


@dataclass(frozen=True, slots=True)
class _Load:
    """A shell command, and sets of patterns by library."""

    what: str
    command: str
    patterns: Sequence[dict[str, str]]


LOADS = (
    _Load(
        f"sqlite3, {INSERTS} inserts",
        "sqlite3 test.db < inserts.sql",
        (
            {"libsqlite3.so.0": "sqlite3_*", "libz.so.1": "*"},
            {"libsqlite3.so.0": "*", "libz.so.1": "*", "libc.so.6": "*"},
        ),
    ),
    _Load(
        f"tar | gzip, {ARCHIVED >> 20} MiB",
        "tar cf - archived | gzip -1 > archive.tar.gz",
        ({"libc.so.6": "[a-f]*"}, {"libc.so.6": "*", "libselinux.so.1": "*", "libacl.so.1": "*"}),
    ),
)


def workloads(directory: Path) -> list[Measurement]:
    """Return the rows about whole programs: the time with probes beside the time without."""
    rows = []
    for load in LOADS:
        programs = load.command.replace("|", ";").split(";")
        missing = [name for part in programs if shutil.which(name := part.split()[0]) is None]
        if missing:
            rows.append(Measurement(f"{load.what} ({missing[0]} is not installed)", None))
            continue
        rows += _slow_down(load, directory / "workload")
    return rows


def _slow_down(load: _Load, directory: Path) -> list[Measurement]:
    _prepare(load, directory)
    before = _seconds(load, directory)
    rows = []
    for number, patterns in enumerate(load.patterns):
        with contextlib.ExitStack() as stack:
            tracers = []
            for library, pattern in patterns.items():
                own = directory / f"{number}.{library}"
                own.mkdir(exist_ok=True)
                source = own / "load.rpn"
                source.write_text(f'name = "{directory / library}"\nvars = 1\noffset = "{pattern}"\ninc lv, 0\nabort\n')
                tracers.append(stack.enter_context(Tracer(dprobes(source), own, CPUS)))
            for tracer in tracers:
                tracer.wait_until_attached(1)
            places = sum(tracer.attached for tracer in tracers)
            during = _seconds(load, directory)
        hits = sum(_hits(tracer.messages) for tracer in tracers) / ROUNDS
        what = f"{load.what}, {places} probepoints, {hits / 1e6:.2f} M hits"
        rows.append(Measurement(what, during * 1e6, "unprobed", before * 1e6))
        before = min(before, _seconds(load, directory))
    return rows


def _prepare(load: _Load, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for library in {library for patterns in load.patterns for library in patterns}:
        found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
        path = re.search(rf"^\s*{re.escape(library)} \([^)]*x86-64[^)]*\) => (.*)$", found, re.MULTILINE)
        assert path is not None, library
        shutil.copy(path[1], directory / library)
    inserts = "".join(f"insert into t values({n}, 'the text of row {n}');\n" for n in range(INSERTS))
    (directory / "inserts.sql").write_text(
        f"drop table if exists t; begin; create table t(a integer primary key, b text);\n{inserts}commit;\n"
    )
    (directory / "archived").write_bytes(b"".join(b"line %d of a file\n" % n for n in range(ARCHIVED // 20)))


def _seconds(load: _Load, directory: Path) -> float:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory)}
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.monotonic()
        subprocess.run(["sh", "-c", load.command], cwd=directory, env=environment, check=True)
        best = min(best, time.monotonic() - begin)
    return best


def _hits(summary: str) -> int:
    return sum(int(hits) for hits in re.findall(r"^\d+,\d+ +\S+ +(\d+) ", summary, re.MULTILINE))
