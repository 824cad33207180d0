"""
Queue of a log target: batches of records, and announcements of programs between them, in order.

It is bounded in records and in bytes. Records without room are counted as lost, and the next batch of the same program
reports their number. Callers must serialize their calls.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.record.record_origin import wall_offset
from dprobes.sinks import Batch, bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Sink

__all__ = ["Created", "Destroyed", "Message", "Pace", "Problems", "RecordQueue", "Tables"]

RECORDS_MAX = 1 << 16
"""Maximum number of records in the queue of a target."""

BYTES_MAX = 128 << 20
"""Maximum size in bytes of records in the queue of a target: a record may have 64 KiB."""


@dataclass(frozen=True, slots=True)
class Created:
    """The announcement of a program, or an update of its description."""

    source: RecordSource


@dataclass(frozen=True, slots=True)
class Destroyed:
    """The end of a program, after which it has no more records."""

    source: RecordSource


@dataclass(frozen=True, slots=True)
class Tables:
    """A message with the contents of a program's keyed tables, as they were when it was queued."""

    source: RecordSource
    contents: Sequence[TableContents]


Message = Batch | Created | Destroyed | Tables


class RecordQueue:
    """
    A queue of messages to a sink, with limited room for records.

    ``waiting`` is the number of records in it, ``lost`` the number of those without room or given up.
    """

    def __init__(self, records_max: int = RECORDS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._lost_before: dict[int, int] = {}
        """Number of records of each source that were lost since its last batch in the queue."""
        self.is_given_up = False
        self._last: Message | None = None
        """The first message at the time of ``give_up``, which a sink may be writing."""
        self.waiting = self.lost = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, batch: Batch) -> None:
        """Add the records of a batch, as many as there is room for; the others are counted as lost."""
        number, count = batch.source.number, len(batch.records)
        taken = self._room(batch)
        if taken:
            lost = batch.lost + self._lost_before.pop(number, 0)
            if taken == count and lost == batch.lost:
                added = batch
            else:
                added = batch._replace(records=batch.records[:taken], places=batch.places[:taken], lost=lost)
            self._messages.append(added)
            self.waiting += taken
            self._bytes += bytes_of(added.records)
        if taken < count:
            self.lost += count - taken
            self._lost_before[number] = self._lost_before.get(number, 0) + count - taken

    def _room(self, batch: Batch) -> int:
        if self.is_given_up:
            return 0
        count = min(self._records_max - self.waiting, len(batch.records))
        room = self._bytes_max - self._bytes
        if bytes_of(batch.records) <= room:
            return count
        for taken, record in enumerate(batch.records[:count]):
            room -= len(record)
            if room < 0:
                return taken
        return count

    def tell(self, messages: Iterable[Created | Destroyed]) -> None:
        """
        Queue messages about the creation and end of programs.

        ``Destroyed`` is preceded by an empty batch if records were lost since the program's last batch.
        """
        if self.is_given_up:
            return
        for message in messages:
            if isinstance(message, Destroyed) and (lost := self._lost_before.pop(message.source.number, 0)):
                self._messages.append(Batch(message.source, (), (), wall_offset(), lost))
            self._messages.append(message)

    def put_tables(self, tables: Tables) -> None:
        """Add tables; they replace earlier ones of the program in the queue."""
        if self.is_given_up:
            return
        # The first message may be in use by the sink.
        for at in range(len(self._messages) - 1, 0, -1):
            message = self._messages[at]
            if isinstance(message, Tables) and message.source.number == tables.source.number:
                del self._messages[at]
        self._messages.append(tables)

    def first(self, count: int) -> Message:
        """
        Return the first message, which stays in the queue until ``take`` or ``drop``.

        A batch is limited to ``count`` records. A smaller one is joined with the next batches of the same program, for
        sinks that send a request for each batch.
        """
        message = self._messages[0]
        if not isinstance(message, Batch):
            return message
        if len(message.records) > count:
            self._messages[0] = message.after(count)
            message = message._replace(records=message.records[:count], places=message.places[:count])
            self._messages.appendleft(message)
        elif len(message.records) < count and len(self._messages) > 1:
            message = self._joined(message, count)
        return message

    def _joined(self, first: Batch, count: int) -> Batch:
        """
        Return the batch ``first`` joined with the following batches, up to ``count`` records.

        Joining ends at the first message that is not a batch of the same program.
        """
        records, places = list(first.records), list(first.places)
        self._messages.popleft()
        while (room := count - len(records)) and self._messages and _goes_on(first, self._messages[0]):
            other = self._messages.popleft()
            assert isinstance(other, Batch)
            records += other.records[:room]
            places += other.places[:room]
            if len(other.records) > room:
                self._messages.appendleft(other.after(room))
        joined = first._replace(records=records, places=places)
        self._messages.appendleft(joined)
        return joined

    def take(self, message: Message, count: int) -> bool:
        """Remove the first message, or ``count`` records of it; return False if it is no longer in the queue."""
        if message is self._last:
            self._last = None
            self.lost -= count
            return True
        if not self._messages or self._messages[0] is not message:
            return False
        if isinstance(message, Batch):
            self._bytes -= bytes_of(message.records[:count])
            self.waiting -= count
            if count < len(message.records):
                self._messages[0] = message.after(count)
                return True
        self._messages.popleft()
        return True

    def keep(self, message: Message, left: Sequence[int]) -> bool:
        """Reduce the first message to the records at the positions ``left``; return False if it is no longer queued."""
        assert isinstance(message, Batch)
        if message is self._last:
            return self.take(message, len(message.records) - len(left))
        if not self._messages or self._messages[0] is not message:
            return False
        records = [message.records[position] for position in left]
        places = [message.places[position] for position in left]
        lost = message.lost if left and left[0] == 0 else 0
        self._bytes -= bytes_of(message.records) - sum(map(len, records))
        self.waiting -= len(message.records) - len(records)
        self._messages[0] = message._replace(records=records, places=places, lost=lost)
        if not records:
            self._messages.popleft()
        return True

    def drop(self, message: Message) -> None:
        """Remove the first message, and count its records as lost."""
        count = len(message.records) if isinstance(message, Batch) else 0
        if self.take(message, count):
            self.lost += count
            if count and isinstance(message, Batch):
                number = message.source.number
                self._lost_before[number] = self._lost_before.get(number, 0) + count + message.lost

    def mark_lost(self, source: RecordSource, count: int) -> None:
        """Add ``count`` to the lost records that the next message of a program reports."""
        for at, message in enumerate(self._messages):
            match message:
                case Batch() if message.source.number == source.number:
                    self._messages[at] = message._replace(lost=message.lost + count)
                    return
                case Destroyed(other) if other.number == source.number:
                    self._messages.insert(at, Batch(source, (), (), wall_offset(), count))
                    return
        self._lost_before[source.number] = self._lost_before.get(source.number, 0) + count

    def give_up(self) -> None:
        """
        Count all records in the queue as lost, and those that are put later.

        Records of the first message that a sink has taken may still be reported, until ``settle``.
        """
        self.is_given_up = True
        self._last = self._messages[0] if self._messages else self._last
        self._messages.clear()
        self.lost += self.waiting
        self.waiting = self._bytes = 0

    def settle(self) -> None:
        """End the time in which records of the first message may still be reported as taken."""
        self._last = None


