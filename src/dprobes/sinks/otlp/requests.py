"""
Requests to an OpenTelemetry collector, and what it answers to each.

The exporter of OpenTelemetry's SDK makes and sends them. What it keeps to itself, the answer, is seen by the HTTP
session that it is given. It also sends again by itself what failed; the session keeps it from that, because how long
to wait, and what else to send meanwhile, is decided where all requests are known.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from dprobes.errors import SinkError, reason_of
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import requests
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.metrics.export import MetricsData

__all__ = ["Answer", "CollectorClient", "request_timeout"]

_TIMEOUT = 10.0
_TIMEOUT_MAX = 60.0
"""Seconds that a request may take, with the waits for a collector that is busy."""

_BUSY = (429, 502, 503, 504)
"""Answers that ask for the same request once more (OTLP specification, Retryable Response Codes)."""

_REFUSALS = (400, 413, 422)
"""Answers that say that there is something wrong with the records: to send them again would not help."""

_TOO_LARGE = 413


def request_timeout() -> float:
    """Return how many seconds a request may take."""
    for name in ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        try:
            return min(max(float(os.environ[name]), 0.1), _TIMEOUT_MAX)
        except (KeyError, ValueError):
            continue
    return _TIMEOUT


@dataclass(frozen=True, slots=True)
class Answer:
    """
    Hold what a collector says to a request; ``status`` is 0 if there is none because the exporter cannot send it.

    Of a request that it takes, ``rejected`` records are not wanted, for the ``reason``. ``wait`` is for how many
    seconds it asks to be left alone, if it does.
    """

    status: int
    reason: str
    rejected: int = 0
    wait: float | None = None

    @property
    def is_success(self) -> bool:
        """Whether the request was taken."""
        return 200 <= self.status < 300

    @property
    def is_busy(self) -> bool:
        """Whether the same request may be taken later."""
        return self.status in _BUSY

    @property
    def is_refusal(self) -> bool:
        """Whether these records are not taken, nor will be."""
        return self.status in _REFUSALS or not self.status

    @property
    def is_too_large(self) -> bool:
        """Whether they might be taken in smaller requests."""
        return self.status == _TOO_LARGE


class CollectorClient:
    """Send requests, from any number of threads."""

    def __init__(self, endpoint: str) -> None:
        # Without a handler, Python would print what the SDK logs; handlers of the user's own still get it.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

        self.endpoint = endpoint
        self._session = _session()
        self._metrics: OTLPMetricExporter | None = None
        self._exporter = OTLPLogExporter(endpoint=endpoint, session=self._session, timeout=request_timeout())

    def send(self, records: Sequence[ReadableLogRecord]) -> Answer:
        """Send log records in one request; raise ``SinkError`` if there is no answer."""
        return self._answer(lambda: self._exporter.export(records))

    def send_metrics(self, data: MetricsData, endpoint: str) -> Answer:
        """Send metrics to another URL of the collector; raise as ``send``."""
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
        """Close the connections."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of the SDK


def _partial(status: int, content: bytes) -> Answer:
    """Read how many records were rejected out of an answer; one that is not in protobuf's form says nothing."""
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
    """Return what the system said, of all that libraries have wrapped around it."""
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
    """Hold how the last request of a thread has ended."""

    response: requests.Response | None = None
    error: Exception | None = None


def _session() -> Any:
    """Return a session that remembers how requests have ended."""
    import requests

    class Session(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            self.memory = _Memory()

        def request(self, *arguments: Any, **options: Any) -> requests.Response:
            if self.verify is not True:  # OpenTelemetry's variables say so, and go before REQUESTS_CA_BUNDLE
                options.setdefault("verify", self.verify)
            try:
                response = super().request(*arguments, **options)
            except requests.exceptions.RequestException as error:
                self.memory.error = error
                raise OSError(str(error)) from error  # which the exporter does not try again
            self.memory.response = response
            if response.status_code in _BUSY:
                raise OSError(response.reason)
            return response

    return Session()
