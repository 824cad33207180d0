"""
Measure what it costs to know at a return how long the call has taken, and its arguments, beside bpftrace's idiom.

That keeps the time in a map by the thread (``@start[tid] = nsecs``), so that recursion and ``longjmp`` give wrong
numbers. Two figures for each question: the time of a call of an empty function, where a uretprobe costs less than a
return instruction that the kernel single-steps, and the time of a call in the programs alone, as the kernel counts it
(``BPF_ENABLE_STATS``), those at the entry included. Tracers take turns, as in ``kernel_hits``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from table import Measurement
from tracing import BUFFERS, Loop, Tracer, dprobes, has_bpftrace

from dprobes.platform.linux.bpf_calls import enable_statistics, open_program, program_info

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["returns"]

ROUNDS = 3
CALLS = 20_000
BATCHES = 4
TURNS = 10_000_000


@dataclass(frozen=True, slots=True)
class Question:
    """
    The same question in both languages; ``{probe}`` is bpftrace's name of the function.

    ``bpftrace`` None: bpftrace cannot answer it.
    """

    what: str
    rpn: str
    bpftrace: str | None


QUESTIONS = (
    Question("nothing", "abort", "uretprobe:{probe} {{ }}"),
    Question(
        "time kept",
        "push elapsed\npop lv, 0\nabort",
        "uprobe:{probe} {{ @start[tid] = nsecs; }} "
        "uretprobe:{probe} /@start[tid]/ {{ @ = nsecs - @start[tid]; delete(@start[tid]); }}",
    ),
    Question(
        "time and two arguments kept",
        "push elapsed\npop lv, 0\npush entry, arg0\npop lv, 1\npush entry, arg1\npop lv, 2\nabort",
        "uprobe:{probe} {{ @start[tid] = nsecs; @a[tid] = arg0; @b[tid] = arg1; }} "
        "uretprobe:{probe} /@start[tid]/ {{ @ = nsecs - @start[tid]; @x = @a[tid]; @y = @b[tid]; "
        "delete(@start[tid]); delete(@a[tid]); delete(@b[tid]); }}",
    ),
    Question("page faults kept", "push elapsed, page-faults\npop lv, 0\nabort", None),
    Question("CPU time kept", "push elapsed, task-clock\npop lv, 0\nabort", None),
)


@dataclass(slots=True)
class _Cost:
    """The best times of a call in microseconds."""

    call: float
    programs: float


def returns(directory: Path) -> list[Measurement]:
    """Return the rows about returns: a call with each question, and that without a probe."""
    loop = Loop(directory)
    costs: dict[tuple[str, str], _Cost] = {}
    unprobed = loop.calls(TURNS)
    for _ in range(ROUNDS):
        for question in QUESTIONS:
            source = directory / "return.rpn"
            head = f'name = "{loop.path}"\nvars = 3\noffset = called\nreturn = yes\n'
            source.write_text(f"{head}{question.rpn}\n")
            tracers = {"dprobes": dprobes(source)}
            if has_bpftrace() and question.bpftrace is not None:
                tracers["bpftrace"] = ["bpftrace", "-e", question.bpftrace.format(probe=f"{loop.path}:called")]
            for who, command in tracers.items():
                cost = _measured(loop, command, directory)
                best = costs.setdefault((who, question.what), cost)
                best.call, best.programs = min(best.call, cost.call), min(best.programs, cost.programs)
    rows = []
    for question in QUESTIONS:
        ours, theirs = costs["dprobes", question.what], costs.get(("bpftrace", question.what))
        call, programs = (None, None) if theirs is None else (theirs.call, theirs.programs)
        rows.append(Measurement(f"a call, its return probed: {question.what}", ours.call, "bpftrace", call))
        rows.append(Measurement(f"... {question.what}, programs alone", ours.programs, "bpftrace", programs))
    return [*rows, Measurement("a call without a probe", unprobed / 1000)]


def _measured(loop: Loop, command: list[str], directory: Path) -> _Cost:
    """Measure calls while a tracer runs."""
    with Tracer(command, directory, environment=BUFFERS) as tracer:
        loop.wait_until_armed()
        call = loop.calls(CALLS, BATCHES) / 1000
        programs = [open_program(number) for number in tracer.uprobe_programs()]
        statistics = enable_statistics()
        try:
            times = []
            for _ in range(BATCHES):
                before = [program_info(program) for program in programs]
                loop.calls(CALLS // 4)
                after = [program_info(program) for program in programs]
                runs = max(new.runs - old.runs for old, new in zip(before, after, strict=True))
                times.append(sum(new.run_time - old.run_time for old, new in zip(before, after, strict=True)) / runs)
            return _Cost(call, min(times) / 1000)
        finally:
            os.close(statistics)
            for program in programs:
                os.close(program)