def _goes_on(batch: Batch, message: Message) -> bool:
    """Return whether a message is a batch that can be joined to ``batch``."""
    return (
        isinstance(message, Batch)
        and message.source is batch.source
        and message.wall_offset == batch.wall_offset
        and not message.lost
    )


# The pace of a sink: the size of its batches, the retries after a failure, and the reports of a problem.

_RETRY = 1.0
"""Seconds between attempts to open a failing target, initially and at the end; they double up to ``_RETRY_MAX``."""

_RETRY_MAX = 60.0

_WAIT_MAX = 3600.0
"""Maximum number of seconds for which a target may ask not to be retried."""

_PIECE_FIRST, _PIECE_MIN, _PIECE_MAX = 64, 8, 1 << 14
"""
Records per batch: initial, minimum, maximum.

A batch should take about ``_PIECE_TIME``, so that progress is visible.
"""

_PIECE_TIME = 0.5

_BY_RECORD = 1.5
"""Ratio of the durations of a batch and of half as many records, above which the duration depends on the records."""

_FADING = 0.5
"""
Factor by which the stored duration of a larger batch is reduced whenever it prevents a trial.

A sink may become faster.
"""

_SAY_AGAIN = 600.0
"""Seconds after which a problem that has disappeared and occurs again is reported once more."""

