"""Programs that the manager has inserted, and the replies to ``query`` and ``getvars`` about them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

from dprobes.engines.engine_interface import Counts
from dprobes.manager.manager_messages import (
    LeftOutPlace,
    ManagedHeader,
    ManagedProbepoint,
    ManagedProgram,
    ManagedScope,
    ProgramVariables,
    Selection,
)
from dprobes.resolve.probepoints import ProbeKind
from dprobes.runs.followed_program import FollowedProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.engine_interface import Attachment, Scope
    from dprobes.manager.insert_request import InsertRequest
    from dprobes.manager.recorder import ProgramRecords
    from dprobes.resolve.probepoints import Probepoint, ProbeState
    from dprobes.rpn.rpn_program import Program
    from dprobes.runs.run_steps import RunPlan

__all__ = ["InsertedProgram", "describe_program", "describe_scope", "describe_variables"]


class InsertedProgram(FollowedProgram):
    """
    Program that the manager has inserted. ``start`` begins to follow it.

    ``name`` is the user's name of the program, ``given`` the request, ``planned`` the plan of its insertion.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        attachment: Attachment,
        records: ProgramRecords,
        planned: RunPlan,
        given: InsertRequest,
    ) -> None:
        super().__init__(name, program, attachment)
        self.engine = planned.engine
        self.reason = planned.reason
        self.given = given
        self.scope = given.request.scope
        self.since = time.time()
        self._records = records
        self._counting = threading.Lock()
        self._unwritten: Counter[int] = Counter()
        """Number of records by probepoint that could not be written to the trace file."""

    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Write new records, each with its probepoint number, to the trace file and the log targets."""
        if not self._records.write(self.probes, list(records)):
            with self._counting:
                self._unwritten.update(probe for probe, _ in records)

    def seen(self, counts: Sequence[Counts]) -> Sequence[Counts]:
        """Return the counts, with records that are not in the trace file counted as lost."""
        with self._counting:
            unwritten = self._unwritten.copy()
        if not unwritten:
            return counts
        return tuple(
            replace(each, records=each.records - unwritten[probe], lost=each.lost + unwritten[probe])
            for probe, each in enumerate(counts)
        )

    @property
    def unwritten(self) -> int:
        """Number of records that could not be written to the trace file."""
        with self._counting:
            return self._unwritten.total()

    def take_end(self, lost: int) -> None:
        """Record the end, with the number of lost records and the contents of keyed tables."""
        self._records.end(lost, self.attachment.tables() if self.program.tables else ())


def describe_program(
    inserted: InsertedProgram,
    counts: Sequence[Counts] | None = None,
    pending: int = 0,
    *,
    extended: bool = False,
) -> ManagedProgram:
    """
    Return the reply to ``query`` for a program; ``counts`` are the current ones by default.

    ``pending`` is the number of counted records that are not in the trace file yet. With ``extended`` the reply
    includes the compiled program.
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
        local_variables=tuple(inserted.attachment.local_variables()),
        pending=pending,
        unwritten=inserted.unwritten,
        filters=inserted.given.arguments.filters,
        ppdf=inserted.given.arguments.ppdf if extended else None,
        selected=Selection(inserted.given.arguments.groups, inserted.given.arguments.types) if extended else None,
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
    """Return the scope of a program as the object in replies of the manager."""
    if scope.pid is not None:
        return ManagedScope(pid=scope.pid, follow=scope.follow, endpoint=scope.endpoint)
    uid = None if scope.cgroup is not None else scope.uid
    return ManagedScope(cgroup=scope.cgroup, uid=uid, endpoint=scope.endpoint)


def _describe_probe(major: int, probe: Probepoint, state: tuple[ProbeState, str], counts: Counts) -> ManagedProbepoint:
    definition = probe.definition
    own: dict[str, Any]
    match probe.kind:
        case ProbeKind.BREAKPOINT if definition.patch is not None:
            own = {"kind": "patch", "patch": definition.patch, "offset": probe.offset}
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
            number, counter = probe.sampler.number, probe.sampler.counter
            rate = {"frequency": number, "period": 0} if counter is None else {"frequency": 0, "period": number}
            own = {"kind": "sampler", **rate, "counter": counter or ""}
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
    """Return the local and per-CPU variables of a program with the indices from ``first`` to ``last``, inclusive."""
    some = slice(first, last + 1)
    return ProgramVariables(
        inserted.name,
        tuple(inserted.attachment.local_variables()[some]),
        tuple(tuple(values[some]) for values in inserted.attachment.cpu_variables()),
        _tables_of(inserted),
    )


def _tables_of(inserted: InsertedProgram) -> bytes | None:
    contents = inserted.attachment.tables()
    if not contents:
        return None
    from dprobes.keyed.table_codec import encode_tables

    return encode_tables(contents)
