"""
Keyed tables as OpenTelemetry's metrics: one metric for a table's value, with a data point for each key.

A count is a monotonic sum, ``sum`` a non-monotonic sum. ``min``, ``max`` and ``last`` are gauges. Histograms are
histograms with explicit bounds. ``avg`` and ``stats`` are several metrics. All are cumulative since the program was
announced. The attributes of a data point are the parts of its key, named like the labels of Prometheus.
"""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any, assert_never

from dprobes.escapes import escaped
from dprobes.formatters.json_formatter import address_text
from dprobes.formatters.templates.data_extraction import Fault, FieldKind
from dprobes.formatters.templates.template_model import character
from dprobes.keyed.prometheus_text import labels_of
from dprobes.keyed.table_layout import BIAS, buckets_of, shown_value
from dprobes.keyed.table_text import ordered_rows
from dprobes.rpn.keyed_tables import TableKind, Unit
from dprobes.rpn.word_arithmetic import signed
from dprobes.sinks.structured_records import DescribedRecords, lost_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource

    from dprobes.formatters.templates.data_extraction import Field, Value
    from dprobes.keyed.table_layout import Names, TableContents, TableRow
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.sinks import Batch
    from dprobes.sinks.structured_records import KnownRecord

__all__ = ["LogRecords", "TableMetrics", "resource"]

# Records as OpenTelemetry's log records: a text as body, items and values as typed attributes.

_INT_MAX = (1 << 63) - 1
_TIME_MAX = (1 << 64) - 1


def resource() -> Resource:
    """Return the resource of all records: this service on this host, and the contents of OTEL_RESOURCE_ATTRIBUTES."""
    from opentelemetry.sdk.resources import Resource

    name = os.environ.get("OTEL_SERVICE_NAME") or "dprobes"
    return Resource.create({"service.name": name, "host.name": platform.node()})


class LogRecords:
    """A converter of batches of records to log records of OpenTelemetry."""

    def __init__(self, format_name: str) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from dprobes.version import __version__

        self._records = DescribedRecords(format_name)
        self.create_event = self._records.create_event
        self.destroy_event = self._records.destroy_event
        self._resource = resource()
        self._scope = InstrumentationScope("dprobes", __version__)

    def of_batch(self, batch: Batch) -> Iterator[ReadableLogRecord]:
        """Iterate over the log records of a batch, one for each record."""
        for text, place, data, known in self._records.of_batch(batch):
            attributes = _of_place(batch.source, place)
            wall_time = None
            if known is None:
                attributes["dprobes.data"] = data  # a bug; the data are shown unchanged
            else:
                attributes |= _of_record(known)
                wall_time = _wall_time(known.record.time, batch.wall_offset)
            yield self._record(text, wall_time, attributes, is_warning=False)

    def of_lost(self, batch: Batch) -> ReadableLogRecord:
        """Return the OpenTelemetry log record that reports the number of records lost before a batch."""
        text = f"<{lost_text(batch)}>"
        attributes = {"dprobes.program": escaped(batch.source.name), "dprobes.lost": _integer(batch.lost)}
        return self._record(text, time.time_ns(), attributes, is_warning=True)

    def _record(
        self, text: str, wall_time: int | None, attributes: dict[str, Any], *, is_warning: bool
    ) -> ReadableLogRecord:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord

        severity = SeverityNumber.WARN if is_warning else SeverityNumber.INFO
        record = LogRecord(
            timestamp=wall_time,
            observed_timestamp=time.time_ns(),
            severity_text=severity.name,
            severity_number=severity,
            body=text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),  # it may be JSON, and stays so
            attributes=attributes,
        )
        return ReadableLogRecord(record, self._resource, self._scope)


def _of_place(source: RecordSource, place: Place) -> dict[str, Any]:
    """Return the OpenTelemetry attributes of a record's probepoint: program, module, symbol, function."""
    attributes: dict[str, Any] = {
        "dprobes.program": escaped(source.name),
        "dprobes.module": escaped(place.module),
        "dprobes.symbol": escaped(place.symbol),
    }
    if place.routine:
        attributes["code.function.name"] = escaped(place.routine)
    if place.placed is not None:
        attributes["dprobes.placed"] = place.placed
    return attributes


