"""Traces for tests, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch
from dprobes.sinks.ctf.ctf_target import CtfSink
from support.babeltrace import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PLACE = Place("/usr/lib/libapp.so", "work")
SOURCE = RecordSource(1, "app", "app", 1)


def batch(times: Sequence[int], *, cpu: int = 0, wall_offset: int = 0, lost: int = 0, data: bytes = b"") -> Batch:
    records = [encode_record(LogRecord(1, 2, cpu, time=time, data=data)) for time in times]
    return Batch(SOURCE, records, [PLACE] * len(records), wall_offset, lost)


def opened(directory: Path) -> CtfSink:
    sink = CtfSink(directory)
    sink.create_event(SOURCE)
    return sink


def times_in(directory: Path) -> list[int]:
    """Return the times of the events in a trace."""
    return [int(line[1 : line.index("]")].replace(".", "")) for line in read_trace(directory)]
