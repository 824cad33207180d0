"""A program that the manager has inserted, with where it came from and where its records go."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.engines.followedprogram import FollowedProgram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.engines.interface import ControlledSession, Counts, Scope
    from dprobes.manager.recorder import ProgramRecords
    from dprobes.rpn.program import Program

__all__ = ["InsertedProgram"]


class InsertedProgram(FollowedProgram):
    """
    Own a session that has been entered; ``start`` begins to follow it.

    ``name`` is what the user calls it, ``data`` the PPDF that it came from, ``groups`` and ``types`` what was selected
    of that, ``filters`` are those in front of its handlers. ``targets`` are the log targets that it brought along.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        session: ControlledSession,
        records: ProgramRecords,
        *,
        engine: str,
        scope: Scope,
        data: bytes,
        groups: Sequence[str] = (),
        types: Sequence[str] = (),
        filters: Sequence[str] = (),
        targets: Sequence[str] = (),
    ) -> None:
        super().__init__(name, program, session)
        self.engine = engine
        self.scope = scope
        self.data = data
        self.groups = tuple(groups)
        self.types = tuple(types)
        self.filters = tuple(filters)
        self.targets = tuple(targets)
        self.since = time.time()
        self._records = records
        self._counting = threading.Lock()
        self._unwritten: Counter[int] = Counter()
        """The records of probepoints that the trace file has not taken."""

    def take_records(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Write records to the trace file and the targets."""
        if not self._records.write(self.probes, list(records)):
            with self._counting:
                self._unwritten.update(probe for probe, _ in records)

    def seen(self, counts: Sequence[Counts]) -> Sequence[Counts]:
        """Return the counts, where records that are not in the trace file are lost ones."""
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
        """How many records the trace file has not taken."""
        with self._counting:
            return self._unwritten.total()

    def take_end(self, lost: int) -> None:
        """Note the end, how many records were lost, and what keyed tables hold."""
        self._records.end(lost, self.session.tables() if self.program.tables else ())
