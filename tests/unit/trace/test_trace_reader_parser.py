"""The parser of trace files: pieces of any size, compressed or not, and bytes that are no trace file."""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.trace.trace_content import Damage, PlaceEntry, RecordBlock
from dprobes.trace.trace_frames import BODY_MAX, FRAME_HEAD, JSON_MAX, FrameKind, compressor, frame, json_frame
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import WALL_OFFSET, Seen, clock, header, lost, places, program, records, seen

if TYPE_CHECKING:
    from dprobes.trace.packed_blocks import Block
    from dprobes.trace.trace_content import LostRecords

compress = compressor("zstd")

FRAMES = [
    program(1, "app", module="/bin/app", build_ids=["ab"], templates={"templates.lst": "1 a.fmt\n"}),
    places(1, ("main", "", None), ("f*", "free", 0x10)),
    records(1, (0, b"one"), (1, b""), (7, b"x" * 300)),
    lost(1, 5),
    program(2, "other"),
    records(2),
    records(2, (3, b"two"), written=2_000),
    clock(WALL_OFFSET + 5),
    frame(200, b"of a later version"),
    places(1, ("late", "", None), first=2),
    records(1, (2, b"three"), written=3_000),
]
PLAIN = header() + b"".join(FRAMES)
COMPRESSED = header() + compress(b"".join(FRAMES[:3])) + FRAMES[3] + compress(b"".join(FRAMES[4:])) + compress(b"")

EXPECTED: list[Seen] = [
    ("app", 0, b"one", WALL_OFFSET + 1_000),
    ("app", 1, b"", WALL_OFFSET + 1_000),
    ("app", 7, b"x" * 300, WALL_OFFSET + 1_000),
    ("app", "lost", 5, WALL_OFFSET + 1_000),
    ("other", 3, b"two", WALL_OFFSET + 2_000),
    ("app", 2, b"three", WALL_OFFSET + 3_005),
]


def parsed(*pieces: bytes) -> list[Block | LostRecords]:
    parser = TraceParser("trace.dpt")
    return [found for piece in pieces for found in parser.feed(piece)]


@pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_all_is_read_and_described(data: bytes) -> None:
    found = parsed(data)
    assert seen(found) == EXPECTED
    app, last = found[0].program, found[-1].program
    assert last is app
    assert (app.source.module, app.source.build_ids) == ("/bin/app", ("ab",))
    assert app.source.templates == {"templates.lst": b"1 a.fmt\n"}
    assert [app.place(n) for n in range(4)] == [
        PlaceEntry("main"), PlaceEntry("f*", "free", 0x10), PlaceEntry("late"),
        PlaceEntry("probepoint 3", is_code=False),
    ]  # fmt: skip
    assert (app.origin.host, app.origin.kernel, app.origin.boot_id, app.origin.part) == ("alpha", "6.1", "b", 0)


@pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_bytes_may_come_one_by_one(data: bytes) -> None:
    assert seen(parsed(*(data[n : n + 1] for n in range(len(data))))) == EXPECTED


