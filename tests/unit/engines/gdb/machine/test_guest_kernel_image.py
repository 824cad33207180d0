"""The kernel's compressed symbols, as scripts/kallsyms.c writes them, in both orders."""

from __future__ import annotations

import re
import struct
from random import Random

import pytest

from dprobes.engines.gdb.machine.guest_kernel_image import SearchEffort, end_of, find_tables, listed_symbols

BASE = 0xFFFFFFFF81000000
DIGITS = b"".join(b"%d\0" % digit for digit in range(10))
NAMES = [f"Tsymbol_{number}" for number in range(700)] + ["t" + "a" * 200, "Dlast"]
TOKENS = [chr(code) if 32 < code < 127 else f"unused{code}" for code in range(256)]
TOKENS[1] = "symbol_"


def aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def tables(*, is_new: bool, has_order: bool, per_cpu: bool = False) -> tuple[bytes, list[int]]:
    """Return the tables of ``NAMES`` and their addresses."""
    names, markers = bytearray(), []
    for number, name in enumerate(NAMES):
        if number % 256 == 0:
            markers.append(len(names))
        tokens = name.replace("symbol_", "\1").encode()
        length = len(tokens)
        names += bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
        names += tokens
    table, index = bytearray(), []
    for token in TOKENS:
        index.append(len(table))
        table += token.encode() + b"\0"
    addresses = [BASE + 16 * number for number in range(len(NAMES))]
    offsets = [16 * number for number in range(len(NAMES))]
    if per_cpu:
        addresses[0] = offsets[0] = 0x19168
        offsets[1:] = [-1 - offset for offset in offsets[1:]]
    count = aligned(struct.pack("<I", len(NAMES)))
    place = aligned(struct.pack(f"<{len(offsets)}i", *offsets)) + struct.pack("<Q", BASE)
    order = aligned((bytes(range(1, 256)) * 20)[: 3 * len(NAMES)]) if has_order else b""
    middle = count + aligned(bytes(names)) + aligned(struct.pack(f"<{len(markers)}I", *markers))
    tokens_and_index = aligned(bytes(table)) + aligned(struct.pack("<256H", *index))
    parts = (middle, tokens_and_index, place, order) if is_new else (place, middle, order, tokens_and_index)
    return b"".join(parts), addresses


@pytest.mark.parametrize("per_cpu", [False, True])
@pytest.mark.parametrize(("is_new", "has_order"), [(True, True), (False, False), (False, True)])
def test_symbols_are_listed_as_the_kernel_lists_them(is_new: bool, has_order: bool, per_cpu: bool) -> None:
    data, addresses = tables(is_new=is_new, has_order=has_order, per_cpu=per_cpu)
    data = aligned(bytes(64) + DIGITS) + data + bytes(64)
    found = find_tables(data)
    assert found is not None
    assert found.count == len(NAMES)
    assert not is_new or end_of(found) <= len(data)
    expected = "".join(f"{a:016x} {name[0]} {name[1:]}\n" for a, name in zip(addresses, NAMES, strict=True))
    assert listed_symbols(data, found) == expected.encode()


def test_what_is_incomplete_is_not_found() -> None:
    data, _ = tables(is_new=False, has_order=False)
    assert find_tables(data[:-200]) is None
    assert find_tables(b"") is None


def test_digits_alone_are_no_table() -> None:
    assert find_tables(b"".join(b"%c\0" % code for code in range(1, 128)) + bytes(4096)) is None


def test_without_a_base_there_are_no_addresses() -> None:
    data = bytes(64) + tables(is_new=True, has_order=False)[0]
    found = find_tables(data)
    assert found is not None
    assert listed_symbols(data.replace(struct.pack("<Q", BASE), bytes(8)), found) is None


@pytest.mark.parametrize("is_new", [True, False])
def test_of_damaged_tables_there_is_a_list_of_lines_or_none(is_new: bool) -> None:
    data = aligned(bytes(64) + DIGITS) + tables(is_new=is_new, has_order=False)[0] + bytes(64)
    random, none = Random(7), 0
    for _ in range(300):
        mutated = bytearray(data)
        for _ in range(random.randrange(1, 6)):
            mutated[random.randrange(len(data))] = random.choice((0, 1, 10, 0xFF, random.randrange(256)))
        found = find_tables(mutated)
        listed = None if found is None else listed_symbols(mutated, found)
        none += listed is None
        assert all(re.fullmatch(rb"[0-9a-f]{16} [A-Za-z?] [!-~]+", line) for line in (listed or b"").splitlines())
    assert 0 < none < 300


def test_a_search_that_others_keep_busy_ends() -> None:
    data, _ = tables(is_new=True, has_order=False)
    effort = SearchEffort()
    assert effort.take((1 << 24) - 1)
    assert find_tables(data, 0, effort) is None
