"""Measure that memory does not grow with the number of records: while they are recorded, and while they are read."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from kernel_hits import HANDLERS
from table import Measurement, Unit
from tracing import CPUS, DPROBES, Loop, Tracer, dprobes, on_cpus

__all__ = ["endurance"]

FEW, MANY = 1_000_000, 10_000_000
SETTLED = 0.5
"""Seconds after which a file that has not grown is taken to be complete."""

FOUR_WORDS = HANDLERS[1]


@dataclass(frozen=True, slots=True)
class _Grown:
    early: int  # KiB resident after FEW records
    late: int  # the most after that, looked at after every FEW
    count: int


def endurance(directory: Path) -> list[Measurement]:
    """Return the rows about memory over many records."""
    loop = Loop(directory)
    source, output = directory / "endurance.rpn", directory / "records.dpt"
    source.write_text(f'name = "{loop.path}"\noffset = called\n{FOUR_WORDS.rpn}\n')
    grown = _record(loop, source, output, directory)
    what = f"{grown.count:,} records to a trace file: memory after them".replace(",", " ")
    peer = f"after {FEW:,}".replace(",", " ")
    peak = _read(output)
    output.unlink()
    return [
        Measurement(what, grown.late, peer, grown.early, Unit.KIB),
        Measurement("peak memory to print them from the file", peak, "", None, Unit.KIB),
    ]


def _record(loop: Loop, source: Path, output: Path, directory: Path) -> _Grown:
    with Tracer(dprobes(source, "-o", str(output)), directory, CPUS[1:] or CPUS) as tracer:
        tracer.wait_until_attached(1)
        _call(loop, FEW, output)
        early = late = _resident(tracer.pid)
        for _ in range(MANY // FEW - 1):
            _call(loop, FEW, output)
            late = max(late, _resident(tracer.pid))
        tracer.stop()
        found = re.search(r"^\d+,\d+ +\S+ +\d+ +(\d+)", tracer.messages, re.MULTILINE)
    return _Grown(early, late, int(found[1]) if found else 0)


def _call(loop: Loop, count: int, output: Path) -> None:
    """Make so many hits, and wait until the file does not grow any more."""
    command = on_cpus(CPUS[:1], str(loop.path), str(count), "calls")
    subprocess.run(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    size, last = output.stat().st_size, time.monotonic()
    while time.monotonic() - last < SETTLED:
        time.sleep(0.01)
        if (now := output.stat().st_size) != size:
            size, last = now, time.monotonic()


def _resident(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(path: Path) -> int:
    """Return the peak memory in KiB of ``dprobes log``."""
    command = [*DPROBES, "log", str(path), "--format", "hex"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            if (found := re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)) is not None:
                peak = int(found[1])
            time.sleep(0.05)
    return peak
