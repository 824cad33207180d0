"""Records as OpenTelemetry's log records: a text as body, what is known as attributes with types."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.formatters.templates.fields import Fault, FieldKind
from dprobes.sinks.recordfields import FieldReader
from dprobes.sinks.textsinks import BatchFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource

    from dprobes.formatters.templates.fields import Field, Value
    from dprobes.record.origin import RecordSource
    from dprobes.record.probeinfo import Place
    from dprobes.sinks.interface import Batch

__all__ = ["LogRecords", "resource"]

_INT_MAX = (1 << 63) - 1
_TIME_MAX = (1 << 64) - 1
_UNICODE_MAX = 0x10FFFF


def resource() -> Resource:
    """Return what all records have in common: this service on this host, and what OTEL_RESOURCE_ATTRIBUTES says."""
    from opentelemetry.sdk.resources import Resource

    name = os.environ.get("OTEL_SERVICE_NAME") or "dprobes"
    return Resource.create({"service.name": name, "host.name": platform.node()})


class LogRecords:
    """Make log records of batches."""

    def __init__(self, format_name: str) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from dprobes.version import __version__

        self._strings = BatchFormatter(format_name, has_items=True)
        self._fields = FieldReader()
        self._resource = resource()
        self._scope = InstrumentationScope("dprobes", __version__)

    def create_event(self, source: RecordSource) -> None:
        """Know a program, or more of it."""
        self._strings.create_event(source)
        self._fields.create_event(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Forget a program."""
        self._strings.destroy_event(source)
        self._fields.destroy_event(source)

    def of_batch(self, batch: Batch) -> Iterator[ReadableLogRecord]:
        """Iterate over the log records of a batch, one for each record."""
        strings = self._strings.strings(replace(batch, lost=0))
        for text, data, place in zip(strings, batch.records, batch.places, strict=True):
            wall_time, attributes = self._known(batch, data, place)
            yield self._record(text, wall_time, attributes, is_warning=False)

    def of_lost(self, batch: Batch) -> ReadableLogRecord:
        """Return the log record that says that records were lost."""
        text = f"<{batch.lost} records of '{batch.source.name}' were lost here>"
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

    def _known(self, batch: Batch, data: bytes, place: Place) -> tuple[int | None, dict[str, Any]]:
        """Return the time of a record in nanoseconds since 1970, and its attributes."""
        attributes: dict[str, Any] = {
            "dprobes.program": escaped(batch.source.name),
            "dprobes.module": escaped(place.module),
            "dprobes.symbol": escaped(place.symbol),
        }
        if place.routine:
            attributes["code.function.name"] = escaped(place.routine)
        if place.placed is not None:
            attributes["dprobes.placed"] = place.placed
        try:
            known = self._fields.read(batch.source, data, place)
        except FormatError:
            return None, {**attributes, "dprobes.data": data}  # which is a bug; it is shown as what it is
        record, fields = known.record, known.fields
        if known.function:
            attributes["code.function.name"] = escaped(known.function)
        items = {
            "dprobes.major": record.major,
            "dprobes.minor": record.minor,
            "dprobes.cpu": record.cpu,
            "process.pid": record.pid,
            "thread.id": record.tid,
            "user.id": None if record.uid is None else str(record.uid),
            "dprobes.process_name": None if record.process_name is None else escaped(record.process_name),
        }
        for name in ("cs", "ip", "ss", "sp"):
            value = getattr(record, name)
            items[f"dprobes.{name}"] = None if value is None else f"{value:#x}"
        attributes |= {name: value for name, value in items.items() if value is not None}
        if record.is_stack_trace:
            attributes["dprobes.stack_trace"] = True
        if record.is_cut:
            attributes["dprobes.cut"] = True
        for field, field_value in fields:
            if field_value is not None:
                attributes[f"dprobes.field.{field.name}"] = _typed(field, field_value)
        for name, names in known.names:
            shown = escaped(names) if isinstance(names, str) else [escaped(each) for each in names]
            attributes[f"dprobes.field.{name}"] = shown
        if not fields and record.data:
            attributes["dprobes.data"] = record.data
        wall_time = None if record.time is None else record.time + batch.wall_offset
        return (wall_time if wall_time is not None and 0 <= wall_time <= _TIME_MAX else None), attributes


def _typed(field: Field, value: Value) -> Any:
    """Return a value with a type that OTLP has; numbers there are signed."""
    match value:
        case Fault():
            return str(value)
        case str():
            return _clean(value)
        case int() | tuple() if field.kind is FieldKind.CHARACTER:
            codes = value if isinstance(value, tuple) else (value,)
            return _clean(
                "".join(chr(code) if code <= _UNICODE_MAX else f"<no character: {code:#x}>" for code in codes)
            )
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
    """Return a text that UTF-8 can hold."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