@given(st.sampled_from([PLAIN, COMPRESSED]), st.lists(st.integers(0, max(len(PLAIN), len(COMPRESSED))), max_size=20))
def test_however_the_bytes_are_cut_the_records_are_the_same(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert seen(parsed(*(data[a:b] for a, b in itertools.pairwise(edges)))) == EXPECTED


@given(st.integers(0, len(PLAIN)))
def test_a_frame_is_given_as_soon_as_it_is_whole(length: int) -> None:
    parser = TraceParser("trace.dpt")
    found = list(parser.feed(PLAIN[:length]))
    end = len(header())
    whole = [end := end + len(each) for each in FRAMES]
    assert parser.position == max([0, *(n for n in (len(header()), *whole) if n <= length)])
    assert seen(found) == EXPECTED[: len(seen(found))]
    assert seen([*found, *parser.feed(PLAIN[length:])]) == EXPECTED


@given(st.sampled_from([PLAIN, COMPRESSED]), st.integers(1, 10))
def test_who_stops_iterating_gets_the_rest_with_the_next_call(data: bytes, count: int) -> None:
    parser = TraceParser("trace.dpt")
    found: list[Any] = []
    for piece in (data, *[b""] * 10):
        for each in parser.feed(piece):
            found.append(each)
            if len(found) % count == 0:
                break
    assert seen(found) == EXPECTED


def _one_by_one(*frames: bytes) -> list[Seen]:
    """Return what is read if each frame comes when the one before has been taken, so that none are put together."""
    parser = TraceParser("trace.dpt")
    return [each for piece in frames for found in parser.feed(piece) for each in seen([found])]


SMALL = [records(1, (n % 3, bytes([n % 256]) * (n % 50)), written=1_000 + n) for n in range(2_000)]


def test_small_frames_are_put_together() -> None:
    start = [header(), program(1)]
    found = parsed(b"".join([*start, *SMALL]))
    assert len(found) < 5
    assert seen(found) == _one_by_one(*start, *SMALL)
    packed = parsed(b"".join(start) + compress(b"".join(SMALL)))
    assert len(packed) < 5
    assert seen(packed) == seen(found)


def test_what_is_put_together_does_not_become_long() -> None:
    long = [records(1, *[(n, bytes(1_000))] * 12) for n in range(40)]
    found = parsed(b"".join([header(), program(1), *long]))
    sizes = [len(each.body) for each in found if isinstance(each, RecordBlock)]
    assert max(sizes) < 80_000
    assert len(sizes) < len(long) / 2


BETWEEN = st.sampled_from(
    [records(1, (0, b"a"), written=2_000), records(1, (1, b"bc"), (0, b"")), records(1), records(2, (3, b"d")),
     lost(1, 2), clock(WALL_OFFSET + 9), places(1, ("more", "", None)), program(1, "app", module="m"), frame(201, b"?"),
     records(1, (5, bytes(20_000)))]
)  # fmt: skip


@given(st.lists(BETWEEN, max_size=30))
def test_frames_put_together_say_what_each_of_them_says(frames: list[bytes]) -> None:
    start = [header(), program(1, "app"), program(2, "other")]
    assert seen(parsed(b"".join([*start, *frames]))) == _one_by_one(*start, *frames)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (records(9, (0, b"x")), "does not hold what it must: no program has the number 9"),
        (frame(FrameKind.RECORDS, b"\1\0\0\0"), "does not hold what it must: there is no program and time"),
        (frame(FrameKind.RECORDS, struct.pack("<IQII", 1, 5, 0, 4) + b"abc"), "ends in a record"),
        (frame(FrameKind.RECORDS, struct.pack("<IQI", 1, 5, 0)), "ends in the head of a record"),
    ],
    ids=["program", "head", "record", "head of a record"],
)
def test_an_odd_frame_between_small_ones_is_named_by_its_place(odd: bytes, message: str) -> None:
    before = b"".join([header(), program(1), *SMALL[:10]])
    parser = TraceParser("trace.dpt")
    found = parser.feed(before + odd + SMALL[10])
    assert len(seen([next(found)])) == 10
    with pytest.raises(FormatError, match=message) as caught:
        seen(list(found))
    assert caught.value.offset == len(before)


def test_damage_between_small_frames_costs_no_other() -> None:
    damaged: list[Damage] = []
    parser = TraceParser("trace.dpt", damaged.append)
    torn = bytearray(SMALL[5])
    torn[-1] ^= 1
    before = b"".join([header(), program(1), *SMALL[:5]])
    parts = before + bytes(torn) + b"".join(SMALL[6:20])
    found: list[Seen] = []
    with pytest.raises(FormatError):
        found.extend(each for block in parser.feed(parts) for each in seen([block]))
    assert parser.skip(at_end=True)
    found += seen(parser.feed(b""))
    assert found == _one_by_one(header(), program(1), *SMALL[:5], *SMALL[6:20])
    assert [(each.offset, each.size) for each in damaged] == [(len(before), len(torn))]


def test_more_may_be_said_of_a_program() -> None:
    data = header() + program(1, "app") + places(1, ("main", "", None)) + records(1, (0, b"a"))
    first, second = parsed(data + program(1, "app", build_ids=["ab"]) + records(1, (0, b"b")))
    assert first.program is second.program
    assert second.program.source.build_ids == ("ab",)
    assert second.program.place(0) == PlaceEntry("main")


def test_programs_are_announced_anew_behind_each_header() -> None:
    data = header() + program(1, "old") + records(1, (0, b"a")) + header(host="beta") + program(1, "new")
    found = parsed(data + records(1, (0, b"b")))
    assert [(each.program.name, each.program.origin.host) for each in found] == [("old", "alpha"), ("new", "beta")]
    with pytest.raises(FormatError, match=r"does not hold what it must: no program has the number 1 \(at byte \d+\)$"):
        parsed(header() + program(1) + header() + records(1, (0, b"x")))


