"""
Keyed tables as OpenTelemetry's metrics: one metric for what a table keeps, with a data point for each key.

A count is a monotonic sum, ``sum`` one that is not, ``min``, ``max`` and ``last`` are gauges, histograms are histograms
with explicit bounds. ``avg`` and ``stats`` are several metrics. All are cumulative since the program was announced. The
attributes of a data point are the parts of its key, named as the labels of Prometheus.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dprobes.keyed.layout import BIAS, buckets_of, shown_value
from dprobes.keyed.prometheus import labels_of
from dprobes.keyed.text import ordered_rows
from dprobes.rpn.arithmetic import signed
from dprobes.rpn.tables import TableKind, Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource

    from dprobes.keyed.contents import TableContents, TableRow
    from dprobes.keyed.parts import Names
    from dprobes.record.origin import RecordSource
    from dprobes.rpn.tables import Table

__all__ = ["TableMetrics"]

_POINTS_MAX = 2000
"""Data points in a request at most."""

_UNITS = {Unit.NONE: "1", Unit.BYTES: "By", Unit.NANOSECONDS: "ns"}
_INT_MAX = (1 << 63) - 1


class TableMetrics:
    """Make metrics of the tables of programs."""

    def __init__(self, resource: Resource) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from dprobes.version import __version__

        self._resource = resource
        self._scope = InstrumentationScope("dprobes", __version__)

    def of_tables(
        self, source: RecordSource, contents: Sequence[TableContents], names: Names, since: int
    ) -> Iterator[MetricsData]:
        """Iterate over what goes in a request each; ``since`` is when the tables began, nanoseconds since 1970."""
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
    """Make the metrics of one table."""

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
            case _:
                return [self._gauge("", rows, lambda row: shown_value(table, row.cells))]

    def lost(self, count: int) -> Metric:
        """Return the metric of what found no room for its keys."""
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
        """Return histograms; a bound is in the bucket below it, so it is one less than where ours begins."""
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
