"""Records as a stream of frames: every split, and what is no frame."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.line_frames import DATA_MAX, Frame, FrameDecoder, Garbage, Lost, lost_frame, record_frame
from dprobes.record.log_record import LogRecord, encode_record

NARROW = LogRecord(major=1, minor=2, pid=42, data=b"\r\n\x01\x00", word_size=4, byte_order="big")
WIDE = LogRecord(major=1, minor=2, ip=0x1234, time=5, process_name="sh", tid=7, data=b"\x01\x00\x08\x00\r\n")


def decode(*pieces: bytes) -> list[Frame | Lost | Garbage]:
    decoder = FrameDecoder()
    found = [what for piece in pieces for what in decoder.feed(piece)]
    return [*found, *decoder.finish()]


def test_a_frame_is_as_documented() -> None:
    assert record_frame(encode_record(NARROW)) == bytes.fromhex(
        "0001 0010 00000004  0000000b 00000001 00000002 0000002a  0d0a0100 0d0a"
    )
    assert record_frame(encode_record(LogRecord(minor=3))) == bytes.fromhex(
        "0100 0800 00000000  02080000 03000000  0d0a"
    )
    assert lost_frame(258) == bytes.fromhex("0100 0000 04000000  02010000 0d0a")


RECORDS = st.builds(
    LogRecord,
    major=st.none() | st.integers(0, 0xFFFF_FFFF),
    minor=st.none() | st.integers(0, 0xFFFF_FFFF),
    pid=st.none() | st.integers(0, 0xFFFF_FFFF),
    time=st.none() | st.integers(0, 2**64 - 1),
    process_name=st.none() | st.just("a name"),
    data=st.binary(max_size=40) | st.sampled_from([b"\r\n", b"\x01\x00" * 9, b"\x00\x01\r\n" * 5]),
    word_size=st.sampled_from([4, 8]),
    byte_order=st.sampled_from(["little", "big"]),
    is_stack_trace=st.booleans(),
)


@given(st.lists(RECORDS.map(encode_record) | st.integers(1, 2**32 - 1), max_size=6), st.lists(st.integers(0, 400)))
def test_what_is_sent_is_what_is_decoded_in_any_split(sent: list[bytes | int], cuts: list[int]) -> None:
    stream = b"".join(lost_frame(each) if isinstance(each, int) else record_frame(each) for each in sent)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert decode(*pieces) == [Lost(each) if isinstance(each, int) else Frame(each) for each in sent]


@pytest.mark.parametrize("record", [NARROW, WIDE])
@pytest.mark.parametrize(
    "garbage",
    [
        b"x",
        b"\x01",
        b"\x00",
        b"\x01\x00\x01",
        b"\x01\x00\xff\xff\xff\xff\xff\xff",
        b"\x01\x00\x10\x00\x00\xff\x00\x00",  # would have to wait for 65280 bytes, but has no flag word
        b"login: \r\n",
        b"\x01\x00\x00\x00\x04\x00\x00\x00abcdef",
    ],
)
def test_what_is_no_frame_is_passed_over_and_counted(record: LogRecord, garbage: bytes) -> None:
    frame = record_frame(encode_record(record))
    found = decode(frame + garbage + frame * 2 + garbage)
    good = Frame(encode_record(record))
    assert found == [good, Garbage(len(garbage)), good, good, Garbage(len(garbage))]


@pytest.mark.parametrize("record", [NARROW, WIDE])
def test_whatever_single_byte_is_lost_the_next_frame_is_found(record: LogRecord) -> None:
    frame = record_frame(encode_record(record))
    good = Frame(encode_record(record))
    for lost in range(len(frame)):
        found = decode(frame[:lost] + frame[lost + 1 :] + frame * 3)
        frames = [each for each in found if isinstance(each, Frame)]
        assert frames[-2:] == [good, good]  # at worst the damaged one borrows a byte from the first one behind it
        assert len(frames) >= 2


@given(st.binary(max_size=300))
def test_anything_is_decoded_without_an_error(data: bytes) -> None:
    total = 0
    for what in decode(data):
        match what:
            case Garbage(count):
                total += count
            case Frame(record):
                total += len(record) + 10
            case Lost():
                total += 14
    assert total == len(data)


def test_a_decoder_keeps_no_more_than_a_frame() -> None:
    decoder = FrameDecoder()
    assert list(decoder.feed(b"\x01\x00" * 500_000)) == []
    assert len(decoder._data) <= DATA_MAX + 200
    assert list(decoder.finish()) == [Garbage(1_000_000)]


def test_what_is_no_record_has_no_frame() -> None:
    with pytest.raises(FormatError) as caught:
        record_frame(b"\1\0")
    assert caught.value.message == "a record of 2 bytes has no flag word (at byte 0)"
