"""Programs and probepoints of the ptrace engine's tracer, for tests without a tracer."""

from __future__ import annotations

from dprobes.engines.hits import probe_hits
from dprobes.engines.hits.hit_lifecycle import ProbeLimits
from dprobes.engines.hits.probe_hits import RecordBuilder
from dprobes.engines.ptrace.shared_counters import SharedCounters, Tally
from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe, Reach

NO_LIMITS = ProbeLimits(0, 0, keep_on_fault=False, keep_ip=False)


def inserted_program(number: int = 0, items: int = 0, variables: int = 0) -> InsertedProgram:
    """
    Return a program with number ``number`` whose scope is process 1.

    ``items`` are the header items of its records, ``variables`` the number of its local variables.
    """
    counters = SharedCounters.new(variables, 0)
    return InsertedProgram(
        number, number, Reach(pids={1}), (), {}, counters, [], {}, RecordBuilder(items), core_directory="."
    )


def probe_of(program: InsertedProgram, number: int = 0, limits: ProbeLimits = NO_LIMITS) -> Probe:
    """Return a new probepoint of a program; ``number`` is its index."""
    return probe_hits.Probe(program, number, 0, limits, (0, 0), Tally())
