"""Trace files in memory, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.trace.trace_content import LostRecords, TraceRecord
from dprobes.trace.trace_frames import VERSION, FrameKind, json_frame, records_frame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.trace.packed_blocks import Block

WALL_OFFSET = 1_700_000_000_000_000_000


def header(**more: Any) -> bytes:
    return json_frame(
        FrameKind.HEADER,
        {"version": VERSION, "host": "alpha", "kernel": "6.1", "boot_id": "b", "wall_offset": WALL_OFFSET, "part": 0}
        | more,
    )


def program(number: int = 1, name: str = "app", **details: Any) -> bytes:
    return json_frame(FrameKind.PROGRAM, {"id": number, "name": name, "major": number, "details": details})


def places(number: int, *entries: tuple[str, str, int | None], first: int = 0) -> bytes:
    return json_frame(FrameKind.PLACES, {"id": number, "first": first, "places": entries})


def records(number: int, *found: tuple[int, bytes], written: int = 1_000) -> bytes:
    return records_frame(number, written, list(found))


def lost(number: int, count: int, time: int = 1_000) -> bytes:
    return json_frame(FrameKind.LOST, {"id": number, "count": count, "time": time})


def clock(wall_offset: int) -> bytes:
    return json_frame(FrameKind.CLOCK, {"wall_offset": wall_offset})


Seen = tuple[str, object, object, object]


def seen(found: Iterable[TraceRecord | Block | LostRecords]) -> list[Seen]:
    """Return the records and notes of lost records read from a trace as tuples of plain values."""
    result: list[Seen] = []
    for each in found:
        if isinstance(each, LostRecords):
            result.append((each.program.name, "lost", each.count, each.wall_time))
        elif isinstance(each, TraceRecord):
            result.append((each.program.name, each.probe, each.record, each.wall_offset + each.written))
        else:
            result += seen(each)
    return result
