"""
OpenTelemetry collector, by OTLP over HTTP, in which each record is a log record.

The SDK's batch processor is not used, because it loses records silently. ``otlp_delivery`` sends a batch in several
requests, and ``otlp_messages`` creates log records.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dprobes.errors import RecordsRefusedError, SinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.sdk._logs import ReadableLogRecord

    from dprobes.keyed.table_layout import TableContents
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks import Batch, Sink, SinkOptions
    from dprobes.sinks.otlp.otlp_delivery import Piece

__all__ = ["OtlpSink", "endpoint_of", "metrics_endpoint_of", "open"]

_LIBRARY = "opentelemetry.exporter.otlp.proto.http"
_PATH = "/v1/logs"
_METRICS_PATH = "/v1/metrics"
_METRICS_ENVIRONMENT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_BYTES_MAX = 1 << 20
"""Maximum size in bytes of the records in one request: collectors accept some megabytes of text and attributes."""


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """Open the collector in the argument, or in the environment variables; raise ``SinkError`` if that fails."""
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
    """Return the URL for log records; raise ``SinkError`` if the argument is not a URL."""
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
        return general.rstrip("/") + _PATH  # as specified
    return url if parts.path not in ("", "/") or (specific and not argument) else url.rstrip("/") + _PATH


def metrics_endpoint_of(endpoint: str) -> str | None:
    """Return the URL for metrics that corresponds to the URL for log records, or None if there is no such URL."""
    if named := os.environ.get(_METRICS_ENVIRONMENT):
        return named
    return endpoint.removesuffix(_PATH) + _METRICS_PATH if endpoint.endswith(_PATH) else None


class OtlpSink:
    """
    Sink that sends batches to a collector. Records count as accepted when the collector has confirmed them.

    ``steps`` is the progress within a call (``Sink``).
    """

    def __init__(self, endpoint: str, format_name: str) -> None:
        from dprobes.sinks.otlp.otlp_delivery import CollectorClient, Experience
        from dprobes.sinks.otlp.otlp_messages import LogRecords

        self._records = LogRecords(format_name)
        self._client = CollectorClient(endpoint)
        self._experience = Experience()
        self._since: dict[int, int] = {}
        """Announcement time of each program by source number."""

    @property
    def steps(self) -> int:
        """Number of answered requests."""
        return self._experience.steps

    def create_event(self, source: RecordSource) -> None:
        """Store the description of a program before its first record, or replace it."""
        self._records.create_event(source)
        self._since.setdefault(source.number, time.time_ns())

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the description of a program after its last record."""
        self._records.destroy_event(source)
        self._since.pop(source.number, None)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """
        Send keyed tables as metrics, if there is a URL for these.

        Raise ``RecordsRefusedError`` if the server rejects them permanently, ``SinkError`` for another failure.
        """
        endpoint = metrics_endpoint_of(self._client.endpoint)
        if endpoint is None:
            return
        from dprobes.formatters.table_addresses import names_for
        from dprobes.sinks.otlp.otlp_messages import TableMetrics, resource

        names = names_for(source, [each.table for each in contents])
        since = self._since.get(source.number, 0)
        for data in TableMetrics(resource()).of_tables(source, contents, names, since):
            answer = self._client.send_metrics(data, endpoint)
            self._experience.steps += 1
            if answer.is_refusal:
                raise RecordsRefusedError(f"'{endpoint}' has rejected tables: {answer.reason}", lost=0)
            if not answer.is_success:
                raise SinkError(f"'{endpoint}' answers {answer.reason}", wait=answer.wait or 0.0)

    def log_events(self, batch: Batch) -> None:
        """
        Send the records of a batch, preceded by the number of lost records.

        Raise ``RecordsRefusedError`` if the server rejects some permanently, ``SinkError`` if it does not accept all.
        """
        from dprobes.sinks.otlp.otlp_delivery import Delivery

        delivery = Delivery(self._client, self._experience, self._pieces(batch))
        delivery.run(len(batch.records) // self._experience.records_max + 1)
        error, refused = delivery.failure, delivery.refused
        if isinstance(error, SinkError):
            left = delivery.left()
            taken = len(batch.records) - len(left)
            raise SinkError(
                error.message, taken=taken, lost=refused, left=left if batch.records else None, wait=error.wait
            ) from error
        if error is not None:
            raise error
        if refused:
            why = f": {delivery.reason}" if delivery.reason else ""
            raise RecordsRefusedError(f"'{self._client.endpoint}' has rejected records{why}", lost=refused)

    def _pieces(self, batch: Batch) -> Iterator[Piece]:
        """Iterate over the contents of requests: log records for a batch, preceded by one for lost records."""
        from dprobes.sinks.otlp.otlp_delivery import Piece

        before = [self._records.of_lost(batch)] if batch.lost else []
        piece: list[ReadableLogRecord] = []
        first = size = 0
        for data, record in zip(batch.records, self._records.of_batch(batch), strict=True):
            if piece and (len(piece) >= self._experience.records_max or size + len(data) > _BYTES_MAX):
                yield Piece(first, piece, before)
                first += len(piece)
                before, piece, size = [], [], 0
            piece.append(record)
            size += len(data)
        if piece or before:
            yield Piece(first, piece, before)

    def flush(self) -> None:
        """Do nothing: accepted records have arrived."""

    def close(self) -> None:
        """Close the connections to the collector."""
        self._client.close()

    def abort(self) -> None:
        """End waits for a busy collector with an error."""
        self._experience.stopped.set()
