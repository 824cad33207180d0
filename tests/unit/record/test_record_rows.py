"""Packed records: what comes out is what went in, and columns are those of the decoded records."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.log_record import FIXED_ITEMS, Item, LogRecord, decode_record, encode_record
from dprobes.record.record_origin import Place
from dprobes.record.record_rows import NAME_SPACE, PackedRows
from dprobes.record.record_table import RecordTable, TableBytes, TablePlaces
from support.record_strategies import records

Pairs = list[tuple[int, bytes]]


@st.composite
def alike(draw: st.DrawFn) -> Pairs:
    """Return records of one shape, which may differ in all that a shape allows."""
    model = draw(records())
    found = []
    for _ in range(draw(st.integers(1, 20))):
        changes: dict[str, Any] = {"data": draw(st.binary(min_size=len(model.data), max_size=len(model.data)))}
        for name in ("pid", "minor", "tid"):
            if getattr(model, name) is not None:
                changes[name] = draw(st.integers(0, 300))
        if model.process_name is not None:
            changes["process_name"] = draw(st.sampled_from(["", "a", "cat", "fifteen-letters"]))
        probe = draw(st.sampled_from([0, 1, 255, 256, 70_000]))
        found.append((probe, encode_record(model._replace(**changes))))
    return found


def packed(pairs: Pairs) -> PackedRows:
    found = PackedRows.of_records(pairs)
    assert found is not None
    return found


@given(alike())
def test_records_of_one_shape_come_out_as_they_went_in(pairs: Pairs) -> None:
    found = packed(pairs)
    assert list(found) == pairs
    assert [found.pair(n) for n in range(len(pairs))] == pairs
    assert list(found.encoded()) == list(TableBytes(RecordTable.of_rows(found))) == [record for _, record in pairs]
    assert TableBytes(RecordTable.of_rows(found)).size == sum(len(record) for _, record in pairs)


@given(alike(), st.integers(-25, 25), st.integers(-25, 25))
def test_a_part_of_them_is_that_part(pairs: Pairs, start: int, stop: int) -> None:
    assert list(packed(pairs)[start:stop]) == pairs[start:stop]
    table = RecordTable.of_rows(packed(pairs))
    assert list(TableBytes(table)[start:stop]) == [record for _, record in pairs[start:stop]]


@given(alike(), st.lists(st.integers(1, 19), max_size=3))
def test_parts_are_joined_again(pairs: Pairs, cuts: list[int]) -> None:
    found = packed(pairs)
    ends = sorted({0, *(cut for cut in cuts if cut < len(pairs)), len(pairs)})
    parts = [found[start:end] for start, end in itertools.pairwise(ends)]
    joined = PackedRows.joined(parts)
    assert (list(joined), joined.planes) == (pairs, found.planes)


@given(alike(), st.data())
def test_some_are_chosen(pairs: Pairs, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1))
    assert list(packed(pairs).chosen(wanted)) == [pairs[row] for row in wanted]


@given(alike())
def test_columns_are_the_items_of_the_records(pairs: Pairs) -> None:
    found = packed(pairs)
    decoded = [decode_record(record) for _, record in pairs]

    def spread(column: object) -> list[object]:
        return column if isinstance(column, list) else [column] * len(pairs)

    for item, name in (*FIXED_ITEMS, (Item.TID, "tid")):
        assert spread(found.item(item)) == [getattr(record, name) for record in decoded]
    names = [
        name if name is None else name.decode() for name in spread(found.names()) if isinstance(name, bytes | None)
    ]
    assert names == [record.process_name for record in decoded]
    assert spread(found.probes()) == [probe for probe, _ in pairs]


@given(alike(), st.integers(4, 12))
def test_the_beginnings_are_those_of_all_records(pairs: Pairs, size: int) -> None:
    found = packed(pairs)
    place = found.shape.name
    if (found.row_size if place is None else place) >= size + 4:
        assert found.begins(size) == {record[:size] for _, record in pairs}


def test_places_are_those_of_the_probepoints() -> None:
    table = [Place("app", name) for name in "abc"]
    record = encode_record(LogRecord(1))
    for probes in ([1, 1, 1], [2, 0, 2]):
        places = TablePlaces(RecordTable.of_rows(packed([(probe, record) for probe in probes])), table)
        assert list(places) == [places[n] for n in range(3)] == [table[probe] for probe in probes]
        assert list(places[1:]) == [table[probe] for probe in probes[1:]]
        assert {place.symbol for place in places.distinct()} == {table[probe].symbol for probe in probes}
        assert len(places) == 3


@given(alike())
def test_probepoints_get_other_numbers(pairs: Pairs) -> None:
    assert list(packed(pairs).renumbered(lambda probe: probe ^ 0x101)) == [(probe ^ 0x101, r) for probe, r in pairs]
    same = packed(pairs)
    assert same.renumbered(lambda probe: probe) is same


def test_what_is_the_same_in_all_stands_once() -> None:
    same = encode_record(LogRecord(1, 2, pid=42, process_name="cat", time=1 << 40, data=bytes(16)))
    found = packed([(3, same)] * 100)
    assert found.planes == {}
    found = packed([(3, encode_record(LogRecord(1, 2, time=1000 + n, data=bytes(16)))) for n in range(200)])
    assert len(found.planes) == 1 + (1000 // 256 != 1199 // 256)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, b"abc")],
        [(0, b"\0\x80\0\0rest")],
        [(0, b"\1\0\0\0")],
        [(0, encode_record(LogRecord(1))), (0, encode_record(LogRecord(1, data=b"x")))],
        [(0, encode_record(LogRecord(1))), (0, encode_record(LogRecord(None, 1)))],
        [(0, b"\0\x04\0\0no end of a name")],
    ],
    ids=["no flags", "unknown flags", "no room", "sizes", "flags", "name"],
)
def test_what_is_of_no_shape_is_not_packed(pairs: Pairs) -> None:
    assert PackedRows.of_records(pairs) is None


def test_rows_that_hold_no_records_are_refused() -> None:
    row = bytes(4) + b"\0\x0c\0\0" + b"name".ljust(NAME_SPACE, b"\0")
    assert list(PackedRows(2, row, {})) == [(0, b"\0\x0c\0\0name\0")] * 2
    for first, planes, message in (
        (b"\0" * 7, {}, "a row of records has no flag word"),
        (row[:-1], {}, "a row of records needs 24 bytes, found 23"),
        (row, {5: b"\x0c\x0d"}, "the flag words of packed records differ"),
        (row[:-1] + b"x", {}, "the process name of a record has no end"),
        (row, {23: b"\0x"}, "the process name of a record has no end"),
    ):
        with pytest.raises(FormatError) as caught:
            PackedRows(2, first, planes)
        assert caught.value.message.partition(" (at")[0] == message