def _of_record(known: KnownRecord) -> dict[str, Any]:
    """Return the OpenTelemetry attributes from the record itself: its header items, then the fields of its data."""
    record = known.record
    items: dict[str, Any] = {
        "code.function.name": escaped(known.function) or None,
        "dprobes.major": record.major,
        "dprobes.minor": record.minor,
        "dprobes.cpu": record.cpu,
        "process.pid": record.pid,
        "thread.id": record.tid,
        "user.id": None if record.uid is None else str(record.uid),
        "dprobes.process_name": None if record.process_name is None else escaped(record.process_name),
        "dprobes.cs": address_text(record.cs),
        "dprobes.ip": address_text(record.ip),
        "dprobes.ss": address_text(record.ss),
        "dprobes.sp": address_text(record.sp),
        "dprobes.stack_trace": record.is_stack_trace or None,
        "dprobes.cut": record.is_cut or None,
    }
    for field, value in known.fields:
        items[f"dprobes.field.{field.name}"] = None if value is None else _typed(field, value)
    for name, names in known.names:
        items[f"dprobes.field.{name}"] = escaped(names) if isinstance(names, str) else list(map(escaped, names))
    if not known.fields and record.data:
        items["dprobes.data"] = record.data
    return {name: value for name, value in items.items() if value is not None}


def _wall_time(time: int | None, wall_offset: int) -> int | None:
    """Return a time in nanoseconds since 1970, or None if it is unknown, or beyond the range of OTLP."""
    return None if time is None or not 0 <= time + wall_offset <= _TIME_MAX else time + wall_offset


def _typed(field: Field, value: Value) -> Any:
    """Return a field's value with a type of OTLP: 64-bit numbers are signed there."""
    match value:
        case Fault():
            return str(value)
        case str():
            return _clean(value)
        case int() | tuple() if field.kind is FieldKind.CHARACTER:
            codes = value if isinstance(value, tuple) else (value,)
            return _clean("".join(map(character, codes)))
        case int() if field.kind is FieldKind.ADDRESS:
            return f"{value:#x}"
        case int():
            return _integer(value)
        case tuple():
            return [f"{each:#x}" if field.kind is FieldKind.ADDRESS else _integer(each) for each in value]
    return value


def _integer(value: int) -> int | str:
    return value if value <= _INT_MAX else str(value)


def _clean(text: str) -> str:
    """Return a text with invalid characters replaced, so that it is encodable as UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_POINTS_MAX = 2000
"""Maximum number of data points in a request."""

_UNITS = {Unit.NONE: "1", Unit.BYTES: "By", Unit.NANOSECONDS: "ns"}


class TableMetrics:
    """A converter of programs' keyed tables to metrics of OpenTelemetry."""

    def __init__(self, resource: Resource) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from dprobes.version import __version__

        self._resource = resource
        self._scope = InstrumentationScope("dprobes", __version__)

    def of_tables(
        self, source: RecordSource, contents: Sequence[TableContents], names: Names, since: int
    ) -> Iterator[MetricsData]:
        """
        Iterate over the contents of requests to the collector, each with a limited number of data points.

        ``names`` names addresses in keys. ``since`` is the start of the tables in nanoseconds since 1970.
        """
        now = time.time_ns()
        metrics: list[Metric] = []
        points = 0
        for each in contents:
            rows = ordered_rows(each)
            for first in range(0, len(rows), _POINTS_MAX):
                part = rows[first : first + _POINTS_MAX]
                found = _Points(source, each.table, names, since, now).metrics(part)
                if metrics and points + len(part) > _POINTS_MAX:
                    yield self._data(metrics)
                    metrics, points = [], 0
                metrics += found
                points += len(part)
            if each.lost:
                metrics.append(_Points(source, each.table, names, since, now).lost(each.lost))
        if metrics:
            yield self._data(metrics)

    def _data(self, metrics: Sequence[Metric]) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

        return MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])


