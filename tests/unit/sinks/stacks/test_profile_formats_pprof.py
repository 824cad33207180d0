"""Profiles for pprof, read by a decoder of the test's own."""

from __future__ import annotations

import gzip
from collections import defaultdict

from dprobes.sinks.stacks.profile_formats import pprof_of
from dprobes.sinks.stacks.stack_profile import StackProfile


def varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Return the fields of a message by their numbers."""
    found: dict[int, list[int | bytes]] = defaultdict(list)
    position = 0
    while position < len(data):
        key, position = varint(data, position)
        value, position = varint(data, position)
        if key & 7 == 0:
            found[key >> 3].append(value)
        else:
            assert key & 7 == 2
            found[key >> 3].append(data[position : position + value])
            position += value
    return found


def packed(data: int | bytes) -> list[int]:
    assert isinstance(data, bytes)
    numbers, position = [], 0
    while position < len(data):
        number, position = varint(data, position)
        numbers.append(number)
    return numbers


def message(data: int | bytes) -> dict[int, list[int | bytes]]:
    assert isinstance(data, bytes)
    return fields(data)


def test_samples_name_their_functions_from_the_inside() -> None:
    weights = {("py", "main", "f"): 300, ("py", "main"): 7}
    profile = fields(gzip.decompress(pprof_of(StackProfile(weights, "nanoseconds"))))
    strings = [text.decode() for text in profile[6] if isinstance(text, bytes)]
    assert strings[0] == ""
    kind = message(profile[1][0])
    assert [strings[int(kind[n][0])] for n in (1, 2)] == ["nanoseconds", "nanoseconds"]
    names = {int(f[1][0]): strings[int(f[2][0])] for f in map(message, profile[5])}
    functions = {int(each[1][0]): int(message(each[4][0])[1][0]) for each in map(message, profile[4])}
    found = {}
    for sample in map(message, profile[2]):
        stack = tuple(names[functions[number]] for number in packed(sample[1][0]))
        (found[stack[::-1]],) = packed(sample[2][0])
    assert found == weights


def test_the_same_profile_has_the_same_bytes() -> None:
    assert pprof_of(StackProfile({("a",): 1})) == pprof_of(StackProfile({("a",): 1}))