def _message(data: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        seen(parsed(data))
    return caught.value.message.replace(f"(at byte {len(header())})", "(at HERE)")


HEADER = header()
OTHER_CONTENTS = "a compressed frame of 'trace.dpt' has other contents than it declares (at HERE)"
MUST = "a frame of 'trace.dpt' does not hold what it must: "


def _packed(content: bytes, size: int | None = None) -> bytes:
    data = zstandard.ZstdCompressor().compress(content)
    return frame(FrameKind.COMPRESSED, struct.pack("<I", len(content) if size is None else size) + data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"#!/bin/sh\nexit 0\n", "'trace.dpt' is not a trace file, or is damaged (at byte 0)"),
        (program(), "'trace.dpt' does not begin as a trace file (at byte 0)"),
        (HEADER + b"\0" * 12, "'trace.dpt' is damaged (at HERE)"),
        (HEADER + FRAME_HEAD.pack(BODY_MAX + 1, 4, b"dpt", 0), "'trace.dpt' is damaged (at HERE)"),
        (HEADER + program()[:-1] + b"]", "'trace.dpt' is damaged (at HERE)"),
        (HEADER + frame(2, b"[]"), "a frame of 'trace.dpt' does not hold a JSON object (at HERE)"),
        (HEADER + frame(2, b"{"), "a frame of 'trace.dpt' does not hold a JSON object (at HERE)"),
        (HEADER + frame(2, b"\xff"), "a frame of 'trace.dpt' does not hold a JSON object (at HERE)"),
        (HEADER + frame(2, b"[" * 100_000), "a frame of 'trace.dpt' does not hold a JSON object (at HERE)"),
        (HEADER + frame(2, b"1" * 5_000), "a frame of 'trace.dpt' does not hold a JSON object (at HERE)"),
        (
            HEADER + frame(2, b" " * (JSON_MAX + 1)),
            f"a frame of 'trace.dpt' holds {JSON_MAX + 1} bytes of JSON, at most {JSON_MAX} are allowed (at HERE)",
        ),
        (
            HEADER + frame(2, b'{"id": 1, "name": "a", "major": 1e999, "details": {}}'),
            MUST + "'major' is not a number between 0 and 4294967295 (at HERE)",
        ),
        (
            HEADER + json_frame(2, {"id": True, "name": "a", "major": 1, "details": {}}),
            MUST + "'id' is not a number between 0 and 4294967295 (at HERE)",
        ),
        (
            HEADER + json_frame(2, {"id": 1, "name": 5, "major": 1, "details": {}}),
            MUST + "there is no name, or no details (at HERE)",
        ),
        (
            HEADER + program(1, module=1),
            MUST + "the name of a module is not text (at HERE)",
        ),
        (
            HEADER + program(1, build_ids="abc"),
            MUST + "build-ids are not a list of strings (at HERE)",
        ),
        (
            HEADER + program(1, templates={"a": []}),
            MUST + "templates are not strings (at HERE)",
        ),
        (
            HEADER + program() + json_frame(3, {"id": 1, "first": 1, "places": []}),
            MUST + "'first' is not a number between 0 and 0",
        ),
        (
            HEADER + program() + json_frame(3, {"id": 1, "first": 0, "places": "x"}),
            MUST + "there are no places",
        ),
        (
            HEADER + program() + json_frame(3, {"id": 1, "first": 0, "places": [["a", "b"]]}),
            MUST + "a place is not [where, function, placed, at_return, is_paired, is_code]",
        ),
        (
            HEADER + frame(4, b"\0" * 11),
            MUST + "there is no program and time (at HERE)",
        ),
        (
            HEADER + records(9, (0, b"")),
            MUST + "no program has the number 9 (at HERE)",
        ),
        (
            HEADER + program() + frame(4, struct.pack("<IQI", 1, 0, 0)),
            "a frame of 'trace.dpt' ends in the head of a record",
        ),
        (HEADER + program() + frame(4, struct.pack("<IQII", 1, 0, 0, 1)), "a frame of 'trace.dpt' ends in a record"),
        (
            HEADER + program() + json_frame(5, {"id": 1, "count": -1, "time": 0}),
            MUST + "'count' is not a number between 0 and 9223372036854775807",
        ),
        (
            HEADER + clock(1 << 63),
            MUST + "'wall_offset' is not a number between -9223372036854775808 and 9223372036854775807 (at HERE)",
        ),
        (header(version=1), "'trace.dpt' has version 1 of the trace format, expected 4"),
        (HEADER + frame(7, b"\0"), "a compressed frame of 'trace.dpt' does not say its size (at HERE)"),
        (
            HEADER + _packed(b"", BODY_MAX + 1),
            "a compressed frame of 'trace.dpt' is said to hold 67108865 bytes, at most 67108864 are allowed (at HERE)",
        ),
        (HEADER + frame(7, bytes(4)), OTHER_CONTENTS),
        (HEADER + _packed(program(), 7), OTHER_CONTENTS),
        (
            HEADER + frame(7, _packed(program())[12:] + b"more"),
            OTHER_CONTENTS,
        ),
        (HEADER + _packed(b"not a frame, I fear"), "a compressed frame of 'trace.dpt' holds no frames (at HERE)"),
        (HEADER + _packed(program()[:-1]), "a compressed frame of 'trace.dpt' holds a part of a frame (at HERE)"),
        (
            HEADER + _packed(program() + header()),
            "a compressed frame of 'trace.dpt' holds one that must not be in it (at HERE)",
        ),
        (
            HEADER + _packed(_packed(b"")),
            "a compressed frame of 'trace.dpt' holds one that must not be in it (at HERE)",
        ),
    ],
)  # fmt: skip
def test_each_defect_has_its_message_and_place(data: bytes, message: str) -> None:
    found = _message(data)
    assert found == message or (not message.endswith(")") and found.startswith(f"{message} (at byte "))


