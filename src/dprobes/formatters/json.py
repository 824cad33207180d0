"""
JSON lines: one object for each record.

Keys: ``major minor cpu pid tid uid name ip sp time module symbol function placed data``; numbers are numbers, addresses
too, ``time`` is CLOCK_MONOTONIC in nanoseconds, ``data`` is hexadecimal. ``function`` is there where a pattern matched
it, ``placed`` (a file offset) where the breakpoint is not at the place that was written,
``items`` where the data describes itself: a list of ``{"type": ..., "value": ...}``. A stack trace has
``"stack_trace": true``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dprobes.record.codec import decode_record
from dprobes.record.items import LogItem, split_items

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord
    from dprobes.record.place import Place

__all__ = ["JsonFormatter"]


class JsonFormatter:
    """Print a record as one line of JSON."""

    def __init__(self, wall_offset: int = 0) -> None:
        self.wall_offset = wall_offset

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""
        line: dict[str, Any] = {
            "major": record.major,
            "minor": record.minor,
            "cpu": record.cpu,
            "pid": record.pid,
            "tid": record.tid,
            "uid": record.uid,
            "name": record.process_name,
            "ip": record.ip,
            "sp": record.sp,
            "time": record.time,
            "module": place.module,
            "symbol": place.symbol,
            "function": place.function or None,
            "placed": place.placed,
            "data": record.data.hex(),
        }
        if record.is_stack_trace:
            line["stack_trace"] = True
        elif (items := split_items(record.data, record.word_size, record.byte_order)) is not None:
            line["items"] = [_item(item) for item in items]
        return json.dumps({key: value for key, value in line.items() if value is not None}, ensure_ascii=False)

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the text of an encoded record."""
        return self(decode_record(record), place)


def _item(item: LogItem) -> dict[str, Any]:
    match item.kind, item.value:
        case "string", bytes() as value:
            return {"type": item.kind, "value": value.decode("utf-8", "backslashreplace")}
        case kind, bytes() as value:
            return {"type": kind, "value": value.hex()}
        case kind, value:
            return {"type": kind, "value": value}
