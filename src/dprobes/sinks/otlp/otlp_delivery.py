"""
Delivery of one batch to an OpenTelemetry collector, in several concurrent requests.

The latency of a request is high, especially with a distant collector. So requests are large, and the next one is sent
before the response to the previous one arrives. A refused request is repeated in halves, until the records that the
collector rejects are isolated. Each record is sent until it is accepted or refused, or until a failure. After a
failure, the remaining records are known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dprobes.errors import SinkError, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import requests
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.metrics.export import MetricsData

__all__ = ["CollectorClient", "Delivery", "Experience", "Piece"]

# Requests to an OpenTelemetry collector, and its responses. The exporter of OpenTelemetry's SDK creates and sends them.
# It does not return the response, so an HTTP session that is passed to it records the response. The exporter also
# retries failed requests itself. The session prevents that, because the delivery, which has all requests, decides how
# long to wait and what to send meanwhile.

_TIMEOUT = 10.0
_TIMEOUT_MAX = 60.0
"""Maximum duration of a request in seconds, including waits for a busy collector."""

_BUSY = (429, 502, 503, 504)
"""Statuses that ask for the same request once more (OTLP specification, Retryable Response Codes)."""

_REFUSALS = (400, 413, 422)
"""Statuses of requests with unacceptable records: sending them again would not help."""

_TOO_LARGE = 413


def request_timeout() -> float:
    """Return the maximum duration of an HTTP request in seconds, from OpenTelemetry's environment variables."""
    for name in ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        try:
            return min(max(float(os.environ[name]), 0.1), _TIMEOUT_MAX)
        except (KeyError, ValueError):
            continue
    return _TIMEOUT


@dataclass(frozen=True, slots=True)
class Answer:
    """
    The response of a collector to a request; ``status`` is the HTTP status, 0 if the request could not be sent.

    ``rejected`` records of an accepted request were dropped for the ``reason``. ``wait`` is the number of seconds after
    which the collector asks to retry, None if it names none.
    """

    status: int
    reason: str
    rejected: int = 0
    wait: float | None = None

    @property
    def is_success(self) -> bool:
        """True if the request was accepted."""
        return 200 <= self.status < 300

    @property
    def is_busy(self) -> bool:
        """True if the same request may be accepted later."""
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        """True if these records are refused permanently."""
        return self.status in _REFUSALS or not self.status

    @property
    def is_too_large(self) -> bool:
        """True if smaller requests might be accepted."""
        return self.status == _TOO_LARGE


class CollectorClient:
    """An HTTP client of an OpenTelemetry collector; any thread may send requests."""

    def __init__(self, endpoint: str) -> None:
        # Without a handler, Python would print the SDK's log messages; the user's own handlers still receive them.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

        self.endpoint = endpoint
        self._session = _session()
        self._metrics: OTLPMetricExporter | None = None
        self._exporter = OTLPLogExporter(endpoint=endpoint, session=self._session, timeout=request_timeout())

    def send(self, records: Sequence[ReadableLogRecord]) -> Answer:
        """Send log records in one request; raise ``SinkError`` if there is no response."""
        return self._answer(lambda: self._exporter.export(records))

    def send_metrics(self, data: MetricsData, endpoint: str) -> Answer:
        """Send metrics to another URL of the collector. Errors are those of ``send``."""
        if self._metrics is None:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            self._metrics = OTLPMetricExporter(endpoint=endpoint, session=self._session, timeout=request_timeout())
        exporter = self._metrics
        return self._answer(lambda: exporter.export(data))

    def _answer(self, export: Callable[[], object]) -> Answer:
        memory = self._session.memory
        memory.response = memory.error = None
        export()
        response, error = memory.response, memory.error
        if response is None and error is None:
            return Answer(0, "the exporter cannot send these records")
        if response is None:
            raise SinkError(f"'{self.endpoint}' {_why(error)}")
        status = response.status_code
        if not 200 <= status < 300:
            return Answer(status, f"{status} {response.reason or ''}".rstrip(), wait=_retry_after(response))
        return _partial(status, response.content)

    def close(self) -> None:
        """Close the HTTP connections to the collector."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of the SDK


def _partial(status: int, content: bytes) -> Answer:
    """
    Return the answer in an HTTP response: status, message, and number of rejected records from its protobuf body.

    A body that is not protobuf is ignored.
    """
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

    try:
        partial = ExportLogsServiceResponse.FromString(content).partial_success
    except DecodeError:
        return Answer(status, "")
    return Answer(status, partial.error_message, max(partial.rejected_log_records, 0))


def _retry_after(response: requests.Response) -> float | None:
    from urllib3.exceptions import InvalidHeader
    from urllib3.util.retry import Retry

    text = response.headers.get("Retry-After")
    try:
        return None if text is None else Retry().parse_retry_after(text)
    except InvalidHeader:
        return None


def _why(error: Exception | None) -> str:
    import requests

    match error:
        case requests.exceptions.SSLError():
            return f"cannot be reached safely: {_innermost(error)}"
        case requests.exceptions.ConnectTimeout() | requests.exceptions.ReadTimeout():
            return "has not answered in time"
        case None:
            return "has not answered"
    return f"cannot be reached: {_innermost(error)}"


def _innermost(error: BaseException) -> str:
    """Return the system's error message from within the exceptions of libraries that wrap it."""
    cause: BaseException = error
    for _ in range(10):
        inner = getattr(cause, "reason", None) or cause.__cause__ or cause.__context__
        if not isinstance(inner, BaseException):
            break
        cause = inner
    if isinstance(cause, OSError) and cause.strerror:
        return reason_of(cause)
    return (str(cause).splitlines() or [type(cause).__name__])[0]


