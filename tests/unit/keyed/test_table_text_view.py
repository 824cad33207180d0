"""Tables for users of the Python API."""

from __future__ import annotations

from dprobes import KeyedTable
from dprobes.keyed.table_entries import TableStore
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind


def test_what_is_kept_is_a_string_or_frames() -> None:
    names = TableStore(Table("n", TableKind.LAST, (Key(KeyKind.WORD),), value=Key(KeyKind.COMM)))
    names.keep((7).to_bytes(8, "little"), b"bash".ljust(16, b"\0"))
    found = KeyedTable(names.contents())
    assert (found[7,], found.get((8,), ""), list(found.items())) == ("bash", "", [((7,), "bash")])
    assert str(found) == "@n[7]: bash"
    stacks = TableStore(Table("s", TableKind.LAST, value=Key(KeyKind.KERNEL_STACK, 2)))
    stacks.keep(b"", (0x1000).to_bytes(8, "little") * 2)
    assert KeyedTable(stacks.contents())[()] == ("0x1000", "0x1000")


def test_a_table_is_a_mapping_from_keys_to_numbers() -> None:
    store = TableStore(Table("t", TableKind.AVG, (Key(KeyKind.COMM), Key(KeyKind.KERNEL_STACK, 2)), room=2))
    for name in (b"a", b"a", b"b", b"c"):
        store.tally(name.ljust(16, b"\0") + (0x1000).to_bytes(8, "little") + bytes(8), len(store.contents().rows) + 1)
    table = KeyedTable(store.contents())
    assert (table.name, table.kind, table.unit, table.lost, len(table)) == ("t", "avg", "", 1, 2)
    assert dict(table.items()) == {("a", ("0x1000",)): 1, ("b", ("0x1000",)): 2}
    assert ("a", ("0x1000",)) in table
    assert list(table) == [("a", ("0x1000",)), ("b", ("0x1000",))]
    assert table["b", ("0x1000",)] == 2
    assert table.get(("z", ()), -1) == -1
    assert table.details(("a", ("0x1000",))) == {"count": 2, "sum": 3, "average": 1.5}
    assert [row["keys"] for row in table.to_dicts() if "keys" in row] == [["a", ["0x1000"]], ["b", ["0x1000"]]]
    assert str(table).startswith("@t[a, \n    0x1000\n]: 1.5")
    assert repr(table) == "<KeyedTable t: avg, 2 keys>"
