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

__all__ = ["Emitter", "QueuedRecords", "RecordSender"]

ProgramT = TypeVar("ProgramT", bound=HandledProgram)

Records = list[tuple["Probe[Any]", bytes]]


class RecordSender(Protocol):
    """The way of records to the session."""

    def send_record(self, program: int, probe: int, record: bytes) -> bool:
        """Send the record of a program's probepoint; return False if there is no room for it."""


class QueuedRecords:
    """
    The records of one hit in the order of hits.

    ``records`` is None until it is known what they are. Those of a hit that was skipped are no longer ``is_queued``.
    """

    __slots__ = ("is_queued", "records")

    def __init__(self, records: Records | None = None) -> None:
        self.records = records
        self.is_queued = True


class Emitter:
    """Count hits, send their records, and count these as emitted or lost."""

    def __init__(self, sender: RecordSender) -> None:
        self._sender = sender
        self._queue: deque[QueuedRecords] = deque()

    def count(
        self, handled: Iterable[Handled[ProgramT]], queued: QueuedRecords | None = None, *, has_faulted: bool = False
    ) -> list[Probe[ProgramT]]:
        """
        Count the hits of an instruction that completed, or ``has_faulted``, and emit their records.

        Return the probepoints that have become inactive by this.
        """
        records: Records = []
        gone = []
        for probe, outcome, header, _, is_skipped in handled:
            if has_faulted and not probe.limits.keep_on_fault:
                if outcome is not None and outcome.ending is not Ending.ABORT:
                    probe.counts.faulted += 1
                probe.give_back()
                continue
            if probe.count_hit(outcome, is_skipped=is_skipped):
                gone.append(probe)
            if outcome is not None and header is not None:
                builder = probe.program.records
                records.append((probe, builder.record(header, outcome)))
                if outcome.trace:
                    records.append((probe, builder.stack_trace(header, outcome)))
        self.emit(records, queued)
        return gone

    def queue(self) -> QueuedRecords:
        """Queue the records of a hit of which it is not known yet whether it completes, and return their place."""
        queued = QueuedRecords()
        self._queue.append(queued)
        return queued

    def emit(self, records: Records, queued: QueuedRecords | None = None) -> None:
        """Emit the records of a hit, where they are ``queued`` or else last; they wait until all before are known."""
        if queued is not None and queued.is_queued:
            queued.records = records
        elif self._queue:
            self._queue.append(QueuedRecords(records))
        else:
            self._send(records)
            return
        self._send_known()

    def skip(self, queued: QueuedRecords) -> None:
        """Let no record wait for those of a hit any longer."""
        if queued.is_queued:
            queued.is_queued = False
            self._queue.remove(queued)
            self._send_known()

    def finish(self) -> None:
        """Send all records that are known."""
        for queued in list(self._queue):
            if queued.records is None:
                self.skip(queued)

    def _send_known(self) -> None:
        while self._queue and (known := self._queue[0].records) is not None:
            self._queue.popleft()
            self._send(known)

    def _send(self, records: Records) -> None:
        for probe, record in records:
            if self._sender.send_record(probe.program.number, probe.number, record):
                probe.counts.records += 1
            else:
                probe.counts.lost += 1
