"""
The delivery of one batch to an OpenTelemetry collector: in several requests, some of them under way at once.

A request costs time, and the way to the collector more of it, so requests are large, and nobody waits for the answer
to one before the next is sent. What is refused as a whole is sent again in halves, until those records are alone that
the collector does not want. Each record is sent until it is taken or refused, or there is a failure; then it is known
which are left.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dprobes.errors import SinkError
from dprobes.lazydataclass import dataclass
from dprobes.sinks.otlp.requests import request_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk._logs import ReadableLogRecord

    from dprobes.sinks.otlp.requests import Answer, CollectorClient

__all__ = ["Delivery", "Experience", "Piece"]

_RECORDS_MAX = 2048
"""Records in a request at most."""

_UNDER_WAY_MAX = 8
_QUICK = 0.02
"""Requests that are under way at once; but one at a time if each is answered within so many seconds."""

_BACKOFF = 0.5
"""Seconds to wait for a collector that is busy and does not say for how long, at first; it doubles."""

_LAST_ANSWERS = 0.5
"""Seconds in which answers to what is under way still count at the end."""

_LOOK = 0.1
"""Seconds between two looks whether it is the end."""

_SPLITS_MAX = 64
"""Refusals in a row after which it is believed that the collector wants nothing, and that halves are no use."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Hold records of a batch from position ``first``, and ``before`` them what is none."""

    first: int
    records: list[ReadableLogRecord]
    before: list[ReadableLogRecord]

    def halves(self) -> tuple[Piece, Piece]:
        """Return the two pieces that a piece is made of."""
        middle = len(self.records) // 2
        return (
            Piece(self.first, self.records[:middle], self.before),
            Piece(self.first + middle, self.records[middle:], []),
        )


class Experience:
    """Remember, from one delivery to the next, what a collector is like; ``steps`` counts its answers."""

    def __init__(self) -> None:
        self.steps = 0
        self.records_max = _RECORDS_MAX
        self.slowest: float | None = None
        """Seconds that the slowest answer took in the last delivery, with the waits for a collector that is busy."""
        self.refusals = 0
        """How often in a row it has refused a request."""
        self.stopped = threading.Event()
        """Set when nobody waits for answers any more."""


class Delivery:
    """Send pieces; then ``refused`` counts records, and ``left`` has the positions of those that may come again."""

    def __init__(self, client: CollectorClient, experience: Experience, pieces: Iterator[Piece]) -> None:
        self._client = client
        self._experience = experience
        self._pieces = pieces
        self._lock = threading.Lock()
        """Guards everything below, and the pieces, which are made when they are asked for."""
        self._halves: list[Piece] = []
        self._unsent: list[Piece] = []
        self._under_way: list[Piece] = []
        self._slowest = 0.0
        self.refused = 0
        self.reason = ""
        self.failure: Exception | None = None

    def run(self, count: int) -> None:
        """
        Send everything, ``count`` pieces as it seems; return when all is answered, or after a failure.

        When nobody waits for answers any more, return soon: what is not answered by then is left.
        """
        slowest = self._experience.slowest
        workers = 1 if slowest is not None and slowest < _QUICK else min(_UNDER_WAY_MAX, count)
        # Daemons: a request that hangs must not keep a run from ending.
        threads = [threading.Thread(target=self._work, name="otlp request", daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        until = None
        for thread in threads:
            while thread.is_alive() and (until is None or time.monotonic() < until):
                thread.join(_LOOK)
                if until is None and self._experience.stopped.is_set():
                    until = time.monotonic() + _LAST_ANSWERS
        self._experience.slowest = self._slowest
        if any(thread.is_alive() for thread in threads):
            self._fail(None, SinkError(f"'{self._client.endpoint}' did not answer before the end"))

    def left(self) -> list[int]:
        """Return the positions of the records that were neither taken nor refused, in order."""
        with self._lock:
            pieces = [*self._unsent, *self._halves, *self._under_way, *self._pieces]
        return sorted(position for each in pieces for position in range(each.first, each.first + len(each.records)))

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._deliver(piece)
            except Exception as error:  # noqa: BLE001 - of another thread perhaps; whoever has called us gets it
                self._fail(piece, error)

    def _next(self) -> Piece | None:
        with self._lock:
            if self.failure is not None:
                return None
            if self._experience.stopped.is_set():
                self.failure = SinkError(f"'{self._client.endpoint}' did not answer before the end")
                return None
            try:
                piece = self._halves.pop() if self._halves else next(self._pieces, None)
            except Exception as error:  # noqa: BLE001 - as above
                self.failure = error
                return None
            if piece is not None:
                self._under_way.append(piece)
            return piece

    def _fail(self, piece: Piece | None, error: Exception) -> None:
        with self._lock:
            if piece is not None:
                self._under_way.remove(piece)
                self._unsent.append(piece)
            self.failure = self.failure or error

    def _deliver(self, piece: Piece) -> None:
        begun = time.monotonic()
        answer = self._answer(piece)
        count = len(piece.records)
        with self._lock:
            self._slowest = max(self._slowest, time.monotonic() - begun)
            self._experience.steps += 1
            self._under_way.remove(piece)
            if answer.is_success:
                self._experience.refusals = 0
                if answer.rejected:
                    self._refuse(min(answer.rejected, count), answer.reason)
                return
            self._experience.refusals += 1
            if answer.is_too_large:
                self._experience.records_max = max(min(self._experience.records_max, count // 2), 1)
            if count > 1 and self._experience.refusals <= _SPLITS_MAX:
                first, second = piece.halves()
                self._halves += (second, first)
            else:
                self._refuse(count, answer.reason)

    def _refuse(self, count: int, reason: str) -> None:
        self.refused += count
        self.reason = reason

    def _answer(self, piece: Piece) -> Answer:
        """Return what the collector says to a piece at last; raise ``SinkError`` if it says nothing of the records."""
        records = piece.before + piece.records
        until = time.monotonic() + request_timeout()
        pause = _BACKOFF
        while True:
            answer = self._client.send(records)
            if answer.is_success or answer.is_refusal:
                return answer
            problem = f"'{self._client.endpoint}' answers {answer.reason}"
            if not answer.is_busy:
                raise SinkError(problem)
            wait, pause = pause if answer.wait is None else answer.wait, 2 * pause
            if time.monotonic() + wait > until or self._experience.stopped.wait(wait) or self.failure is not None:
                raise SinkError(problem, wait=answer.wait or 0.0)
