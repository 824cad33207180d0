"""
Log targets: where the manager's records go besides its trace file.

Each has a thread of its own and a bounded queue: a slow or broken one never holds up a program, and counts what it
loses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError, SinkError, reason_of
from dprobes.formatters import formatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.formatters import Place
    from dprobes.sinks.base import Sink

__all__ = ["LogTarget", "TargetStatus"]

_QUEUE_MAX = 1 << 16
"""Records that wait for a target at most."""

_RETRY = 1.0
"""Seconds until a target that failed is tried again at first, and up to which this doubles below."""

_RETRY_MAX = 60.0

Batch = tuple[list[bytes], list["Place"]]


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


class LogTarget:
    """
    Own a sink and the thread that feeds it.

    ``module`` limits it to the records of one program. ``open_sink`` is called by the thread, again after a failure.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, module: str | None, format_name: str) -> None:
        self.name = name
        self.module = module
        self._format_name = format_name
        self._format = formatter(format_name, wall_offset=time.time_ns() - time.monotonic_ns())
        self._open = open_sink
        self._sink: Sink | None = open_sink()  # what is wrong at once is an error of who asked for it
        self._queue: deque[Batch] = deque()
        self._queued = 0
        self._written = 0
        self._lost = 0
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"log target {name}", daemon=True)
        self._thread.start()

    def put(self, program: str, records: Sequence[bytes], places: Sequence[Place]) -> None:
        """Queue records of a program; what finds no room is counted as lost."""
        if self.module is not None and self.module != program:
            return
        with self._changed:
            room = _QUEUE_MAX - self._queued
            if room < len(records):
                self._lost += len(records) - max(room, 0)
            if room > 0:
                self._queue.append((list(records[:room]), list(places[:room])))
                self._queued += min(room, len(records))
                self._changed.notify()

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

    def _run(self) -> None:
        retry = _RETRY
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    break
                records, places = self._queue[0]
            try:
                if self._sink is None:
                    self._sink = self._open()
                encoded = self._format.encoded
                self._sink.write("\n".join(encoded(*each) for each in zip(records, places, strict=True)))
                self._sink.flush()
            except (DprobesError, OSError) as error:
                self._fail(error)
                with self._changed:
                    if self._closing:
                        break
                    self._changed.wait(retry)
                retry = min(2 * retry, _RETRY_MAX)
                continue
            retry = _RETRY
            with self._changed:
                self._problem = None
                self._queue.popleft()
                self._queued -= len(records)
                self._written += len(records)
        self._give_up()

    def _fail(self, error: DprobesError | OSError) -> None:
        with self._changed:
            self._problem = error.message if isinstance(error, DprobesError) else reason_of(error)
        self._give_up()

    def _give_up(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (SinkError, OSError) as error:
                with self._changed:
                    self._problem = self._problem or str(error)
