"""The answers of ``query`` and ``getvars``: programs and variables as ``results``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from dprobes.engines.interface import Counts
from dprobes.manager.results import (
    LeftOutPlace,
    ManagedHeader,
    ManagedProbepoint,
    ManagedProgram,
    ManagedScope,
    ProgramVariables,
    Selection,
)
from dprobes.resolve.probepoints import ProbeKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.interface import Scope
    from dprobes.manager.insertedprogram import InsertedProgram
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.resolve.probestate import ProbeState
    from dprobes.rpn.program import Program

__all__ = ["describe_program", "describe_scope", "describe_variables"]


def describe_program(
    inserted: InsertedProgram,
    counts: Sequence[Counts] | None = None,
    pending: int = 0,
    *,
    extended: bool = False,
) -> ManagedProgram:
    """
    Return what ``query`` shows of a program; ``counts`` are of now by default, ``pending`` records on their way.

    With ``extended`` it has the compiled program.
    """
    program = inserted.program
    states = inserted.states()
    if counts is None:
        counts = inserted.counts()
    return ManagedProgram(
        name=inserted.name,
        module=program.name,
        engine=inserted.engine,
        scope=describe_scope(inserted.scope),
        since=inserted.since,
        ended=inserted.has_ended,
        problem=inserted.problem,
        header=_describe_header(program),
        groups=tuple(program.groups),
        types=tuple(program.types),
        probepoints=tuple(
            _describe_probe(program.major, probe, state, counts[number] if number < len(counts) else Counts())
            for number, (probe, state) in enumerate(zip(inserted.probes, states, strict=False))
        ),
        not_resolved=tuple(sorted(set(range(len(program.definitions))) - {probe.number for probe in inserted.probes})),
        left_out=tuple(LeftOutPlace(each.number, each.path, each.name, each.reason) for each in inserted.left_out),
        notices=tuple(notice.text for notice in inserted.notices()),
        local_variables=tuple(inserted.session.local_variables()),
        pending=pending,
        unwritten=inserted.unwritten,
        filters=inserted.filters,
        ppdf=inserted.data if extended else None,
        selected=Selection(inserted.groups, inserted.types) if extended else None,
    )


def _describe_header(program: Program) -> ManagedHeader:
    return ManagedHeader(
        modtype=program.modtype.value,
        major=program.major,
        id=program.id,
        jmpmax=program.jmpmax,
        logmax=program.logmax,
        ex_logmax=program.ex_logmax,
        heapmax=program.heapmax,
        vars=program.vars,
        gvars=program.gvars,
        cvars=program.cvars,
        tvars=program.tvars,
        autostacktrace=program.autostacktrace,
        logonfault=program.logonfault,
    )


def describe_scope(scope: Scope) -> ManagedScope:
    """Return which processes a scope is about."""
    if scope.pid is not None:
        return ManagedScope(pid=scope.pid, follow=scope.follow, endpoint=scope.endpoint)
    uid = None if scope.cgroup is not None else scope.uid
    return ManagedScope(cgroup=scope.cgroup, uid=uid, endpoint=scope.endpoint)


def _describe_probe(major: int, probe: Probepoint, state: tuple[ProbeState, str], counts: Counts) -> ManagedProbepoint:
    definition = probe.definition
    own: dict[str, Any]
    match probe.kind:
        case ProbeKind.BREAKPOINT | ProbeKind.RETURN:
            own = {
                "kind": "breakpoint",
                "offset": probe.offset,
                "placed": probe.placed,
                "opcode": probe.instruction.opcode_byte,
                "instruction": probe.instruction.text,
            }
        case ProbeKind.WATCHPOINT:
            own = {
                "kind": "watchpoint",
                "address": probe.memory.address,
                "length": probe.memory.length,
                "access": probe.memory.access.value,
            }
        case ProbeKind.SAMPLER:
            own = {"kind": "sampler", "frequency": probe.clock.frequency}
        case ProbeKind.TRACEPOINT:
            own = {"kind": "tracepoint"}
        case kind:
            assert_never(kind)
    return ManagedProbepoint(
        definition=probe.number,
        major=major,
        minor=definition.minor,
        state=state[0],
        detail=state[1],
        where=probe.where,
        path=probe.path,
        group=definition.group,
        types=tuple(definition.types),
        passcount=definition.passcount,
        maxhits=definition.maxhits,
        at_return=probe.at_return,
        counts=counts,
        **own,
    )


def describe_variables(inserted: InsertedProgram, first: int, last: int) -> ProgramVariables:
    """Return the variables that only one program has, those with the indices from ``first`` to ``last``."""
    some = slice(first, last + 1)
    return ProgramVariables(
        inserted.name,
        tuple(inserted.session.local_variables()[some]),
        tuple(tuple(values[some]) for values in inserted.session.cpu_variables()),
        _tables_of(inserted),
    )


def _tables_of(inserted: InsertedProgram) -> bytes | None:
    contents = inserted.session.tables()
    if not contents:
        return None
    from dprobes.keyed.codec import encode_tables

    return encode_tables(contents)