class _Points:
    """A converter of the rows of one keyed table to data points of metrics of OpenTelemetry."""

    def __init__(self, source: RecordSource, table: Table, names: Names, since: int, now: int) -> None:
        self._source = source
        self._table = table
        self._names = names
        self._times: dict[str, Any] = {"start_time_unix_nano": since, "time_unix_nano": now}
        self._unit = _UNITS[table.unit]

    def metrics(self, rows: Sequence[TableRow]) -> list[Metric]:
        table = self._table
        match table.kind:
            case TableKind.COUNT:
                return [self._sum("", rows, lambda row: row.cells[0], is_monotonic=True, unit="1")]
            case TableKind.SUM:
                return [self._sum("", rows, lambda row: shown_value(table, row.cells))]
            case TableKind.HIST | TableKind.LHIST:
                return [self._histogram(rows)]
            case TableKind.AVG | TableKind.STATS:
                found = [
                    self._sum(".count", rows, lambda row: row.cells[0], is_monotonic=True, unit="1"),
                    self._sum(".sum", rows, lambda row: signed(row.cells[1], 64)),
                ]
                if table.kind is TableKind.STATS:
                    found.append(self._gauge(".min", rows, lambda row: BIAS - 1 - row.cells[2]))
                    found.append(self._gauge(".max", rows, lambda row: row.cells[3] - BIAS))
                return found
            case TableKind.MIN | TableKind.MAX | TableKind.LAST:
                return [self._gauge("", rows, lambda row: shown_value(table, row.cells))]
        assert_never(table.kind)

    def lost(self, count: int) -> Metric:
        """Return the metric of the number of values whose keys had no room in the table."""
        from opentelemetry.sdk.metrics.export import AggregationTemporality, NumberDataPoint, Sum

        point = NumberDataPoint({"dprobes.program": self._source.name}, **self._times, value=min(count, _INT_MAX))
        return self._metric(".lost", Sum([point], AggregationTemporality.CUMULATIVE, is_monotonic=True), "1")

    def _metric(self, what: str, data: Any, unit: str) -> Metric:
        from opentelemetry.sdk.metrics.export import Metric

        return Metric(f"dprobes.{self._table.name}{what}", "", unit, data)

    def _sum(
        self,
        what: str,
        rows: Sequence[TableRow],
        value: Callable[[TableRow], int],
        *,
        is_monotonic: bool = False,
        unit: str | None = None,
    ) -> Metric:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Sum

        data = Sum(self._numbers(rows, value), AggregationTemporality.CUMULATIVE, is_monotonic)
        return self._metric(what, data, unit or self._unit)

    def _gauge(self, what: str, rows: Sequence[TableRow], value: Callable[[TableRow], int]) -> Metric:
        from opentelemetry.sdk.metrics.export import Gauge

        return self._metric(what, Gauge(self._numbers(rows, value)), self._unit)

    def _numbers(self, rows: Sequence[TableRow], value: Callable[[TableRow], int]) -> list[Any]:
        from opentelemetry.sdk.metrics.export import NumberDataPoint

        return [NumberDataPoint(self._attributes(row), **self._times, value=min(value(row), _INT_MAX)) for row in rows]

    def _histogram(self, rows: Sequence[TableRow]) -> Metric:
        """
        Return an OpenTelemetry histogram with explicit bounds, with a data point for each row.

        A bucket of OTLP includes its upper bound, so each bound is one less than the next bucket's start.
        """
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint

        buckets, points = buckets_of(self._table), []
        for row in rows:
            filled = [number for number, count in enumerate(row.cells) if count]
            first, last = (filled[0], filled[-1]) if filled else (0, -1)
            shown = range(first, min(last + 1, len(buckets)))
            bounds = [float(high - 1) for number in shown if (high := buckets[number].high) is not None]
            counts = [row.cells[number] for number in shown]
            if (low := buckets[first].low) is not None and filled:
                bounds, counts = [float(low - 1), *bounds], [0, *counts]
            counts += [0] * (len(bounds) + 1 - len(counts))
            points.append(
                HistogramDataPoint(
                    self._attributes(row), **self._times, count=sum(counts), sum=None,  # type: ignore[arg-type] # nor kept
                    bucket_counts=counts, explicit_bounds=bounds, min=None, max=None,  # type: ignore[arg-type]
                )
            )  # fmt: skip
        return self._metric("", Histogram(points, AggregationTemporality.CUMULATIVE), self._unit)

    def _attributes(self, row: TableRow) -> dict[str, Any]:
        return {"dprobes.program": self._source.name, **labels_of(self._table, row, self._names)}
