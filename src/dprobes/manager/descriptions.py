"""What ``query`` and ``getvars`` answer: programs and variables as JSON (docs/manager.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dprobes.manager.insertedprogram import describe_scope
from dprobes.resolve.probepoints import ResolvedProbe
from dprobes.resolve.samplers import ResolvedSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.interface import Counts
    from dprobes.manager.insertedprogram import InsertedProgram
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.resolve.probestate import ProbeState

__all__ = ["describe_program", "describe_variables"]


_COUNTS = ("hits", "records", "lost", "passed", "recursed", "missed", "faulted")


def describe_program(
    inserted: InsertedProgram, counts: Sequence[Counts] | None = None, pending: int = 0
) -> dict[str, Any]:
    """Return what ``query`` shows of a program; ``counts`` are of now by default, ``pending`` records on their way."""
    program = inserted.program
    states = inserted.states()
    if counts is None:
        counts = inserted.counts()
    return {
        "name": inserted.name,
        "module": program.name,
        "engine": inserted.engine,
        "scope": describe_scope(inserted.scope),
        "since": inserted.since,
        "ended": inserted.has_ended,
        "problem": inserted.problem,
        "header": {
            "modtype": program.modtype.value,
            "major": program.major,
            "id": program.id,
            "jmpmax": program.jmpmax,
            "logmax": program.logmax,
            "ex_logmax": program.ex_logmax,
            "heapmax": program.heapmax,
            "vars": program.vars,
            "gvars": program.gvars,
            "cvars": program.cvars,
            "autostacktrace": program.autostacktrace,
            "logonfault": program.logonfault,
        },
        "groups": list(program.groups),
        "types": list(program.types),
        "probes": [
            _describe_probe(program.major, probe, state, counts[number] if number < len(counts) else None)
            for number, (probe, state) in enumerate(zip(inserted.probes, states, strict=False))
        ],
        "not_resolved": sorted(
            set(range(len(program.definitions))) - {probe.number for probe in inserted.probes},
        ),
        "left_out": [asdict(left_out) for left_out in inserted.left_out],
        "pending": pending,
        "unwritten": inserted.unwritten,
        "notices": [notice.text for notice in inserted.notices()],
        "locals": inserted.session.local_variables(),
    }


def _describe_probe(
    major: int, probe: Probepoint, state: tuple[ProbeState, str], counts: Counts | None
) -> dict[str, Any]:
    definition = probe.definition
    described: dict[str, Any] = {
        "definition": probe.number,
        "major": major,
        "minor": definition.minor,
        "state": state[0].value,
        "detail": state[1],
        "where": probe.where,
        "path": probe.path,
        "group": definition.group,
        "types": list(definition.types),
        "passcount": definition.passcount,
        "maxhits": definition.maxhits,
        "return": definition.at_return,
    }
    if isinstance(probe, ResolvedProbe):
        described |= {
            "kind": "breakpoint",
            "offset": probe.offset,
            "placed": probe.offset + probe.moved,
            "opcode": probe.instruction.opcode_byte,
            "instruction": probe.instruction.text,
        }
    elif isinstance(probe, ResolvedSampler):
        described |= {"kind": "sampler", "frequency": probe.frequency}
    else:
        described |= {
            "kind": "watchpoint",
            "address": probe.address,
            "length": probe.length,
            "access": probe.access.value,
        }
    if counts is not None:
        # There may be thousands: ``asdict`` takes ten times as long.
        described["counts"] = {name: getattr(counts, name) for name in _COUNTS} | {"executed": list(counts.executed)}
    return described


def describe_variables(inserted: InsertedProgram, first: int, last: int) -> dict[str, Any]:
    """Return the variables that only one program has, those with the indices from ``first`` to ``last``."""
    some = slice(first, last + 1)
    return {
        "name": inserted.name,
        "locals": inserted.session.local_variables()[some],
        "cpu": [values[some] for values in inserted.session.cpu_variables()],
    }
