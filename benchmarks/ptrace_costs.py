"""Measure the ptrace engine: what a hit costs beside other tracers and in the paper, and what a start costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from handlers import handler_costs
from peers import HANDLER, hit_costs
from table import BenchmarkError, Measurement
from tracing import BYTE_CODE, DPROBES, byte_code

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["by_ptrace"]

HERE = Path(__file__).parent

ROUNDS = 3
HITS = 5000

RPN = 'name = "{program}"\noffset = {offset}\n{handler}\n'

GDB = """
set pagination off
break *{place}
commands
silent
continue
end
run {arguments}
"""


def loop_time(command: list[str], *, one_cpu: bool = False) -> float:
    """
    Run a command until the program in it prints its time; return microseconds per iteration, the best of some.

    ``one_cpu`` holds the command and all that it starts on one CPU: waking a process up on another one is the largest
    part of a hit in many virtual machines.
    """
    if one_cpu:
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]
    best = float("inf")
    for _ in range(ROUNDS):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        found = re.search(r"^LOOP ([0-9.]+)$", done.stdout + done.stderr, re.MULTILINE)
        if found is None:
            raise BenchmarkError(f"{command} printed no time:\n{done.stdout}{done.stderr}")
        best = min(best, float(found.group(1)) / 1000)
    return best


def run_time(command: list[str], rounds: int, environment: Mapping[str, str] | None = None) -> float:
    """Return the microseconds that a command takes, the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False, env=os.environ | dict(environment or {}))
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


class Bench:
    """Hold the compiled program and a directory for the files of the measurements."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._program = directory / "bench_loop"
        subprocess.run(["gcc", "-O1", "-o", self._program, HERE / "loop.c"], check=True)

    def dprobes(self, offset: str, handler: str, *arguments: str, one_cpu: bool = False) -> float:
        """Return the microseconds of an iteration with our probe on ``offset``."""
        source = self._directory / "bench.rpn"
        source.write_text(RPN.format(program=self._program.name, offset=offset, handler=handler))
        run = ["run", "--engine", "ptrace", str(source), "-o", str(self._directory / "records"), "--"]
        return loop_time([*DPROBES, *run, str(self._program), *arguments], one_cpu=one_cpu)

    def gdb(self, place: str, *arguments: str, one_cpu: bool = False) -> float | None:
        """Return the microseconds of an iteration with a GDB breakpoint that goes on silently."""
        if shutil.which("gdb") is None:
            return None
        script = self._directory / "bench.gdb"
        script.write_text(GDB.format(place=place, arguments=" ".join(arguments)))
        return loop_time(["gdb", "-q", "-batch", "-x", str(script), str(self._program)], one_cpu=one_cpu)

    def base(self, *arguments: str) -> float:
        return loop_time([str(self._program), *arguments])

    def start(self, *arguments: str) -> float:
        """Return the microseconds that one run of the command takes."""
        return run_time([*DPROBES, *arguments], 5)

    def many(self) -> Measurement:
        """Measure what it takes to insert and remove 10 000 probepoints, none of which is hit."""
        program, source = self._directory / "many", self._directory / "many.rpn"
        subprocess.run(["gcc", "-O1", "-o", program, HERE.parent / "tests" / "programs" / "many.c"], check=True)
        source.write_text("name = many\noffset = many_*\nexit\n")
        command = ["-c", f"{program} 0"]
        nothing = self.start("run", "--engine", "ptrace", str(source), "-c", "true")
        ours = self.start("run", "--engine", "ptrace", str(source), *command) - nothing
        gdb = ["gdb", "-q", "-batch", "-ex", "set pagination off", str(program)]
        theirs = None
        if shutil.which("gdb") is not None:
            theirs = run_time([*gdb, "-ex", "rbreak ^many_", "-ex", "run 0"], 1) - run_time([*gdb, "-ex", "run 0"], 1)
        return Measurement("10 000 probepoints inserted and removed", ours, "gdb rbreak", theirs)

    def beside_peers(self) -> list[Measurement]:
        """Measure a hit with ten instructions and a record, beside everyone who can do the same."""
        ours = {
            (place, one_cpu): self.dprobes(place, HANDLER, str(HITS), *arguments, one_cpu=one_cpu)
            for place, arguments in (("called", ["calls"]), ("loop", []))
            for one_cpu in (False, True)
        }
        return [Measurement(*cost) for cost in hit_costs(self._program, HITS, ours, loop_time)]

    def measure(self) -> list[Measurement]:
        hits = str(HITS)
        log = "push r, arg0\nlog 1\nexit"
        called = self.gdb("called", hits, "calls")
        stepped = self.gdb("loop", hits)
        malloc = str(HERE.parent / "examples" / "malloc.rpn")
        emulated, stepped_log = self.dprobes("called", log, hits, "calls"), self.dprobes("loop", log, hits)
        pinned = self.dprobes("called", log, hits, "calls", one_cpu=True)
        pinned_gdb = self.gdb("called", hits, "calls", one_cpu=True)
        null, on_nop = self.dprobes("loop", "abort", hits), self.dprobes("loop + 2", "abort", hits)
        with_push = self.dprobes("loop", "push r, eax\nabort", hits)
        with_record = self.dprobes("loop", "exit", hits)
        returned, timed, counted = (
            self.dprobes("called", f"return = yes\n{handler}abort", hits, "calls", one_cpu=True)
            for handler in ("", "push elapsed\nlog 1\n", "push elapsed, page-faults\nlog 1\n")
        )
        return [
            *self.beside_peers(),
            Measurement("hit on push rbp (emulated), one word logged", emulated, "gdb", called),
            Measurement("the same, everything on one CPU", pinned, "gdb", pinned_gdb),
            Measurement("hit on a stepped instruction, one word logged", stepped_log, "gdb", stepped),
            Measurement("paper 1: the loop without a probe", self.base("100000000"), "paper", 0.030),
            Measurement("paper 2: abort, on a stepped instruction", null, "paper", 16),
            Measurement("paper 3: abort, on the nop", on_nop, "paper", 8),
            Measurement("paper 4: as 2, with push r, eax", with_push, "paper", 16),
            Measurement("paper 5: as 2, exit with a record", with_record, "paper", 200),
            Measurement("a call, its return probed: nothing, everything on one CPU", returned),
            Measurement("... time kept", timed),
            Measurement("... page faults kept", counted),
            *(Measurement(*cost) for cost in handler_costs()),
            self.many(),
            *self.starts(malloc),
        ]

    def starts(self, source: str) -> list[Measurement]:
        """Measure starts with and without byte code on disk."""
        rows = {
            "dprobes --help": ["--help"],
            "dprobes check": ["check", source],
            "dprobes run, to the end of 'true'": ["run", "--engine", "ptrace", source, "-c", "true"],
        }
        return [
            Measurement(
                f"start: {what}, {word} byte code",
                run_time([*DPROBES, *arguments], 5, byte_code(self._directory, is_there=is_there)),
            )
            for what, arguments in rows.items()
            for word, is_there in BYTE_CODE.items()
        ]


def by_ptrace(directory: Path) -> list[Measurement]:
    """Return the rows about the ptrace engine."""
    return Bench(directory).measure()
