"""The tool's side of hash tables; what they do is ``native.routines.test_hashtable``'s."""

from __future__ import annotations

import errno
import struct

import pytest

from dprobes.engines.inline.shared_memory import Region, SharedHash
from dprobes.native.generated_code import MapShape
from dprobes.native.routines.shared_hash_table import TableShape


@pytest.fixture
def region() -> Region:
    return Region(1 << 20)


def test_it_is_a_mapping(region: Region) -> None:
    region.place = 0x7000_0000_0000
    table = SharedHash(region, TableShape(12, 20, 10))
    assert table.place.shape is MapShape.HASH
    assert table.place.address >= region.place
    key, value = b"twelve bytes", b"twenty bytes of data"
    with pytest.raises(KeyError):
        table[key]
    assert key not in table
    table[key] = value
    assert key in table
    assert table[key] == value
    assert list(table) == [key]
    assert not table.add(key, bytes(20))
    assert table[key] == value
    assert table.add(b"another one!", bytes(20))
    assert sorted(table) == [b"another one!", key]
    assert table.discard(key)
    assert not table.discard(key)
    assert list(table) == [b"another one!"]


def test_keys_of_zeros_are_listed(region: Region) -> None:
    table = SharedHash(region, TableShape(4, 8, 10))
    keys = {struct.pack("=I", n) for n in range(10)}
    for key in keys:
        table[key] = bytes(8)
    assert set(table) == keys


def test_no_room_is_an_error(region: Region) -> None:
    table = SharedHash(region, TableShape(8, 8, 2))
    table[b"12345678"] = table[b"abcdefgh"] = bytes(8)
    with pytest.raises(OSError, match="Argument list too long") as refused:
        table[b"ABCDEFGH"] = bytes(8)
    assert refused.value.errno == errno.E2BIG
    with pytest.raises(OSError, match="Argument list too long"):
        table.add(b"ABCDEFGH", bytes(8))


def test_whoever_has_the_lock_and_does_not_run_is_no_hang(region: Region) -> None:
    table = SharedHash(region, TableShape(8, 8, 2))
    table[b"12345678"] = b"87654321"
    region.mapping[table.place.address + table.shape.locks] = 1
    with pytest.raises(OSError, match="busy") as refused:
        table.add(b"ABCDEFGH", bytes(8))
    assert refused.value.errno == errno.EBUSY
    with pytest.raises(OSError, match="busy"):
        table.discard(b"12345678")
    assert table[b"12345678"] == b"87654321"


def test_two_tables_do_not_touch_each_other(region: Region) -> None:
    tables = [SharedHash(region, TableShape(8, 8, 30)) for _ in range(3)]
    for n in range(30):
        for number, table in enumerate(tables):
            table[struct.pack("=Q", n)] = struct.pack("=Q", number)
    for number, table in enumerate(tables):
        assert {table[key] for key in table} == {struct.pack("=Q", number)}
        assert len(list(table)) == 30
