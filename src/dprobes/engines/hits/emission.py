"""
Emitting records in the order of the hits.

The record of a pending hit, whose instruction is executed without a stop behind it, is emitted some time after its
handler ran. Records of other threads' hits, which came later, wait for it, so that what handlers counted shows in the
order in which they did.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dprobes.engines.hits.probes import HandledProgram
from dprobes.vm import Ending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.hits.handlerruns import Handled
    from dprobes.engines.hits.probes import Probe

__all__ = ["Emitter", "RecordSender", "Turn"]

ProgramT = TypeVar("ProgramT", bound=HandledProgram)

Records = list[tuple["Probe[Any]", bytes]]


class RecordSender(Protocol):
    """The way of records to the session."""

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """Send the record of a program's probepoint; return False if there is no room for it."""


class Turn:
    """
    The place of one hit's records in the order.

    ``records`` is None until it is known what they are. A turn that was skipped is no longer ``is_queued``.
    """

    __slots__ = ("is_queued", "records")

    def __init__(self, records: Records | None = None) -> None:
        self.records = records
        self.is_queued = True


class Emitter:
    """Count hits, send their records, and count these as emitted or lost."""

    def __init__(self, sender: RecordSender) -> None:
        self._sender = sender
        self._turns: deque[Turn] = deque()

    def count(
        self, handled: Iterable[Handled[ProgramT]], turn: Turn | None = None, *, has_faulted: bool = False
    ) -> list[Probe[ProgramT]]:
        """
        Count the hits of an instruction that completed, or ``has_faulted``, and emit their records.

        Return the probepoints that have become inactive by this.
        """
        records: Records = []
        gone = []
        for probe, outcome, header, _ in handled:
            if has_faulted and not probe.limits.keep_on_fault:
                if outcome is not None and outcome.ending is not Ending.ABORT:
                    probe.counts.faulted += 1
                continue
            if probe.count_hit(outcome):
                gone.append(probe)
            if outcome is not None and header is not None:
                builder = probe.program.records
                records.append((probe, builder.record(header, outcome)))
                if outcome.trace:
                    records.append((probe, builder.stack_trace(header, outcome)))
        self.emit(records, turn)
        return gone

    def take_turn(self) -> Turn:
        """Return the place for the records of a hit whose fate is not known yet."""
        turn = Turn()
        self._turns.append(turn)
        return turn

    def emit(self, records: Records, turn: Turn | None = None) -> None:
        """Emit the records of a hit, in its turn if it has one, else last; they wait until all before are known."""
        if turn is not None and turn.is_queued:
            turn.records = records
        elif self._turns:
            self._turns.append(Turn(records))
        else:
            self._send(records)
            return
        self._send_known()

    def skip(self, turn: Turn) -> None:
        """Let no record wait for a turn any longer."""
        if turn.is_queued:
            turn.is_queued = False
            self._turns.remove(turn)
            self._send_known()

    def finish(self) -> None:
        """Send all records that are known."""
        for turn in list(self._turns):
            if turn.records is None:
                self.skip(turn)

    def _send_known(self) -> None:
        while self._turns and (known := self._turns[0].records) is not None:
            self._turns.popleft()
            self._send(known)

    def _send(self, records: Records) -> None:
        for probe, record in records:
            if self._sender.send_record(probe.program.number, probe.number, record):
                probe.counts.records += 1
            else:
                probe.counts.lost += 1
