"""Lines come into the order of their time, and those of the same time stay as they were."""

from __future__ import annotations

import ctypes
from random import Random

import pytest

from dprobes.engines.inline.shared_memory import own_function
from dprobes.native.routines.entry_walk import LINE_SIZE, insertion_routine, merge_routine

Line = tuple[int, int]


def array_of(lines: list[Line]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * (2 * len(lines) or 1))(*[word for line in lines for word in line])


def lines_of(array: ctypes.Array[ctypes.c_uint64], count: int) -> list[Line]:
    return [(array[2 * n], array[2 * n + 1]) for n in range(count)]


def by_time(line: Line) -> int:
    return line[0]


@pytest.mark.parametrize("seed", range(40))
def test_insertion_sorts_by_time_and_keeps_the_order_of_others(seed: int) -> None:
    random = Random(seed)
    lines = [(n + random.choice((0, 0, 0, random.randrange(20))), n) for n in range(random.randrange(200))]
    lines += [((1 << 64) - 1, 7), (1 << 63, 8)] * random.randrange(2)  # times have no sign
    array = array_of(lines)
    start = ctypes.addressof(array)
    own_function(insertion_routine())(start, start + LINE_SIZE * len(lines))
    assert lines_of(array, len(lines)) == sorted(lines, key=by_time)


@pytest.mark.parametrize("seed", range(40))
def test_two_runs_become_one_and_the_first_comes_first(seed: int) -> None:
    random = Random(seed)
    first = sorted([(random.randrange(50), n) for n in range(random.randrange(60))], key=by_time)
    second = sorted([(random.randrange(50), 1000 + n) for n in range(random.randrange(60))], key=by_time)
    one, other = array_of(first), array_of(second)
    count = len(first) + len(second)
    out = array_of([(0, 0)] * (count + 1))
    starts = [ctypes.addressof(array) for array in (one, other, out)]
    ends = starts[0] + LINE_SIZE * len(first), starts[1] + LINE_SIZE * len(second)
    own_function(merge_routine())(starts[0], ends[0], starts[1], ends[1], starts[2])
    assert lines_of(out, count) == sorted(first + second, key=by_time)
    assert lines_of(out, count + 1)[-1] == (0, 0)
