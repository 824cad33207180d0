"""Mixed records: what comes out is what went in, in its order, whatever shapes there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.record.log_record import LogRecord, decode_record, encode_record
from dprobes.record.record_origin import Place
from dprobes.record.record_table import PARTS_MAX, RecordTable, TableBytes, TablePlaces, in_order
from support.record_strategies import records

Pairs = list[tuple[int, bytes]]


@st.composite
def shuffled(draw: st.DrawFn) -> Pairs:
    """Return records of up to five shapes in any order, with process names of any length."""
    models = draw(st.lists(records(), min_size=1, max_size=5))
    found = []
    for _ in range(draw(st.integers(1, 40))):
        record = draw(st.sampled_from(models))
        if record.process_name is not None:
            record = record._replace(process_name=draw(st.sampled_from(["", "cat", "fifteen-letters"])))
        found.append((draw(st.sampled_from([0, 1, 70_000])), encode_record(record)))
    return found


def packed(pairs: Pairs) -> RecordTable:
    found = RecordTable.of_records(pairs)
    assert found is not None
    return found


def of_pids(*pids: int) -> RecordTable:
    """Return records with these pids, the odd ones with more data."""
    found = packed([(0, encode_record(LogRecord(1, 1, pid=pid, data=bytes(pid % 2)))) for pid in pids])
    assert isinstance(found, RecordTable)
    return found


@given(shuffled())
def test_records_come_out_as_they_went_in(pairs: Pairs) -> None:
    found = packed(pairs)
    assert list(found) == pairs
    assert [found[n] for n in range(-len(pairs), len(pairs))] == pairs + pairs
    assert list(found.encoded()) == list(TableBytes(found)) == [record for _, record in pairs]
    assert TableBytes(found).size == sum(len(record) for _, record in pairs)
    probes = found.probes()
    assert (probes if isinstance(probes, list) else [probes] * len(pairs)) == [probe for probe, _ in pairs]
    assert list(found.renumbered(lambda probe: probe + 1)) == [(probe + 1, record) for probe, record in pairs]
    assert sum(map(len, found.parts)) == len(found) == len(pairs)


@given(shuffled(), st.integers(-45, 45), st.integers(-45, 45))
def test_a_part_of_them_is_that_part(pairs: Pairs, start: int, stop: int) -> None:
    part = packed(pairs)[start:stop]
    assert list(part) == pairs[start:stop]
    assert all(part.parts) or not part


@given(st.lists(shuffled(), min_size=1, max_size=4))
def test_what_is_joined_stays_in_order(several: list[Pairs]) -> None:
    (joined,) = RecordTable.joined(packed(pairs) for pairs in several)
    assert list(joined) == [pair for pairs in several for pair in pairs]
    shapes = {(part.shape, part.row_size) for part in joined.parts}
    assert len(shapes) == len(joined.parts)


def test_more_shapes_than_a_byte_can_tell_are_not_one() -> None:
    pairs = [(0, encode_record(LogRecord(1, 1, data=bytes(n)))) for n in range(PARTS_MAX + 1)]
    assert RecordTable.of_records(pairs) is None
    joined = list(RecordTable.joined(packed([pair]) for pair in pairs))
    assert [len(each) for each in joined] == [PARTS_MAX, 1]
    assert [pair for each in joined for pair in each] == pairs


@pytest.mark.parametrize("pairs", [[], [(0, b"abc")], [(0, b"\xff" * 40)], [(0, b"\0\4\0\0name without an end")]])
def test_what_is_no_record_is_not_packed(pairs: Pairs) -> None:
    assert RecordTable.of_records(pairs) is None


def test_places_are_those_of_the_probepoints() -> None:
    table = [Place("app", "a"), Place("app", "b"), Place("app", "c")]
    found = of_pids(1, 2, 3, 4).renumbered(lambda probe: probe + 2)
    places = TablePlaces(found, table)
    assert list(places) == [table[2]] * 4
    assert places.distinct() == [table[2]]
    other = packed([(n % 2, encode_record(LogRecord(1, 1, data=bytes(n % 3)))) for n in range(9)])
    assert list(TablePlaces(other, table)) == [table[n % 2] for n in range(9)]
    assert set(TablePlaces(other, table).distinct()) == set(table[:2])


def test_an_order_that_is_not_that_of_the_parts_is_refused() -> None:
    parts = of_pids(1, 2, 3).parts
    for order in (b"", b"\0\1", b"\0\1\1", b"\0\1\2"):
        with pytest.raises(FormatError) as caught:
            RecordTable(parts, order)
        assert caught.value.message == "the order of mixed records is not that of their parts (at byte 0)"
    with pytest.raises(FormatError) as caught:
        RecordTable([], b"")
    assert caught.value.message == "mixed records have 1 to 256 parts, found 0 (at byte 0)"


def test_a_slice_has_no_step() -> None:
    with pytest.raises(ValueError, match="a slice of mixed records has no step"):
        of_pids(1, 2, 3)[::-1]


def test_columns_of_parts_become_one_in_order() -> None:
    found = of_pids(2, 1, 4, 3)
    pids = [[decode_record(record).pid for record in part.encoded()] for part in found.parts]
    assert pids == [[2, 4], [1, 3]]
    assert list(in_order(found.order, pids)) == [2, 1, 4, 3]
