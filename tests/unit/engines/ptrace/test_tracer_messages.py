"""Frames between client and tracer: whatever the pieces in which they arrive."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dprobes.engines.ptrace.tracer_messages import (
    RECORD,
    RECORD_FRAME,
    Attach,
    Done,
    FrameReader,
    Kind,
    Placed,
    load_message,
    pack_message,
    unpack_record,
)


def pack_record(program: int, probe: int, record: bytes) -> bytes:
    return RECORD_FRAME.pack(len(record) + RECORD.size, Kind.RECORD, program, probe) + record


NUMBERS = st.integers(0, 0xFFFFFFFF)

MESSAGES = [
    Attach(42, launching=True),
    Placed(42, ((0x1000, 0x55), (0x2000, 0xC3))),
    Done(complete=False, problem="one"),
]


def frames(records: list[tuple[int, int, bytes]]) -> bytes:
    stream = b"".join(pack_message(message) for message in MESSAGES)
    return stream + b"".join(pack_record(program, probe, record) for program, probe, record in records)


@given(
    records=st.lists(st.tuples(NUMBERS, NUMBERS, st.binary(max_size=40)), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=10),
)
def test_a_stream_gives_the_same_frames_however_it_is_cut(
    records: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    stream = frames(records)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reader = FrameReader()
    found = []
    for start, end in itertools.pairwise(places):
        found += list(reader.feed(stream[start:end]))
    assert [load_message(payload) for kind, payload in found if kind is Kind.MESSAGE] == MESSAGES
    assert [unpack_record(payload) for kind, payload in found if kind is Kind.RECORD] == records


def test_an_unfinished_frame_waits() -> None:
    reader = FrameReader()
    frame = pack_record(3, 7, b"data")
    assert list(reader.feed(frame[:-1])) == []
    assert [unpack_record(payload) for _, payload in reader.feed(frame[-1:])] == [(3, 7, b"data")]
