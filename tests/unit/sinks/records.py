"""Records for tests of sinks."""

from __future__ import annotations

from typing import Any

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch

PLACE = Place("app", "main")
SOURCE = RecordSource(1, "app", "app", 1)
OTHER = RecordSource(2, "other", "other", 2)


def record(minor: int, data: bytes = b"\x01\x02", **items: Any) -> bytes:
    return encode_record(LogRecord(major=1, minor=minor, data=data, **items))


def batch(*minors: int, source: RecordSource = SOURCE, lost: int = 0) -> Batch:
    return Batch(source, [record(minor) for minor in minors], [PLACE] * len(minors), 0, lost)