_SAID_MAX = 100
"""Maximum number of remembered problems: their messages may contain a changing number."""


class Pace:
    """The measured speed of a sink, which determines the size of batches and the delay of retries."""

    def __init__(self) -> None:
        self._piece = _PIECE_FIRST
        self._seconds: dict[int, float] = {}
        """Seconds that the last batch of each size took."""
        self._tried = 0.0
        self._failures = 0

    def piece(self, sink: Sink | None) -> int:
        """Return the number of records for the next batch; large if the sink shows progress within a call."""
        return self._piece if getattr(sink, "steps", None) is None else _PIECE_MAX

    def took(self, count: int, seconds: float) -> None:
        """
        Record the duration of a batch of ``count`` records.

        After a long duration, half as many records are tried. If these take as long, as with a distant server, the
        duration is that of the call itself. Then larger batches are better.
        """
        if count != self._piece:
            if seconds > _PIECE_TIME:
                self._piece = max(1 << (count.bit_length() - 1), _PIECE_MIN)
            return
        self._seconds[count] = seconds
        if seconds > _PIECE_TIME:
            self._piece = self._better(count, seconds)
        elif seconds < _PIECE_TIME / 4:
            self._piece = min(2 * count, _PIECE_MAX)

    def _better(self, count: int, seconds: float) -> int:
        """Return the number of records to try if ``count`` of them take ``seconds``, which is long."""
        half, double = self._seconds.get(count // 2), self._seconds.get(2 * count)
        if count > _PIECE_MIN and (half is None or seconds > _BY_RECORD * half):
            return count // 2
        if double is not None and double > _BY_RECORD * seconds:
            self._seconds[2 * count] = double * _FADING
            return count
        return min(2 * count, _PIECE_MAX)

    def tried(self) -> None:
        """Record the time of an attempt to open a failed sink."""
        self._tried = time.monotonic()

    def succeeded(self) -> None:
        """Reset the number of consecutive failures of the sink."""
        self._failures = 0

    def failed(self, wait: float, *, at_end: bool) -> float:
        """
        Record a failure of the sink; return the seconds to wait until the next attempt.

        The first failure after a success is retried at once, because an orderly close of a connection is not a problem.
        ``wait`` is the number of seconds for which the sink asks not to be retried. With ``at_end``, the wait is short.
        """
        self._failures += 1
        if self._failures == 1:
            pause = max(self._tried + _RETRY - time.monotonic(), 0.0)
        else:
            pause = _RETRY if at_end else min(_RETRY * 2.0 ** min(self._failures - 2, 10), _RETRY_MAX)
        return max(pause, min(wait, _WAIT_MAX))


class Problems:
    """The error messages that were reported recently, so that each is reported only once."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def is_new(self, problem: str) -> bool:
        """Return whether a problem is to be reported, and count it as reported."""
        now = time.monotonic()
        if now - self._said.get(problem, -_SAY_AGAIN) < _SAY_AGAIN:
            return False
        if len(self._said) >= _SAID_MAX:
            self._said.clear()
        self._said[problem] = now
        return True
