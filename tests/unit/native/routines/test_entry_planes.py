"""The bytes of entries, put together by their places."""

from __future__ import annotations

import ctypes
from random import Random

import pytest

from dprobes.engines.inline.shared_memory import own_function
from dprobes.native.routines.entry_planes import (
    PACKING_SIZE,
    PLACE_SIZE,
    Packing,
    copy_routine,
    difference_routine,
    order_routine,
    places_routine,
    planes_routine,
)
from dprobes.native.routines.entry_walk import LINE_SIZE
from support.ring_entries import entry


def words(*values: int) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * max(1, len(values)))(*values)


def lines(*found: tuple[int, int]) -> ctypes.Array[ctypes.c_uint64]:
    """Return lines with these places and groups."""
    return words(*[word for place, group in found for word in (0, place | group << 32)])


def test_the_places_of_a_group_are_listed_in_the_order_of_the_lines() -> None:
    index, out = lines((64, 0), (0, 1), (32, 0), (96, 2)), (ctypes.c_uint32 * 4)()
    start = ctypes.addressof(index)
    list_places = own_function(places_routine())
    for group, expected in ((0, [64, 32]), (1, [0]), (2, [96]), (3, [])):
        end = list_places(start, start + 4 * LINE_SIZE, group, ctypes.addressof(out))
        assert out[: (end - ctypes.addressof(out)) // PLACE_SIZE] == expected


def test_the_order_is_the_number_of_each_group() -> None:
    index, out = lines((64, 0), (0, 255), (32, 3)), ctypes.create_string_buffer(b"\xaa" * 4, 4)
    own_function(order_routine())(
        ctypes.addressof(index), ctypes.addressof(index) + 3 * LINE_SIZE, ctypes.addressof(out)
    )
    assert out.raw == b"\x00\xff\x03\xaa"


@pytest.mark.parametrize(("count", "size"), [(1, 8), (2, 24), (191, 40), (192, 8), (193, 8), (1000, 16)])
def test_differences_and_planes_are_those_of_all_rows(count: int, size: int) -> None:
    random = Random(count)
    rows = [bytes(random.choice((n, n, n + number % 2)) & 0xFF for n in range(size)) for number in range(count)]
    data = ctypes.create_string_buffer(b"".join(rows), count * size)
    order = random.sample(range(count), count)
    places = (ctypes.c_uint32 * count)(*[number * size for number in order])
    differences, which = words(*[0] * (size // 8)), (ctypes.c_uint32 * 3)(0, size - 1, size // 2)
    out = ctypes.create_string_buffer(b"\xaa" * (3 * count + 1), 3 * count + 1)
    packing = words(*[0] * (PACKING_SIZE // 8))
    for word, value in (
        (Packing.PLACES, ctypes.addressof(places)),
        (Packing.PLACES_END, ctypes.addressof(places) + count * PLACE_SIZE),
        (Packing.BASE, ctypes.addressof(data)),
        (Packing.FIRST, ctypes.addressof(data) + places[0]),
        (Packing.DIFFERENCES, ctypes.addressof(differences)),
        (Packing.DIFFERENCES_END, ctypes.addressof(differences) + size),
        (Packing.WHICH, ctypes.addressof(which)),
        (Packing.WHICH_END, ctypes.addressof(which) + 3 * PLACE_SIZE),
        (Packing.OUT, ctypes.addressof(out)),
        (Packing.COUNT, count),
    ):
        packing[word // 8] = value
    own_function(difference_routine())(ctypes.addressof(packing))
    expected = 0
    for row in rows:
        expected |= int.from_bytes(row, "little") ^ int.from_bytes(rows[order[0]], "little")
    assert bytes(differences)[:size] == expected.to_bytes(size, "little")
    own_function(planes_routine())(ctypes.addressof(packing))
    assert out.raw == b"".join(bytes(rows[n][at] for n in order) for at in which) + b"\xaa"


def test_entries_are_copied_in_the_order_of_the_lines() -> None:
    first, second = entry(1, b"first"), entry(2, b"the second one")
    data = ctypes.create_string_buffer(first + second, len(first + second))
    out = ctypes.create_string_buffer(len(data) + 8)
    index = lines((len(first), 1), (0, 0))
    start, place = ctypes.addressof(index), ctypes.addressof(out)
    end = own_function(copy_routine())(start, start + 2 * LINE_SIZE, ctypes.addressof(data), place)
    assert end - place == len(data)
    assert out.raw == second + first + bytes(8)
    assert own_function(copy_routine())(start, start, ctypes.addressof(data), place) == place
