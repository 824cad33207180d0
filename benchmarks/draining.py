"""Measure how fast records come to a file as text, and what the reader takes for one."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_hits import HANDLERS
from table import Measurement, Unit
from tracing import BUFFERS, CPUS, Loop, Tracer, bpftrace, dprobes, has_bpftrace, on_cpus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["draining"]

ROUNDS = 2
RECORDS = 1_000_000
SETTLED = 0.5
"""Seconds after which a file that has not grown is taken to be complete."""

FOUR_WORDS = HANDLERS[1]


@dataclass(frozen=True, slots=True)
class _Drained:
    rate: float  # records per second
    cpu: float  # microseconds of the reader per record
    memory: int  # KiB
    lost: int


def draining(directory: Path) -> list[Measurement]:
    """Return the rows about records drained to a file."""
    loop = Loop(directory)
    source, records = directory / "drain.rpn", directory / "records"
    source.write_text(f'name = "{loop.path}"\noffset = called\n{FOUR_WORDS.rpn}\n')
    ours = [_drain(loop, dprobes(source, "-o", str(records)), directory, records) for _ in range(ROUNDS)]
    theirs = None
    if has_bpftrace():
        output = directory / "bpftrace.records"
        command = [*bpftrace(loop.probe, FOUR_WORDS.bpftrace), "-o", str(output)]
        theirs = _drain(loop, command, directory, output, BUFFERS)
    best = max(ours, key=lambda drained: drained.rate)
    what = f"{RECORDS:,} records of 4 words as text".replace(",", " ")
    lost = f"lost {sum(drained.lost for drained in ours)}"
    peer = f"bpftrace, lost {theirs.lost}" if theirs else ""
    cpu = min(drained.cpu for drained in ours)
    memory = min(drained.memory for drained in ours)
    return [
        Measurement(f"{what} to a file, {lost}", best.rate, peer, theirs.rate if theirs else None, Unit.RATE),
        Measurement(f"{what}: the reader, for each", cpu, peer, theirs.cpu if theirs else None),
        Measurement(f"{what}: peak memory", memory, peer, theirs.memory if theirs else None, Unit.KIB),
    ]


def _drain(
    loop: Loop, command: list[str], directory: Path, output: Path, environment: Mapping[str, str] | None = None
) -> _Drained:
    with Tracer(command, directory, CPUS[1:] or CPUS, environment) as tracer:
        tracer.wait_until_attached(1)
        time.sleep(SETTLED)
        cpu = tracer.processor_time()
        begin = time.monotonic()
        with subprocess.Popen(
            on_cpus(CPUS[:1], str(loop.path), str(RECORDS), "calls"), stderr=subprocess.DEVNULL
        ) as calling:
            size, last = output.stat().st_size, begin
            while calling.poll() is None or time.monotonic() - last < SETTLED:
                time.sleep(0.002)
                if (now := output.stat().st_size) != size:
                    size, last = now, time.monotonic()
        cpu = tracer.processor_time() - cpu
        usage = tracer.stop()
    came = _lines(output)
    return _Drained(came / (last - begin), cpu / came * 1e6, usage.memory, RECORDS - came)


def _lines(path: Path) -> int:
    """Return how many records are in a file, by the times of ours or the four words of the peer's."""
    record = re.compile(rb"\d\d:\d\d:\d\d\.|(?:[0-9a-f]+ ){3}[0-9a-f]+$")
    with path.open("rb") as file:
        return sum(record.match(line) is not None for line in file)
