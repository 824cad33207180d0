"""Measure the probe manager with many programs: 50 of them with 100 probepoints each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from table import Measurement, Unit

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["managing"]

PROGRAMS, PROBEPOINTS = 50, 100
ROUNDS = 5
SOURCE = Path(__file__).parents[1] / "tests/programs/many.c"


def managing(directory: Path) -> list[Measurement]:
    """Return the rows about the manager."""
    program = directory / "many"
    subprocess.run(["gcc", "-O1", "-o", program, SOURCE], check=True)
    environment = {
        **os.environ,
        "DPROBES_RUNTIME_DIR": str(directory / "manager-runtime"),
        "DPROBES_STATE_DIR": str(directory / "manager-state"),
    }

    def seconds(*arguments: object) -> float:
        begin = time.monotonic()
        command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.monotonic() - begin

    with _waiting(program) as pid:
        try:
            inserting = []
            for number in range(PROGRAMS):
                source = directory / f"{number}.rpn"
                source.write_text(f'name = "{program}"\nmajor = {number}\noffset = many_{number + 10}??\nexit\n')
                inserting.append(seconds("insert", source, "-p", pid, "--engine", "ebpf", "--as", f"p{number}"))
            memory = _memory(int((directory / "manager-runtime/manager.lock").read_text()))
            querying = min(seconds("query") for _ in range(ROUNDS))
            as_json = min(seconds("query", "--json") for _ in range(ROUNDS))
            removing = seconds("remove", "--all")
        finally:
            seconds("stop", "--manager")
    what = f"{PROGRAMS} programs, {PROGRAMS * PROBEPOINTS} probepoints"
    return [
        Measurement("insert the first program, with the start of the manager", inserting[0] * 1e6),
        Measurement(f"insert another one ({PROBEPOINTS} probepoints), best", min(inserting[1:]) * 1e6),
        Measurement(f"insert another one ({PROBEPOINTS} probepoints), the last", inserting[-1] * 1e6),
        Measurement(f"{what}: query", querying * 1e6),
        Measurement(f"{what}: query --json", as_json * 1e6),
        Measurement(f"{what}: remove --all", removing * 1e6),
        Measurement(f"{what}: memory of the manager", memory, unit=Unit.KIB),
    ]


@contextlib.contextmanager
def _waiting(program: Path) -> Iterator[int]:
    with subprocess.Popen([program, "1", "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def _memory(pid: int) -> float:
    """Return how much memory a process has alone, in KiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))
