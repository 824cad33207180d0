"""
An OpenTelemetry collector, by OTLP over HTTP: each record is a log record.

The exporter of OpenTelemetry's SDK is called for each batch. The SDK's processor of batches is not used: it loses
records without a word. What the exporter keeps to itself, the answer, is seen by the HTTP session that it is given.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dprobes.errors import SinkError

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk._logs import ReadableLogRecord

    from dprobes.record.source import RecordSource
    from dprobes.sinks.base import Batch, Sink, SinkOptions

__all__ = ["OtlpSink", "endpoint_of", "open"]

_LIBRARY = "opentelemetry.exporter.otlp.proto.http"
_PATH = "/v1/logs"
_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_RECORDS_MAX = 512
_BYTES_MAX = 1 << 20
"""What is sent in one request: collectors take some megabytes at most."""

_TIMEOUT = 10.0
_TIMEOUT_MAX = 60.0
"""Seconds that a request may take, with what is repeated because the collector says that it is busy."""

_DATA_PROBLEMS = (400, 413, 422)
"""Answers that say that there is something wrong with the records: to send them again would not help."""

_SAY_INTERVAL = 5.0


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the collector that is named, or that the environment names."""
    endpoint = endpoint_of(argument)
    if options.format_name == "binary":
        raise SinkError("log target 'otlp' takes text, not --log-format binary")
    try:
        found = importlib.util.find_spec(_LIBRARY)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise SinkError("log target 'otlp' needs OpenTelemetry's exporter", hint="pip install 'dprobes[otlp]'")
    return OtlpSink(endpoint, options.format_name)


def endpoint_of(argument: str) -> str:
    """Return the URL that log records go to; raise ``SinkError`` if an argument is none."""
    specific, general = (os.environ.get(name, "") for name in _ENVIRONMENT)
    url = argument or specific or general or "http://localhost:4318"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        hint = "otlp:http://localhost:4318"
        raise SinkError(f"log target 'otlp': expected http://HOST:PORT or https://HOST:PORT, found '{url}'", hint=hint)
    if not argument and not specific and general:
        return general.rstrip("/") + _PATH  # as the specification has it
    return url if parts.path not in ("", "/") or (specific and not argument) else url.rstrip("/") + _PATH


def _timeout() -> float:
    for name in ("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        try:
            return min(max(float(os.environ[name]), 0.1), _TIMEOUT_MAX)
        except (KeyError, ValueError):
            continue
    return _TIMEOUT


class OtlpSink:
    """Send batches to a collector; records are taken when it has confirmed them."""

    def __init__(self, endpoint: str, format_name: str) -> None:
        # Without a handler, Python would print what the SDK logs; handlers of the user's own still get it.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

        from dprobes.sinks.otlprecords import LogRecords

        self._endpoint = endpoint
        self._records = LogRecords(format_name)
        self._session = _session()
        self._exporter = OTLPLogExporter(endpoint=endpoint, session=self._session, timeout=_timeout())
        self._rejected = 0
        self._reason = ""
        self._said = 0.0

    def create_event(self, source: RecordSource) -> None:
        """Know a program, or more of it."""
        self._records.create_event(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._records.destroy_event(source)

    def log_events(self, batch: Batch) -> None:
        """Send the records of a batch, and before them how many were lost."""
        before = [self._records.of_lost(batch)] if batch.lost else []
        piece: list[ReadableLogRecord] = []
        taken = size = 0
        for data, record in zip(batch.records, self._records.of_batch(batch), strict=True):
            if piece and (len(piece) >= _RECORDS_MAX or size + len(data) > _BYTES_MAX):
                self._send(before, piece, taken)
                taken += len(piece)
                before, piece, size = [], [], 0
            piece.append(record)
            size += len(data)
        if piece or before:
            self._send(before, piece, taken)

    def flush(self) -> None:
        """Say what the collector has rejected, now and then."""
        if self._rejected and time.monotonic() - self._said > _SAY_INTERVAL:
            self._raise_rejected()

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call] # of the SDK
        self._raise_rejected()

    def _raise_rejected(self) -> None:
        rejected, self._rejected = self._rejected, 0
        if rejected:
            self._said = time.monotonic()
            raise SinkError(f"'{self._endpoint}' has rejected records{self._reason}", lost=rejected)

    def _send(self, before: list[ReadableLogRecord], piece: list[ReadableLogRecord], taken: int) -> None:
        """
        Send log records in one request; raise ``SinkError`` if that fails.

        ``before`` goes before them and is no record; ``taken`` records of the batch have been sent.
        """
        from opentelemetry.sdk._logs.export import LogRecordExportResult

        self._session.forget()
        result = self._exporter.export(before + piece)
        response, error = self._session.response, self._session.error
        if response is None:
            raise SinkError(f"'{self._endpoint}' {_why(error)}", taken=taken)
        status = response.status_code
        if result is LogRecordExportResult.SUCCESS and 200 <= status < 300:
            self._note_rejected(response.content, len(piece))
            return
        problem = f"'{self._endpoint}' answers {status} {response.reason or ''}".rstrip()
        if status in _DATA_PROBLEMS:
            raise SinkError(f"{problem}: it does not take these records", taken=taken + len(piece), lost=len(piece))
        raise SinkError(problem, taken=taken)

    def _note_rejected(self, content: bytes, count: int) -> None:
        """Read how many records were rejected out of an answer; one that is not in protobuf's form says nothing."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

        try:
            partial = ExportLogsServiceResponse.FromString(content).partial_success
        except DecodeError:
            return
        self._rejected += min(max(partial.rejected_log_records, 0), count)
        if partial.rejected_log_records > 0:
            self._reason = f": {partial.error_message}" if partial.error_message else ""


def _why(error: Exception | None) -> str:
    import requests

    match error:
        case None:
            return "cannot be sent these records"
        case requests.exceptions.SSLError():
            return f"cannot be reached safely: {_innermost(error)}"
        case requests.exceptions.ConnectTimeout() | requests.exceptions.ReadTimeout():
            return "has not answered in time"
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
        return cause.strerror.lower()
    return (str(cause).splitlines() or [type(cause).__name__])[0]


def _session() -> Any:
    """Return a session that remembers how the last request has ended."""
    import requests

    class Session(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            self.forget()

        def forget(self) -> None:
            self.response: requests.Response | None = None
            self.error: Exception | None = None

        def request(self, *arguments: Any, **options: Any) -> requests.Response:
            self.forget()
            if self.verify is not True:  # OpenTelemetry's variables say so, and go before REQUESTS_CA_BUNDLE
                options.setdefault("verify", self.verify)
            try:
                self.response = super().request(*arguments, **options)
            except requests.exceptions.RequestException as error:
                self.error = error
                # The exporter would try again and again; the log target does that better.
                raise OSError(str(error)) from error
            return self.response

    return Session()
