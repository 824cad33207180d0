"""Records for Perfetto traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch
from dprobes.sinks.perfetto.perfetto_target import PerfettoSink

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = RecordSource(1, "app", "app", 1)
WALL = 10**18


def opened(path: Path, *sources: RecordSource) -> PerfettoSink:
    sink = PerfettoSink(str(path))
    for source in sources or (SOURCE,):
        sink.create_event(source)
    return sink


def entry(symbol: str, time: int, sp: int | None = None, tid: int | None = 2, **items: Any) -> tuple[bytes, Place]:
    """Return the record of a function's entry, and its place."""
    return _record(time, sp, tid, **items), Place("/lib/app", symbol, is_paired=True)


def leaving(symbol: str, time: int, sp: int | None = None, tid: int | None = 2, **items: Any) -> tuple[bytes, Place]:
    """Return the record of a function's return, and its place."""
    return _record(time, sp, tid, **items), Place("/lib/app", symbol, symbol, at_return=True, is_paired=True)


def _record(time: int, sp: int | None, tid: int | None, **items: Any) -> bytes:
    record = LogRecord(1, 2, pid=1, process_name="app", time=time, sp=sp, tid=tid)
    return encode_record(record._replace(**items))


def batch(*records: tuple[bytes, Place], source: RecordSource = SOURCE, wall: int = WALL, lost: int = 0) -> Batch:
    return Batch(source, [record for record, _ in records], [place for _, place in records], wall, lost)