def test_a_compressed_frame_that_holds_no_frames_is_skipped() -> None:
    damaged: list[Damage] = []
    parser = TraceParser("trace.dpt", damaged.append)
    before, odd = header() + program(1), _packed(b"no frames at all")
    found = seen(parser.feed(before + odd + records(1, (0, b"behind"))))
    assert [record for _, _, record, _ in found] == [b"behind"]
    problem = f"a compressed frame of 'trace.dpt' holds no frames (at byte {len(before)})"
    assert damaged == [Damage("trace.dpt", len(before), len(odd), problem)]


def test_what_a_bomb_says_of_its_size_decides_before_memory_is_taken() -> None:
    # 1 GiB of zeros in some kilobytes, once without the size, once with it.
    for with_size in (False, True):
        compressing = zstandard.ZstdCompressor(write_content_size=with_size).compressobj(
            **({"size": 1 << 30} if with_size else {})
        )
        bomb = b"".join([compressing.compress(bytes(1 << 20)) for _ in range(1 << 10)]) + compressing.flush()
        for said in (1 << 20, BODY_MAX):
            data = HEADER + frame(FrameKind.COMPRESSED, struct.pack("<I", said) + bomb)
            tracemalloc.start()
            try:
                assert _message(data) == OTHER_CONTENTS
                assert tracemalloc.get_traced_memory()[1] < 16 << 20
            finally:
                tracemalloc.stop()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(FormatError) as caught:
        parsed(COMPRESSED)
    assert caught.value.message == "'trace.dpt' is compressed: reading it needs the Python package zstandard"
    assert caught.value.hint == "pip install 'dprobes[zstd]'"
    assert seen(parsed(PLAIN)) == EXPECTED


KINDS = st.integers(0, 9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
CONTENT = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(3) | JSON, "wall_offset": st.integers() | JSON, "id": st.just(1) | JSON,
        "name": st.text(max_size=3) | JSON, "major": st.integers(0, 5) | JSON, "details": st.just({}) | JSON,
        "first": st.just(0) | JSON, "places": st.just([["a", "b", None]]) | JSON, "count": st.integers() | JSON,
        "time": st.integers() | JSON,
    },
)  # fmt: skip
HOSTILE = st.lists(
    st.builds(json_frame, KINDS, CONTENT)
    | st.builds(frame, KINDS, st.binary(max_size=40))
    | st.builds(lambda body: frame(4, struct.pack("<IQ", 1, 0) + body), st.binary(max_size=60))
    | st.just(program())
    | st.builds(compress, st.just(program()) | st.binary(max_size=20)),
    max_size=5,
)


@given(HOSTILE, st.binary(max_size=5))
def test_sound_frames_with_hostile_content_are_read_or_refused(frames: list[bytes], rest: bytes) -> None:
    parser = TraceParser("trace.dpt")
    try:
        seen(parser.feed(HEADER + b"".join(frames) + rest))
    except FormatError:
        return
    assert parser.position >= len(HEADER)


@given(st.data())
def test_damaged_bytes_give_what_was_written_or_an_error(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from([PLAIN, COMPRESSED])))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        whole[at] = data.draw(st.integers(0, 255))
    found: list[Any] = []
    with contextlib.suppress(FormatError):
        found.extend(TraceParser("trace.dpt").feed(bytes(whole)))
    assert seen(found) == EXPECTED[: len(seen(found))]
