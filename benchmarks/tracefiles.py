"""
Measure trace files that real runs write: how fast records get into one, what they take of it, and how fast it answers.

The records are two words and all items of the header, of a function that is called as fast as that goes, on a CPU of
its own; then those of three functions, of different sizes, one with a string. Rates of the reader and of the answers
are those of processor time: what a start takes is not counted.
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
    from collections.abc import Callable, Mapping
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
SEVERAL = """called(long n) { printf("called %d", n); }
second(long n, char *text) { printf("second %d %s", n, str(text)); }
third(long n, char *text, long k) { printf("third %d %d %d", n, k, n + k); }
"""
ANSWERS_OF_SEVERAL = {
    "log --total": ("log", "--total"),
    "log --count pid": ("log", "--count", "pid"),
    "log --count called, all different": ("log", "--count", "called"),
    "log --hist third": ("log", "--hist", "third"),
    "log --total, of strings by a filter": ("log", "--total", "--filter", 'arg1 contains "GET"'),
    "log --count name, by a filter": ("log", "--count", "name", "--filter", "pid > 1 and time > 1"),
}
QUERY = "select count(*), max(pid) from records"


def trace_files(directory: Path) -> list[Measurement]:
    """Return the rows about trace files of runs."""
    loop, source, trace = Loop(directory), directory / "two.rpn", directory / "two.dpt"
    source.write_text(f'name = "{loop.path}"\noffset = called\n{HANDLER}\n')
    before = loop.calls(RECORDS // 10)
    hit, reader, (hits, written, lost) = _write(loop, source, trace, directory, loop.calls)
    rows = [
        Measurement("a hit with a record of two words and all items", hit / 1000, "no probe", before / 1000),
        Measurement(f"records into a trace file, lost {lost} of {hits}", written / reader, "", None, Unit.RATE),
        Measurement("trace file: bytes of 1000 records", trace.stat().st_size / written * 1000 / 1024, "as they are",
                    90 * 1000 / 1024, Unit.KIB),
    ]  # fmt: skip
    empty = directory / "empty.dpt"
    subprocess.run([*_DPROBES, "run", "--engine", "ptrace", str(source), "-o", str(empty), "--", "/bin/true"],
                   capture_output=True, check=False)  # fmt: skip
    rows += _answers("trace file of a run", ANSWERS, trace, empty, written)
    seconds = _seconds("sql", str(trace), QUERY) - _seconds("sql", str(empty), QUERY)
    rows.append(Measurement("trace file of a run: sql, count and maximum", written / seconds, "", None, Unit.RATE))

    several, mixed = directory / "several.dpc", directory / "several.dpt"
    several.write_text(f'module "{loop.path}";\n{SEVERAL}')
    _, reader, (hits, written, lost) = _write(loop, several, mixed, directory, loop.several)
    return [
        *rows,
        Measurement(f"records of three probes into a trace file, lost {lost} of {hits}", written / reader, "", None,
                    Unit.RATE),
        Measurement("trace file of three probes: bytes of 1000 records", mixed.stat().st_size / written * 1000 / 1024,
                    "", None, Unit.KIB),
        *_answers("trace file of three probes", ANSWERS_OF_SEVERAL, mixed, empty, written),
    ]  # fmt: skip


_DPROBES = (sys.executable, "-m", "dprobes")


def _write(
    loop: Loop, source: Path, trace: Path, directory: Path, calls: Callable[[int], float]
) -> tuple[float, float, tuple[int, int, int]]:
    """Return what a hit took in nanoseconds, and the tracer in seconds, at best; hits, records and lost ones."""
    hit = reader = float("inf")
    counts = 0, 0, 0
    for _ in range(ROUNDS):
        trace.unlink(missing_ok=True)
        with Tracer(dprobes(source, "-o", str(trace)), directory) as tracer:
            loop.wait_until_armed()
            begun = tracer.processor_time()
            hit = min(hit, calls(RECORDS))
            usage = tracer.stop()
            reader = min(reader, usage.cpu - begun)
        counts = _counts(tracer.messages)
    return hit, reader, counts


def _answers(
    of: str, answers: Mapping[str, tuple[str, ...]], trace: Path, empty: Path, records: int
) -> list[Measurement]:
    """Return the rates at which a trace file answers, without what an empty one takes."""
    rows = []
    for what, (verb, *options) in answers.items():
        seconds = _seconds(verb, *options, str(trace)) - _seconds(verb, *options, str(empty))
        rows.append(Measurement(f"{of}: {what}", records / max(seconds, 0.01), "", None, Unit.RATE))
    return rows


def _counts(messages: str) -> tuple[int, int, int]:
    """Return hits, records and lost records of all probes, as a summary says."""
    found = re.findall(r"^0,\d+ +\w+ +(\d+) +(\d+) +(\d+)", messages, re.MULTILINE)
    assert found, messages
    hits, records, lost = (sum(map(int, column)) for column in zip(*found, strict=True))
    return hits, records, lost


def _seconds(*arguments: str) -> float:
    """Return the processor time of one of our commands, the best of some rounds."""
    return min(_once(arguments) for _ in range(ROUNDS))


def _once(arguments: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*_DPROBES, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
