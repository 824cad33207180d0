"""Measure how long tracers take until their first probe is armed, and what they need to be there at all."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from table import Measurement, Unit
from tracing import BYTE_CODE, CPUS, DPROBES, Loop, Tracer, bpftrace, byte_code, dprobes, has_bpftrace, until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["starting"]

ROUNDS = 6

RUNS = {"first run after a boot": True, "later run": False}
"""Runs of a one-liner, and whether the cache directory is removed before each: what the kernel offers is in it."""


def starting(directory: Path) -> list[Measurement]:
    """Return the rows about the first probe: one place, a count."""
    loop = Loop(directory)
    source = directory / "start.rpn"
    source.write_text(f'name = "{loop.path}"\nvars = 1\noffset = called\ninc lv, 0\nabort\n')
    commands = {f"dprobes {word}": dprobes(source) for word in BYTE_CODE}
    environments = {f"dprobes {word}": byte_code(directory, is_there=it) for word, it in BYTE_CODE.items()}
    if has_bpftrace():
        commands["bpftrace"] = bpftrace(loop.probe, "@ = count();")
    armed: dict[str, list[float]] = {}
    gone: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for who, command in commands.items():
            with loop.waiting() as waiting:
                time.sleep(0.05)
                with Tracer(command, directory, CPUS[1:] or CPUS, environments.get(who)) as tracer:
                    armed.setdefault(who, []).append((loop.wait_until_armed(waiting) - tracer.started) * 1e6)
                    usage = tracer.stop()
            gone.setdefault(who, []).append(usage.ending * 1e6)
            cpu.setdefault(who, []).append(usage.cpu * 1e6)
            memory.setdefault(who, []).append(usage.memory)

    def row(
        what: str, figures: dict[str, list[float]], word: str = "with", unit: Unit = Unit.MICROSECONDS
    ) -> Measurement:
        best = {who: min(values) for who, values in figures.items()}
        return Measurement(what, best[f"dprobes {word}"], "bpftrace", best.get("bpftrace"), unit)

    return [
        *(row(f"start: to the first armed probe, {word} byte code", armed, word) for word in BYTE_CODE),
        *_one_liner(loop, directory),
        row("start and end: processor time", cpu),
        row("end: from Ctrl-C to the end, one probe", gone),
        row("peak memory, one probe", memory, unit=Unit.KIB),
    ]


def _one_liner(loop: Loop, directory: Path) -> list[Measurement]:
    """
    Return the rows about a line in DProbes C, in one process: to its first probe, and what the whole run takes.

    The line is run when nothing is known of the kernel, and when that is known.
    """
    line = f'"{loop.path}":called {{ @ = count(); }}'
    environment = byte_code(directory, is_there=True) | {"XDG_CACHE_HOME": str(directory / "cache")}
    armed: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for _ in range(ROUNDS):
        for who in (*RUNS, *(["bpftrace"] if has_bpftrace() else [])):
            if RUNS.get(who):
                shutil.rmtree(directory / "cache" / "dprobes", ignore_errors=True)
            with loop.waiting() as waiting:
                time.sleep(0.05)
                pid = str(waiting.pid)
                command = [*DPROBES, "run", "--engine", "ebpf", "-e", line, "-p", pid]
                if who == "bpftrace":
                    command = [*bpftrace(loop.probe, "@ = count();"), "-p", pid]
                with Tracer(command, directory, CPUS[1:] or CPUS, environment) as tracer:
                    taken = (loop.wait_until_armed(waiting) - tracer.started) * 1e6
                    if who in RUNS:
                        until(lambda: "is active" in tracer.messages, "the note of an active probepoint")
                    used = tracer.stop().cpu * 1e6
            armed[who] = min(armed.get(who, taken), taken)
            cpu[who] = min(cpu.get(who, used), used)
    return [
        Measurement(f"one-liner, {run}: {what}", best[run], "bpftrace", best.get("bpftrace"))
        for run in RUNS
        for what, best in (("to the first armed probe", armed), ("processor time, with its end", cpu))
    ]
