"""What is written together: as it came, and packed where that is worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_table import RecordTable
from dprobes.trace.packed_blocks import joined, packed, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def of_sizes(*sizes: int) -> list[tuple[int, bytes]]:
    return [(n % 3, encode_record(LogRecord(1, n % 7, data=bytes(size)))) for n, size in enumerate(sizes)]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([0, 1, 8, 2000]), max_size=60))))
def test_what_is_joined_stays_in_order(parts: list[tuple[bool, list[int]]]) -> None:
    given_parts: list[Sequence[tuple[int, bytes]]] = []
    expected: list[tuple[int, bytes]] = []
    for is_packed, sizes in parts:
        found = of_sizes(*sizes)
        expected += found
        if found:
            given_parts.append(RecordTable.of_records(found) or found if is_packed else found)
    result = list(joined(given_parts))
    assert [pair for part in result for pair in part] == expected
    assert len(result) <= 2 * len(parts)


def test_what_is_of_one_shape_is_packed_and_of_few_shapes_mixed() -> None:
    for sizes in ([8], [8, 16, 4]):
        found = packed(of_sizes(*sizes * 16))
        assert isinstance(found, RecordTable)
        assert len(found.parts) == len(sizes)
    for few in (of_sizes(*[8] * 15), of_sizes(*[8, 16] * 15), of_sizes(*range(100)), of_sizes(*[8] * 50, 2000)):
        assert packed(few) is few


def test_parts_of_one_shape_and_of_several_become_one() -> None:
    first, second = of_sizes(*[8] * 50), of_sizes(*[4, 8] * 50)
    one = RecordTable.of_records(first)
    assert one is not None
    (found,) = joined([one, second, first])
    assert isinstance(found, RecordTable)
    assert sorted(map(len, found.parts)) == [50, 150]
    assert list(found) == first + second + first


def test_what_is_too_long_or_of_too_many_shapes_stays_as_it_is() -> None:
    long, many, few = of_sizes(*[2000] * 20), of_sizes(*range(200)), of_sizes(*[8] * 20)
    result = list(joined([RecordTable.of_records(few) or few, long]))
    assert [type(each) for each in result] == [RecordTable, list]
    (found,) = joined([many])
    assert found == many


def test_sizes_are_those_of_rows_or_records() -> None:
    found = of_sizes(*[8, 4] * 20)
    assert size_of(found) == sum(len(record) for _, record in found)
    assert size_of(packed(found)) == size_of(found) + 4 * len(found)
    assert size_of(packed(found[::2])) == size_of(found[::2]) + 4 * 20
