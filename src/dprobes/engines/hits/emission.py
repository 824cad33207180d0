"""
Emitting records in the order of the hits.

The record of a hit that pends (``processes.PendingHit``) is emitted some time after its handler ran. Records of other
threads' hits, which came later, wait for it, so that what handlers counted shows in the order in which they did.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.probes import Probe

__all__ = ["Emitter", "Turn"]


class Turn:
    """
    Hold the place of one hit's records in the order.

    ``records`` is None until it is known what they are. A turn that has been passed over is no ``is_queued`` any more.
    """

    __slots__ = ("is_queued", "records")

    def __init__(self, records: list[tuple[Probe, bytes]] | None = None) -> None:
        self.records = records
        self.is_queued = True


class Emitter:
    """Send records to the client, and count them as emitted or lost."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turns: deque[Turn] = deque()

    def take_turn(self) -> Turn:
        """Return the place for the records of a hit whose fate is not known yet."""
        turn = Turn()
        self._turns.append(turn)
        return turn

    def emit(self, records: list[tuple[Probe, bytes]], turn: Turn | None = None) -> None:
        """Emit the records of a hit, in its turn if it has one, else last; they wait until all before are known."""
        if turn is not None and turn.is_queued:
            turn.records = records
        elif self._turns:
            self._turns.append(Turn(records))
        else:
            self._send(records)
            return
        self._send_known()

    def pass_over(self, turn: Turn) -> None:
        """Let no record wait for a turn any longer."""
        if turn.is_queued:
            turn.is_queued = False
            self._turns.remove(turn)
            self._send_known()

    def finish(self) -> None:
        """Send all records that are known."""
        for turn in list(self._turns):
            if turn.records is None:
                self.pass_over(turn)

    def _send_known(self) -> None:
        while self._turns and (known := self._turns[0].records) is not None:
            self._turns.popleft()
            self._send(known)

    def _send(self, records: list[tuple[Probe, bytes]]) -> None:
        for probe, record in records:
            if self._connection.send_record(probe.program.number, probe.number, record):
                probe.counts.records += 1
            else:
                probe.counts.lost += 1
