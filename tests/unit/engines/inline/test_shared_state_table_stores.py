"""Tables in shared memory do what tables of the interpreter do, and lose nothing that others put into them."""

from __future__ import annotations

import ctypes
import os
import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import TableChange
from dprobes.engines.inline.shared_memory import Region, SharedHash
from dprobes.engines.inline.shared_state import SharedStore, SharedTables
from dprobes.keyed.prometheus_text import exposition
from dprobes.keyed.table_codec import decode_tables, encode_tables
from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import TableContents
from dprobes.keyed.table_text import table_json_lines, table_lines
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.keyed_tables import Table

KINDS = ["count", "sum", "min", "max", "avg", "stats", "hist", "lhist(0, 100, 10)", "last"]


def tables_of(*lines: str) -> tuple[Table, ...]:
    text = "name = x\n" + "".join(f"table = {line}\n" for line in lines) + "offset = 0\nexit\n"
    return parse_source(SourceFile("a.rpn", text), Diagnostics(), CompileOptions()).tables


def stores_of(tables: tuple[Table, ...]) -> list[SharedStore]:
    maps = SharedTables(tables, Region(1 << 20))
    return [SharedStore(table, number, maps) for number, table in enumerate(tables)]


def sorted_contents(contents: TableContents) -> tuple[object, ...]:
    return contents.table, sorted(contents.rows), contents.lost


@pytest.mark.parametrize("forged", [1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize(
    ("kind", "cell"), [("count", 0), ("avg", 0), ("stats", 0), ("hist", 70), ("lhist(0, 100, 10)", 3)]
)
def test_what_no_hits_can_have_counted_is_left_out(kind: str, cell: int, forged: int) -> None:
    """A process of another user writes what it likes where its handlers count."""
    tables = tables_of(f"t, {kind}, word, room = 16")
    maps = SharedTables(tables, Region(1 << 20))
    store = SharedStore(tables[0], 0, maps)
    mine, other = struct.pack("=Q", 1), struct.pack("=Q", 2)
    for key in (mine, other):
        store.tally(key, 1)
    assert {mine, other} == {row.key for row in maps.contents()[0].rows}
    address = store._made(mine)
    ctypes.c_uint64.from_address(address + 8 * cell).value = forged
    assert [row.key for row in maps.contents()[0].rows] == [other]
    assert [row.key for row in store.contents().rows] == [other]
    assert maps.refused == {0: 1}


@pytest.mark.parametrize("keys", ["", ", word, room = 16", ", word, address, room = 16"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_do_what_the_interpreters_do(kind: str, keys: str) -> None:
    random = Random(len(kind) * 100 + len(keys))
    tables = tables_of("other, count, word, room = 4", f"t, {kind}{keys}")
    _, store = stores_of(tables)
    expected = TableStore(tables[1])
    size = tables[1].key_size // 8
    for _ in range(600):
        key = struct.pack(f"={size}Q", *[random.randrange(5) for _ in range(size)])
        match random.randrange(8):
            case 0:
                store.delete(key)
                expected.delete(key)
            case 1:
                assert store.value(key) == expected.value(key)
            case _:
                number = random.choice((random.randrange(-5, 120), random.getrandbits(64) - (1 << 63)))
                store.tally(key, number)
                expected.tally(key, number)
    assert sorted_contents(store.contents()) == sorted_contents(expected.contents())
    store.clear()
    assert store.contents().rows == ()


def test_what_finds_no_room_is_counted() -> None:
    (table,) = tables_of("t, count, word, room = 4")
    (store,) = stores_of((table,))
    for n in range(7):
        store.tally(struct.pack("=Q", n))
    assert (len(store.contents().rows), store.contents().lost) == (table.room, 7 - table.room)
    store.clear()
    assert store.contents() == TableContents(table)


def test_what_is_kept_is_what_was_kept_last() -> None:
    (table,) = tables_of("names, last, word, room = 2, value = str[11]")
    (store,) = stores_of((table,))
    expected = TableStore(table)
    for key, text in ((1, b"one"), (2, b"a longer one"[:11]), (1, b"once more"), (3, b"no room")):
        for each in (store, expected):
            each.keep(struct.pack("=Q", key), text.ljust(16, b"\0"))
    for key in range(5):
        assert store.kept(struct.pack("=Q", key)) == expected.kept(struct.pack("=Q", key))
    assert sorted_contents(store.contents()) == sorted_contents(expected.contents())


def test_no_number_of_others_is_lost() -> None:
    tables = tables_of("t, stats, word, room = 64", "most, max")
    stores = stores_of(tables)
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            for n in range(4000):
                stores[0].tally(struct.pack("=Q", n % 40), n)
                stores[1].tally(b"", 3 * n + number)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert stores[1].value(b"") == 3 * 3999 + 2
    assert sum(stores[0].value(struct.pack("=Q", n)) for n in range(40)) == 12_000
    assert stores[0].contents().lost == 0


WORDS = (0, 1, 6, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)
KEYS = ("", ", word", ", str[16]", ", bytes[8], word", ", ustack[4]", ", comm, slong")


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_was_written_over_can_be_shown_and_changed(kind: str, keys: str) -> None:
    random = Random(len(kind) * 100 + len(keys))
    (table,) = tables_of(f"t, {kind}{keys}{', room = 8' if keys else ''}")
    region = Region(1 << 16)
    maps = SharedTables([table], region)
    store = SharedStore(table, 0, maps)
    words = memoryview(region.mapping).cast("Q")
    for _ in range(30):
        for number in range(len(words)):
            # A lock that somebody has for ever is waited for: that is another test.
            words[number] = random.choice(WORDS) if random.random() < 0.7 else random.getrandbits(64)
        for part in maps.maps.values():
            if isinstance(part, SharedHash):
                for place in part.locks:
                    words[place // 8] = 0
        contents = maps.contents()
        assert all(len(row.key) == table.key_size for row in contents[0].rows)
        for shown in (table_lines(contents[0]), table_json_lines(contents[0])):
            assert all(isinstance(line, str) for line in shown)
        assert isinstance(exposition(contents), str)
        decode_tables(encode_tables(contents))
        key = random.randbytes(table.key_size)
        store.tally(key, random.getrandbits(63))
        store.value(key)
        maps.change(TableChange(0, key, 3))
        maps.change(TableChange(0, key, None))
    words.release()


def test_a_lock_that_is_never_given_back_costs_what_it_is_for_and_no_more() -> None:
    (table,) = tables_of("t, count, word, room = 8")
    region = Region(1 << 16)
    maps = SharedTables([table], region)
    store = SharedStore(table, 0, maps)
    store.tally(bytes(8))
    (part,) = (part for part in maps.maps.values() if isinstance(part, SharedHash))
    for place in part.locks:
        region.mapping[place] = 1
    for change in (TableChange(0, b"k" * 8, 1), TableChange(0, bytes(8), None), TableChange(0, None)):
        maps.change(change)
    assert maps.contents()[0].lost == 3
    for number in range(2000):  # which would take a minute if each of them waited
        store.tally(number.to_bytes(8, "big"))
    assert maps.contents()[0].lost == 2002
    for place in part.locks:
        region.mapping[place] = 0
    store.tally(b"k" * 8)
    assert {row.key for row in maps.contents()[0].rows} == {bytes(8), b"k" * 8}
