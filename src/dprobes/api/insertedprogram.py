"""An inserted program, as the user of a session reads and removes it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.followedprogram import FollowedProgram
from dprobes.engines.interface import Counts, TableChange
from dprobes.errors import DprobesError, EngineError
from dprobes.lazydataclass import dataclass
from dprobes.resolve.probeplaces import places_of
from dprobes.rpn.tables import tables_matching

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.api.recordqueue import RecordQueue
    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.interface import ControlledSession
    from dprobes.engines.launchedcommand import LaunchedCommand
    from dprobes.keyed.view import KeyedTable
    from dprobes.record.probeinfo import DataReader, Place
    from dprobes.resolve.probestate import ProbeState
    from dprobes.rpn.program import Program

__all__ = ["InsertedProgram", "Probepoint", "total"]

_BEGINNING = 20.0
"""Seconds that an insertion waits until what is there has been probed."""


@dataclass(frozen=True, slots=True)
class Probepoint:
    """
    Say what is known of one place where a program is inserted.

    ``minor`` is that of its definition, ``path`` the file. ``detail`` says more about the state where there is more.
    """

    major: int
    minor: int
    place: Place
    path: str
    state: ProbeState
    detail: str
    counts: Counts


class _Followed(FollowedProgram):
    """Put the records of a program into the queue of its session."""

    def __init__(self, program: Program, session: ControlledSession, queue: RecordQueue, reader: DataReader) -> None:
        super().__init__(program.name, program, session)
        self._queue = queue
        self._reader = reader
        self._places: list[Place] = []
        queue.open()

    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        probes, places = self.probes, self._places
        if len(probes) > len(places):
            places += (replace(place, reader=self._reader) for place in places_of(self.name, probes, len(places)))
        self._queue.put([(record, places[probe]) for probe, record in records])

    def take_end(self, lost: int) -> None:  # noqa: ARG002 - the counts tell
        self._queue.close()


class InsertedProgram:
    """
    An inserted program: its counts, variables and removal; made by ``ProbeSession.insert``.

    ``engine`` is the name of the one that runs it, ``reason`` why that was chosen (None: it was asked for).
    ``diagnostics`` are warnings and notes about the program. All methods may be called by any thread, and what they
    return stays true when the program has ended.
    """

    def __init__(
        self,
        program: Program,
        session: ControlledSession,
        queue: RecordQueue,
        reader: DataReader,
        *,
        engine: str,
        reason: str | None,
        diagnostics: Diagnostics,
        command: LaunchedCommand | None = None,
        tells_status: bool = False,
    ) -> None:
        self.program = program
        self.engine = engine
        self.reason = reason
        self.diagnostics = diagnostics
        self.session = session
        self._command = command
        self._tells_status = tells_status
        self._is_reported = False
        self._is_stopping = False
        self._followed = _Followed(program, session, queue, reader)

    def begin(self) -> None:
        """Wait until all that is in scope now has been probed; raise the error that has kept it from that."""
        try:
            self._followed.start(_BEGINNING)
        except DprobesError:
            self._is_reported = True
            raise

    @property
    def name(self) -> str:
        """The module that it probes."""
        return self.program.name

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is inserted any more."""
        return self._followed.has_ended

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked for its end."""
        return self._is_stopping

    @property
    def probepoints(self) -> list[Probepoint]:
        """Its probepoints with their states and counts; one definition may have many, in several files."""
        followed, counts = self._followed, self._followed.counts()
        probes = list(followed.probes)
        places = places_of(self.name, probes)
        return [
            Probepoint(
                self.program.major,
                probe.definition.minor,
                places[number],
                probe.path,
                state,
                detail,
                counts[number] if number < len(counts) else Counts(),
            )
            for number, (probe, (state, detail)) in enumerate(zip(probes, followed.states(), strict=False))
        ]

    def counts(self, minor: int | None = None) -> Counts:
        """Return what happened so far at all its probepoints, or at those of the definitions with ``minor``."""
        return total(each.counts for each in self.probepoints if minor in (None, each.minor))

    def local_variables(self) -> list[int]:
        """Return its local variables (``lv``)."""
        return self.session.local_variables()

    def cpu_variables(self) -> list[list[int]]:
        """Return its per-CPU variables (``cv``), a list for each CPU."""
        return self.session.cpu_variables()

    def tables(self) -> dict[str, KeyedTable]:
        """Return its keyed tables as they are now, by their names."""
        from dprobes.keyed.view import KeyedTable

        return {each.table.name: KeyedTable(each) for each in self.session.tables()}

    def clear_tables(self, pattern: str = "*") -> None:
        """
        Empty the keyed tables whose names match a pattern, by default all of them; they go on counting.

        Raise ``EngineError`` if there is none of such a name.
        """
        self.session.change([TableChange(number) for number in tables_matching(pattern, self.program.tables)])

    def reset_variables(self, first: int = 0, last: int | None = None) -> None:
        """Set its local and per-CPU variables with the indices from ``first`` to ``last``, by default all, to zero."""
        self.session.reset_variables(first, last)

    def notices(self) -> list[str]:
        """Return what its engine had to say, the latest at the end."""
        return [notice.text for notice in self._followed.notices()]

    def left_out(self) -> dict[str, str]:
        """Return the functions that match a pattern and have no probepoint, with the reason for each."""
        return {each.name: each.reason for each in self._followed.left_out}

    def remove(self, minor: int | None = None) -> None:
        """
        Remove it, and wait until it is removed; records made until then can still be read.

        With ``minor`` only the probepoints of definitions with this code are removed, soon.
        """
        if minor is None:
            self.stop()
            self.join()
            return
        probes = self._followed.probes_at(self.program.major, minor)
        if not probes:
            raise EngineError(f"the program for '{self.name}' has no probepoint with minor {minor}")
        self.session.remove(probes)

    def stop(self) -> None:
        """Ask for its end, and do not wait."""
        self._is_stopping = True
        self._followed.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ends by itself, with its processes or by its own ``remove``; return whether it has ended."""
        return self._followed.wait(timeout)

    def join(self) -> None:
        """Wait until it has ended after ``stop``; raise ``EngineError`` if that takes too long."""
        if not self._followed.wait():
            raise EngineError(f"the program for '{self.name}' has not ended yet, but is going to")

    @property
    def exit_status(self) -> int | None:
        """
        The exit status of the command that was launched, negative for a signal; None if there is none (yet).

        Behind a stub it is that of the program there.
        """
        if self._command is not None:
            return self._command.exit_status
        finished = self._followed.finished if self._tells_status else None
        return (
            None
            if finished is None or finished.exit_status is None
            else os.waitstatus_to_exitcode(finished.exit_status)
        )

    def raise_problem(self) -> None:
        """Raise ``EngineError`` if it ended because of one, or never began, and nobody has been told so."""
        problem = self._problem()
        if problem is not None and not self._is_reported:
            self._is_reported = True
            raise EngineError(problem)

    def _problem(self) -> str | None:
        if self._followed.problem is not None:
            return f"the program for '{self.name}' has ended: {self._followed.problem}"
        states = self._followed.states()
        if self._followed.finished is None or not states or not all(state.is_obstacle for state, _ in states):
            return None
        state, detail = states[0]
        said = f"{state.value} {detail}" if detail else state.value
        told = (each.message for each in self.diagnostics if each.message.startswith(state.value))
        return f"no probepoint of the program for '{self.name}' was inserted: {next(told, said)}"


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sums of counts."""
    result = Counts()
    executed: dict[str, None] = {}
    for each in counts:
        result.hits += each.hits
        result.records += each.records
        result.lost += each.lost
        result.passed += each.passed
        result.recursed += each.recursed
        result.missed += each.missed
        result.skipped += each.skipped
        result.faulted += each.faulted
        executed |= dict.fromkeys(each.executed)
    result.executed = tuple(executed)
    return result
