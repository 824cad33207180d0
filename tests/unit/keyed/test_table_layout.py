"""Keys and values in memory."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.keyed.table_layout import (
    Change,
    bucket_of,
    buckets_of,
    changes,
    hist_bucket,
    key_parts,
    lhist_bucket,
    merged,
    quotient,
    row_parts,
    shown_value,
)
from dprobes.rpn.keyed_tables import Key, KeyKind, Range, Table, TableKind
from dprobes.rpn.word_arithmetic import signed

WORDS = st.integers(-(1 << 63), (1 << 63) - 1)
MASK = (1 << 64) - 1


def taken_in(table: Table, values: list[int]) -> list[int]:
    """Return the cells that values leave, as ``changes`` says."""
    cells = [0] * table.value_cells
    for value in values:
        for cell, change, number in changes(table, value):
            match change:
                case Change.ADD:
                    cells[cell] = cells[cell] + number & MASK
                case Change.GREATEST:
                    cells[cell] = max(cells[cell], number)
                case Change.SET:
                    cells[cell] = number
    return cells


@given(WORDS)
def test_a_bucket_holds_its_numbers(number: int) -> None:
    bucket = bucket_of(number)
    low, high = (0, 0) if bucket == 0 else (1 << abs(bucket) - 1, (1 << abs(bucket)) - 1)
    assert low <= abs(number) <= high
    assert (bucket < 0) == (number < 0)
    bounds = buckets_of(Table("h", TableKind.HIST))[hist_bucket(number)]
    assert bounds.low is not None
    assert bounds.high is not None
    assert bounds.low <= number < bounds.high


@given(WORDS, st.integers(-1000, 1000), st.integers(1, 500), st.integers(1, 100))
def test_a_linear_bucket_holds_its_numbers(number: int, low: int, width: int, step: int) -> None:
    bounds = Range(low, low + width, step)
    for each in (number, low + number % (2 * width) - width // 2):
        bucket = buckets_of(Table("l", TableKind.LHIST, range=bounds))[lhist_bucket(each, bounds)]
        assert bucket.low is None or bucket.low <= each
        assert bucket.high is None or each < bucket.high


@given(st.lists(WORDS, min_size=1))
def test_values_are_what_was_taken_in(values: list[int]) -> None:
    """The truth is Python's arithmetic."""
    truth = {
        TableKind.COUNT: len(values),
        TableKind.SUM: signed(sum(values) & MASK, 64),
        TableKind.MIN: min(values),
        TableKind.MAX: max(values),
        TableKind.AVG: quotient(signed(sum(values) & MASK, 64), len(values)),
        TableKind.STATS: len(values),
        TableKind.HIST: len(values),
        TableKind.LAST: values[-1],
    }
    for kind, expected in truth.items():
        table = Table("t", kind)
        assert shown_value(table, taken_in(table, values)) == expected, kind


@given(st.lists(WORDS, min_size=1), st.integers(0, 100))
def test_cells_of_cpus_are_merged_to_those_of_one(values: list[int], split: int) -> None:
    split %= len(values) + 1
    for kind in set(TableKind) - {TableKind.LAST}:
        table = Table("t", kind, range=Range(-5, 5, 3) if kind is TableKind.LHIST else None)
        parts = [taken_in(table, values[:split]), taken_in(table, values[split:])]
        assert list(merged(table, parts)) == taken_in(table, values), kind


@pytest.mark.parametrize(("total", "count", "expected"), [(7, 2, 3), (-7, 2, -3), (0, 0, 0), (6, 3, 2), (-6, 3, -2)])
def test_an_average_is_rounded_towards_zero(total: int, count: int, expected: int) -> None:
    assert quotient(total, count) == expected


def test_parts_of_a_key() -> None:
    keys = (Key(KeyKind.WORD), Key(KeyKind.STRING, 5), Key(KeyKind.COMM), Key(KeyKind.USER_STACK, 2))
    data = struct.pack("=Q8s16sQQQ", (1 << 64) - 1, b"abc", b"bash", 42, 0x1000, 0)
    assert key_parts(keys, data) == ((1 << 64) - 1, b"abc", b"bash", (42, 0x1000))


def test_what_is_kept_is_behind_the_parts_of_the_key() -> None:
    table = Table("t", TableKind.LAST, (Key(KeyKind.WORD),), value=Key(KeyKind.FRAMES, 2))
    assert row_parts(table, (5).to_bytes(8, "little"), [0x1000, 0]) == (5, (0x1000,))
    number = Table("t", TableKind.SUM, (Key(KeyKind.LONG),), value=Key(KeyKind.LONG))
    assert row_parts(number, (1 << 40).to_bytes(8, "little"), [3]) == (1 << 40,)
