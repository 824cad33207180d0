"""
A log target: a sink, a thread that feeds it, and a bounded queue between that and whoever has records.

So a slow or broken sink never holds up a program. What finds no room is counted as lost. A sink that fails is closed,
and opened again after a while that gets longer; records that it had not taken wait for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError, SinkError, reason_of
from dprobes.sinks.base import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dprobes.record.source import RecordSource
    from dprobes.sinks.base import Sink

__all__ = ["LogTarget", "TargetStatus"]

_QUEUE_MAX = 1 << 16
"""Records that wait for a target at most."""

_RETRY = 1.0
"""Seconds until a target that failed is tried again at first, and up to which this doubles below."""

_RETRY_MAX = 60.0

_FLUSH_INTERVAL = 0.2
"""Seconds after which what was taken is made visible, if more is coming all the time."""


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """Say how a log target fares, in records; ``problem`` is what is wrong with it at present."""

    name: str
    module: str | None
    format: str
    written: int
    waiting: int
    lost: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class _Created:
    source: RecordSource


@dataclass(frozen=True, slots=True)
class _Destroyed:
    source: RecordSource


_Message = Batch | _Created | _Destroyed


class LogTarget:
    """
    Own a sink and the thread that feeds it.

    ``module`` limits it to the records of one program. ``open_sink`` is called at once, and by the thread after a
    failure. ``on_problem`` is called by the thread, once for each time that the sink begins to fail.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        module: str | None = None,
        format_name: str = "text",
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self._format_name = format_name
        self._open = open_sink
        self._on_problem = on_problem
        self._sink: Sink | None = open_sink()  # what is wrong at once is an error of who asked for it
        self._active: dict[int, RecordSource] = {}
        """What the sink was told of, or would be if it were open; the thread's own."""
        self._queue: deque[_Message] = deque()
        self._queued = self._written = self._lost = 0
        self._lost_before: dict[int, int] = {}
        """Records of each source that were lost since the last batch in the queue."""
        self._problem: str | None = None
        self._retry = _RETRY
        self._flushed = 0.0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"log target {name}", daemon=True)
        self._thread.start()

    # What programs say

    def takes(self, source: RecordSource) -> bool:
        """Return whether records of a program are for this target."""
        return self.module is None or self.module == source.name

    def create(self, sources: Iterable[RecordSource]) -> None:
        """Announce programs, or more of them."""
        self._tell([_Created(source) for source in sources if self.takes(source)])

    def destroy(self, source: RecordSource) -> None:
        """Say that no more records of a program will come."""
        if self.takes(source):
            self._tell([_Destroyed(source)])

    def put(self, batch: Batch) -> None:
        """Queue records of a program; what finds no room is counted as lost."""
        if not self.takes(batch.source):
            return
        with self._changed:
            number, count = batch.source.number, len(batch.records)
            taken = min(max(_QUEUE_MAX - self._queued, 0), count)
            if taken:
                lost = batch.lost + self._lost_before.pop(number, 0)
                whole = taken == count
                self._queue.append(
                    replace(batch, lost=lost)
                    if whole
                    else replace(batch, records=batch.records[:taken], places=batch.places[:taken], lost=lost)
                )
                self._queued += taken
                self._changed.notify()
            if taken < count:
                self._lost += count - taken
                self._lost_before[number] = self._lost_before.get(number, 0) + count - taken

    def _tell(self, messages: list[_Created] | list[_Destroyed]) -> None:
        with self._changed:
            self._queue.extend(messages)
            self._changed.notify()

    # What people ask

    def status(self) -> TargetStatus:
        """Return how the target fares."""
        with self._changed:
            return TargetStatus(
                self.name, self.module, self._format_name, self._written, self._queued, self._lost, self._problem
            )

    def close(self, patience: float = 2.0) -> TargetStatus:
        """Write what waits, as long as there is patience, and give up the sink; return the last status."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)
        status = self.status()
        return replace(status, waiting=0, lost=status.lost + status.waiting)

    # The thread

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                sink = self._opened()
                self._hand_over(sink, message)
                self._flush(sink)
            except (DprobesError, OSError) as error:
                if not self._wait_after(error, message):
                    break
            except Exception as error:  # noqa: BLE001 - a plug-in's mistake must not be ours
                self._drop(message)  # it would make the same mistake again
                if not self._wait_after(SinkError(f"{type(error).__name__}: {error}"), message):
                    break
        self._give_up()

    def _next(self) -> _Message | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return self._queue[0] if self._queue else None

    def _opened(self) -> Sink:
        if self._sink is None:
            self._sink = self._open()
            for source in self._active.values():
                self._sink.create_event(source)
        return self._sink

    def _hand_over(self, sink: Sink, message: _Message) -> None:
        count = 0
        match message:
            case Batch():
                sink.log_events(message)
                count = len(message.records)
            case _Created(source):
                self._active[source.number] = source
                sink.create_event(source)
            case _Destroyed(source):
                self._active.pop(source.number, None)
                sink.destroy_event(source)
        with self._changed:
            self._problem = None
            self._queue.popleft()
            self._count_written(count)
        self._retry = _RETRY

    def _flush(self, sink: Sink) -> None:
        with self._changed:
            more = bool(self._queue)
        now = time.monotonic()
        if not more or now - self._flushed > _FLUSH_INTERVAL:
            sink.flush()
            self._flushed = now

    def _count_written(self, count: int) -> None:
        self._queued -= count
        self._written += count

    def _drop(self, message: _Message) -> None:
        with self._changed:
            if self._queue and self._queue[0] is message:
                self._queue.popleft()
                if isinstance(message, Batch):
                    self._queued -= len(message.records)
                    self._lost += len(message.records)

    def _wait_after(self, error: DprobesError | OSError, message: _Message) -> bool:
        """Note a failure, and wait until the next try; return False if there is none."""
        said = error.message if isinstance(error, DprobesError) else reason_of(error)
        taken = error.taken if isinstance(error, SinkError) else 0
        with self._changed:
            is_new = self._problem is None
            self._problem = said
            if taken and isinstance(message, Batch) and self._queue and self._queue[0] is message:
                self._queue[0] = message.after(taken)
                self._count_written(taken)
        if is_new and self._on_problem is not None:
            self._on_problem(said)
        self._give_up()
        with self._changed:
            if self._closing:
                return False
            self._changed.wait_for(lambda: self._closing, self._retry)  # if it comes to that, it is tried once more
            self._retry = min(2 * self._retry, _RETRY_MAX)
        return True

    def _give_up(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (DprobesError, OSError) as error:
                with self._changed:
                    self._problem = self._problem or str(error)
            except Exception as error:  # noqa: BLE001 - a plug-in's
                with self._changed:
                    self._problem = self._problem or f"{type(error).__name__}: {error}"
