"""
Measure trace files that real runs write: how fast records get into one, what they take of it, and how fast it answers.

The records are two words and all items of the header, of a function that is called as fast as that goes, on a CPU of
its own. Rates of the reader and of the answers are those of processor time: what a start takes is not counted.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

from table import Measurement, Unit
from tracing import Loop, Tracer, dprobes

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["trace_files"]

RECORDS = 3_000_000
ROUNDS = 2
HANDLER = "push r, arg0\npush r, arg1\nlog 2\nexit"

ANSWERS = {
    "log --total": ("log", "--total"),
    "log --count pid": ("log", "--count", "pid"),
    "log --count arg0, all different": ("log", "--count", "arg0"),
    "log --hist arg0": ("log", "--hist", "arg0"),
    "log --count name, by a filter": ("log", "--count", "name", "--filter", "pid > 1 and time > 1"),
}
QUERY = "select count(*), max(pid) from records"


def trace_files(directory: Path) -> list[Measurement]:
    """Return the rows about a trace file of a run."""
    loop, source, trace = Loop(directory), directory / "two.rpn", directory / "two.dpt"
    source.write_text(f'name = "{loop.path}"\noffset = called\n{HANDLER}\n')
    before = loop.calls(RECORDS // 10)
    reader = float("inf")
    for _ in range(ROUNDS):
        trace.unlink(missing_ok=True)
        with Tracer(dprobes(source, "-o", str(trace)), directory) as tracer:
            loop.wait_until_armed()
            begun = tracer.processor_time()
            hit = loop.calls(RECORDS)
            usage = tracer.stop()
            reader = min(reader, usage.cpu - begun)
        hits, written, lost = _counts(tracer.messages)
    rows = [
        Measurement("a hit with a record of two words and all items", hit / 1000, "no probe", before / 1000),
        Measurement(f"records into a trace file, lost {lost} of {hits}", written / reader, "", None, Unit.RATE),
        Measurement("trace file: bytes of 1000 records", trace.stat().st_size / written * 1000 / 1024, "as they are",
                    90 * 1000 / 1024, Unit.KIB),
    ]  # fmt: skip
    empty = directory / "empty.dpt"
    subprocess.run([*_DPROBES, "run", "--engine", "ptrace", str(source), "-o", str(empty), "--", "/bin/true"],
                   capture_output=True, check=False)  # fmt: skip
    for what, (verb, *options) in ANSWERS.items():
        seconds = _seconds(verb, *options, str(trace)) - _seconds(verb, *options, str(empty))
        rows.append(Measurement(f"trace file of a run: {what}", written / seconds, "", None, Unit.RATE))
    seconds = _seconds("sql", str(trace), QUERY) - _seconds("sql", str(empty), QUERY)
    rows.append(Measurement("trace file of a run: sql, count and maximum", written / seconds, "", None, Unit.RATE))
    return rows


_DPROBES = (sys.executable, "-m", "dprobes")


def _counts(messages: str) -> tuple[int, int, int]:
    """Return hits, records and lost records, as a summary says."""
    found = re.search(r"^0,0 +called +(\d+) +(\d+) +(\d+)", messages, re.MULTILINE)
    assert found is not None, messages
    hits, records, lost = map(int, found.groups())
    return hits, records, lost


def _seconds(*arguments: str) -> float:
    """Return the processor time of one of our commands, the best of some rounds."""
    return min(_once(arguments) for _ in range(ROUNDS))


def _once(arguments: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*_DPROBES, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
