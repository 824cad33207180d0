"""
Measure what handlers cost in the kernel, beside bpftrace doing the same work.

The probed instruction is ``push %rbp``, which the kernel emulates; the loop has a CPU of its own, readers drain on
another one. Tracers take turns, because the speed of a shared machine changes by the second. Two figures for each
handler: the time of a hit above that of an empty program attached in the same way, and the time in the program alone
as the kernel counts it (``BPF_ENABLE_STATS``), also above the empty one's. The latter is steadier, but lacks what the
program brings about afterwards, such as waking up a reader.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from table import Measurement
from tracing import BUFFERS, Loop, Tracer, bpftrace, dprobes, has_bpftrace

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import load
from dprobes.engines.ebpf.kernel.kernel_features import Features
from dprobes.platform.linux.bpf_calls import ProgramType, enable_statistics, open_program, program_info
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["kernel_hits", "papers_experiments"]

ROUNDS = 3
HITS = 40_000
BATCHES = 4
TURNS = 100_000_000

EMPTY = "an empty program"
ARITHMETIC = ((7, "add", "+"), (3, "mul", "*"), (5, "xor", "^"), (9, "sub", "-"), (11, "and", "&"))


@dataclass(frozen=True, slots=True)
class Handler:
    """The same work in both languages."""

    what: str
    rpn: str
    bpftrace: str
    header: str = "vars = 1"
    is_deep: bool = False


HANDLERS = (
    Handler("count", "inc lv, 0\nabort", "@ = count();"),
    Handler(
        "4 words logged",
        "push r, arg0\npush r, arg1\npush r, arg2\npush r, arg3\nlog 4\nexit",
        r'printf("%lx %lx %lx %lx\n", arg0, arg1, arg2, arg3);',
    ),
    Handler("a string of 30 logged", "push 40\npush r, arg1\nlog str\nexit", r'printf("%s\n", str(arg1, 40));'),
    Handler(
        "50 instructions, a number kept",
        "push r, arg0\n" + "".join(f"push {n}\n{word}\n" for n, word, _ in 5 * ARITHMETIC) + "pop lv, 0\nabort",
        "$x = arg0; " + "".join(f"$x = $x {sign} {n}; " for n, _, sign in 5 * ARITHMETIC) + "@ = $x;",
    ),
    Handler(
        "counted by 64 keys",
        "push r, arg0\npush 63\nand\ntally t\nabort",
        "@[arg0 & 63] = count();",
        "table = t, count, word",
    ),
    Handler("a histogram", "push r, arg0\ntally t\nabort", "@ = hist(arg0);", "table = t, hist"),
    Handler(
        "64 histograms",
        "push r, arg0\npush 63\nand\npush r, arg0\ntally t\nabort",
        "@[arg0 & 63] = hist(arg0);",
        "table = t, hist, word",
    ),
    Handler("counted by thread name", "tally t\nabort", "@[comm] = count();", "table = t, count, comm"),
    Handler(
        "counted by a string of 30",
        "push r, arg1\ntally t\nabort",
        "@[str(arg1, 40)] = count();",
        "table = t, count, str[40]",
    ),
    Handler("a call stack of 20 frames", "log ustack\nexit", "@[ustack] = count();", "logmax = 2048", is_deep=True),
)


@dataclass(slots=True)
class _Cost:
    """The best times in nanoseconds; None is what could not be measured."""

    hit: float
    program: float | None

    def note(self, other: _Cost) -> None:
        self.hit = min(self.hit, other.hit)
        self.program = min((time for time in (self.program, other.program) if time is not None), default=None)


def _run_times(programs: Iterable[int]) -> tuple[int, int]:
    """Return nanoseconds and runs of programs, given by their descriptors, as far as they have been counted."""
    found = [program_info(program) for program in programs]
    return sum(info.run_time for info in found), sum(info.runs for info in found)


class _Costs:
    """Measure all handlers in turn, round after round."""

    def __init__(self, directory: Path, loop: Loop) -> None:
        self._directory = directory
        self._loop = loop
        self.costs: dict[tuple[str, str], _Cost] = {}
        self.unprobed = self.after = float("inf")

    def measure(self) -> None:
        for _ in range(ROUNDS):
            self.unprobed = min(self.unprobed, self._loop.calls(TURNS // 10))
            with self._empty() as program:
                self._note("dprobes", EMPTY, [program])
            for handler in HANDLERS:
                source = self._directory / "hit.rpn"
                source.write_text(f'name = "{self._loop.path}"\n{handler.header}\noffset = called\n{handler.rpn}\n')
                command = dprobes(source, "-o", str(self._directory / "records"))
                self._trace("dprobes", handler.what, command, is_deep=handler.is_deep)
            self.after = min(self.after, self._loop.calls(TURNS // 10))
            if has_bpftrace():
                for handler in (Handler(EMPTY, "", ""), *HANDLERS):
                    command = bpftrace(self._loop.probe, handler.bpftrace)
                    self._trace("bpftrace", handler.what, command, BUFFERS, is_deep=handler.is_deep)

    def _trace(
        self,
        who: str,
        what: str,
        command: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        is_deep: bool = False,
    ) -> None:
        with Tracer(command, self._directory, environment=environment) as tracer:
            self._loop.wait_until_armed()
            programs = [open_program(number) for number in tracer.uprobe_programs()]
            try:
                self._note(who, what, programs, is_deep=is_deep)
            finally:
                for program in programs:
                    os.close(program)

    def _note(self, who: str, what: str, programs: list[int], *, is_deep: bool = False) -> None:
        hit = self._loop.calls(HITS, BATCHES, is_deep=is_deep)
        measured = _Cost(hit, self._program_time(programs, is_deep=is_deep))
        self.costs.setdefault((who, what), measured).note(measured)

    def _program_time(self, programs: list[int], *, is_deep: bool) -> float | None:
        """Return the nanoseconds of a run of the programs as the kernel counts them, the best of some batches."""
        times = []
        statistics = enable_statistics()
        try:
            for _ in range(BATCHES):
                before = _run_times(programs)
                self._loop.calls(HITS // 4, is_deep=is_deep)
                after = _run_times(programs)
                if after[1] > before[1]:
                    times.append((after[0] - before[0]) / (after[1] - before[1]))
        finally:
            os.close(statistics)
        return min(times, default=None)

    @contextlib.contextmanager
    def _empty(self) -> Iterator[int]:
        """Attach a program that does nothing; yield its descriptor."""
        module = Module.load(self._loop.path)
        offset = module.file_offset(module.address_of("called"))
        assert offset is not None
        asm = Assembler()
        asm.mov(Register(0), 0)
        asm.exit()
        features = Features()
        program = load(asm.assemble(), {}, ProgramType.KPROBE, attach_type=uprobe_attach_type(features))
        try:
            with attach_uprobes(program, str(self._loop.path), [(offset, 0)], features):
                yield program
        finally:
            os.close(program)


def kernel_hits(directory: Path) -> list[Measurement]:
    """Return the rows about handlers, and about the loop before and after."""
    loop = Loop(directory)
    costs = _Costs(directory, loop)
    costs.measure()

    def row(what: str, *nanoseconds: float | None) -> Measurement:
        ours, peers = (None if time is None else time / 1000 for time in nanoseconds)
        return Measurement(what, ours, "bpftrace", peers)

    def above_empty(who: str, what: str, *, in_program: bool) -> float | None:
        cost, empty = costs.costs.get((who, what)), costs.costs.get((who, EMPTY))
        if cost is None or empty is None:
            return None
        if not in_program:
            return cost.hit - empty.hit
        return None if cost.program is None or empty.program is None else cost.program - empty.program

    theirs = costs.costs.get(("bpftrace", EMPTY))
    rows = [row(f"hit in the kernel: {EMPTY}", costs.costs["dprobes", EMPTY].hit, theirs.hit if theirs else None)]
    for handler in HANDLERS:
        for in_program, where in ((False, "above empty"), (True, "program alone")):
            ours = above_empty("dprobes", handler.what, in_program=in_program)
            peers = above_empty("bpftrace", handler.what, in_program=in_program)
            rows.append(row(f"hit in the kernel: {handler.what}, {where}", ours, peers))
    rows.append(
        Measurement("a call after the probes are gone", costs.after / 1000, "before", costs.unprobed / 1000),
    )
    return rows


PAPER = (
    ("paper 2: abort, on a stepped instruction", "loop", "abort", 16),
    ("paper 3: abort, on the nop", "loop + 2", "abort", 8),
    ("paper 4: as 2, with push r, eax", "loop", "push r, eax\nabort", 16),
    ("paper 5: as 2, exit with a record", "loop", "exit", 200),
)


def papers_experiments(directory: Path) -> list[Measurement]:
    """Return the rows of the paper's five experiments (seed 000) with the eBPF engine."""
    loop = Loop(directory)
    rows = [Measurement("ebpf, paper 1: the loop without a probe", loop.turns(TURNS) / 1000, "paper", 0.030)]
    for what, offset, handler, papers in PAPER:
        source = directory / "paper.rpn"
        source.write_text(f'name = "{loop.path}"\noffset = {offset}\n{handler}\n')
        with Tracer(dprobes(source, "-o", str(directory / "records")), directory) as tracer:
            tracer.wait_until_attached(1)
            rows.append(Measurement(f"ebpf, {what}", loop.turns(20_000, ROUNDS) / 1000, "paper", papers))
    return rows