class _Memory(threading.local):
    """The HTTP response or the exception of a thread's last request."""

    response: requests.Response | None = None
    error: Exception | None = None


def _session() -> Any:
    """Return a ``requests`` session that stores the response or the exception of each thread's last request."""
    import requests

    class Session(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            self.memory = _Memory()

        def request(self, *arguments: Any, **options: Any) -> requests.Response:
            if self.verify is not True:  # set from OpenTelemetry's variables, which precede REQUESTS_CA_BUNDLE
                options.setdefault("verify", self.verify)
            try:
                response = super().request(*arguments, **options)
            except requests.exceptions.RequestException as error:
                self.memory.error = error
                raise OSError(str(error)) from error  # the exporter does not retry an OSError
            self.memory.response = response
            if response.status_code in _BUSY:
                raise OSError(response.reason)
            return response

    return Session()


_RECORDS_MAX = 2048
"""Maximum number of records in a request."""

_UNDER_WAY_MAX = 8
_QUICK = 0.02
"""
Maximum number of concurrent requests, and a response time in seconds.

If all responses take less than this time, requests are sent one after the other.
"""

_BACKOFF = 0.5
"""Seconds to wait at first for a busy collector that does not specify a time; the time doubles."""

_LAST_ANSWERS = 0.5
"""Seconds to wait at the end for responses to pending requests."""

_LOOK = 0.1
"""Seconds between checks for the end."""

_SPLITS_MAX = 64
"""Number of consecutive refusals after which requests are not halved: the collector probably refuses everything."""


@dataclass(frozen=True, slots=True)
class Piece:
    """
    The contents of one request: records of a batch from position ``first`` on.

    ``before`` are other log records that precede them.
    """

    first: int
    records: list[ReadableLogRecord]
    before: list[ReadableLogRecord]

    def halves(self) -> tuple[Piece, Piece]:
        """Return this piece as two: each with half of ``records``, the first one with all of ``before``."""
        middle = len(self.records) // 2
        return (
            Piece(self.first, self.records[:middle], self.before),
            Piece(self.first + middle, self.records[middle:], []),
        )


class Experience:
    """Knowledge about a collector, kept from one delivery to the next; ``steps`` counts its responses."""

    def __init__(self) -> None:
        self.steps = 0
        self.records_max = _RECORDS_MAX
        self.slowest: float | None = None
        """Seconds that the slowest response took in the last delivery, including waits for a busy collector."""
        self.refusals = 0
        """Number of consecutive requests that the collector refused."""
        self.stopped = threading.Event()
        """Set at the end, when responses are not awaited any more."""


class Delivery:
    """
    A delivery of pieces.

    Afterwards ``refused`` is the number of refused records, and ``left`` returns the positions of those to be sent
    again.
    """

    def __init__(self, client: CollectorClient, experience: Experience, pieces: Iterator[Piece]) -> None:
        self._client = client
        self._experience = experience
        self._pieces = pieces
        self._lock = threading.Lock()
        """Guards all following attributes, and the iterator of pieces, which creates them on demand."""
        self._halves: list[Piece] = []
        self._unsent: list[Piece] = []
        self._under_way: list[Piece] = []
        self._slowest = 0.0
        self.refused = 0
        self.reason = ""
        self.failure: Exception | None = None

    def run(self, count: int) -> None:
        """
        Send about ``count`` pieces; return when all requests are answered, or after a failure.

        After ``Experience.stopped`` was set, return soon, and leave unanswered records.
        """
        slowest = self._experience.slowest
        workers = 1 if slowest is not None and slowest < _QUICK else min(_UNDER_WAY_MAX, count)
        # Daemon threads: a request that hangs must not keep a run from ending.
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
        """Return the positions in the batch of the records that were neither accepted nor refused, ascending."""
        with self._lock:
            pieces = [*self._unsent, *self._halves, *self._under_way, *self._pieces]
        return sorted(position for each in pieces for position in range(each.first, each.first + len(each.records)))

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._deliver(piece)
            except Exception as error:  # noqa: BLE001 - of another thread perhaps; the caller gets it
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
        """
        Return the final response to a request with these records.

        A busy collector gets the request again. Raise ``SinkError`` if it neither accepts nor refuses the records.
        """
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
