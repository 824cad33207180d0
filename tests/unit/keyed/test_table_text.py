"""Tables as text; what each kind looks like stands in ``cases/tables``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import TableContents, TableRow
from dprobes.keyed.table_text import lost_text, table_lines
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind, Unit

if TYPE_CHECKING:
    from dprobes.keyed.table_layout import Names


class Named:
    """Names 0x1000 to 0x1fff."""

    def inlined_at(self, address: int, pid: int | None) -> tuple[str, ...]:
        return (f"inner of {address:#x} (inlined) [m]",) if address == 0x77 and pid else ()

    def caller_name(self, address: int, pid: int | None) -> str | None:
        return self.name_of(address, pid) and f"call before {self.name_of(address, pid)}"

    def name_of(self, address: int, pid: int | None) -> str | None:
        return f"f+{address - 0x1000:#x} of {pid}" if 0x1000 <= address < 0x2000 else None


NAMES: Names = Named()


def test_only_the_greatest_rows() -> None:
    store = TableStore(Table("n", TableKind.SUM, (Key(KeyKind.WORD),)))
    for number in range(5):
        store.tally(number.to_bytes(8, "little"), 10 * number)
    assert list(table_lines(store.contents(), rows=2)) == [
        "@n: 3 rows with smaller values are not shown",
        "@n[3]: 30",
        "@n[4]: 40",
    ]


def test_frames_are_named_by_their_calls() -> None:
    """A return address belongs to the call before it."""
    store = TableStore(Table("s", TableKind.COUNT, (Key(KeyKind.USER_STACK, 5), Key(KeyKind.ADDRESS))))
    words = (7, 0x1000, 0x1010, 0x78, 0x5000, 2, 0x1020)
    store.tally(b"".join(word.to_bytes(8, "little") for word in words))
    assert list(table_lines(store.contents(), names=NAMES)) == [
        "@s[",
        "    f+0x0 of 7",
        "    call before f+0x10 of 7",
        "    inner of 0x77 (inlined) [m]",
        "    0x78",
        "    0x5000",
        "    [cut: no unwind table]",
        ", f+0x20 of None]: 1",
    ]


def test_what_disturbs_a_terminal_is_not_shown() -> None:
    store = TableStore(Table("s", TableKind.COUNT, (Key(KeyKind.STRING, 8),)))
    store.tally(b"a\x1b[2J\nb".ljust(16, b"\0"))
    assert list(table_lines(store.contents())) == ["@s[a\\x1b[2J\\nb]: 1"]


def test_an_average_has_its_unit() -> None:
    store = TableStore(Table("t", TableKind.AVG, unit=Unit.NANOSECONDS))
    store.tally(b"", 1000)
    store.tally(b"", 2000)
    assert list(table_lines(store.contents())) == ["@t: 1.5 us"]


def test_what_is_kept_is_shown_in_the_order_of_keys() -> None:
    store = TableStore(Table("n", TableKind.LAST, (Key(KeyKind.WORD),), value=Key(KeyKind.STRING, 8)))
    for number, text in ((2, b"a\x1b[2J"), (1, b"z")):
        store.keep(number.to_bytes(8, "little"), text.ljust(16, b"\0"))
    assert list(table_lines(store.contents())) == ["@n[1]: z", "@n[2]: a\\x1b[2J"]
    stacks = TableStore(Table("s", TableKind.LAST, value=Key(KeyKind.FRAMES, 2)))
    stacks.keep(b"", (0x5000).to_bytes(8, "little") + (0x1010).to_bytes(8, "little"))
    assert list(table_lines(stacks.contents(), names=NAMES)) == [
        "@s: ",
        "    0x5000",
        "    call before f+0x10 of None",
        "",
    ]


def test_a_program_s_call_stack_that_is_kept_is_named_by_its_process() -> None:
    store = TableStore(Table("s", TableKind.LAST, value=Key(KeyKind.USER_STACK, 2)))
    store.keep(b"", b"".join(word.to_bytes(8, "little") for word in (7, 0x5000, 0x1010)))
    assert list(table_lines(store.contents(), names=NAMES)) == [
        "@s: ",
        "    0x5000",
        "    call before f+0x10 of 7",
        "",
    ]


def test_why_values_found_no_room_is_said() -> None:
    row = TableRow(bytes(24), (1,))
    table = Table("s", TableKind.COUNT, (Key(KeyKind.USER_STACK, 2),), room=2)
    full = TableContents(table, (row, row), 1)
    assert lost_text(full) == "1 value did not fit: the table has room for 2 keys ('room =')"
    more = (
        "3 values did not fit: call stacks arrived faster than they are followed "
        "(use a condition that fewer hits match, or 'sample'; a larger ring only delays this)"
    )
    assert lost_text(TableContents(table, (row,), 3)) == more


def test_numbers_that_came_back_to_0_are_not_among_the_greatest() -> None:
    store = TableStore(Table("n", TableKind.SUM, (Key(KeyKind.WORD),)))
    for key, number in ((1, 5), (2, 7), (1, -5)):
        store.tally(key.to_bytes(8, "little"), number & (1 << 64) - 1)
    assert list(table_lines(store.contents(), rows=5)) == [
        "@n: 1 row with a smaller value is not shown",
        "@n[2]: 7",
    ]
    assert list(table_lines(store.contents())) == ["@n[1]: 0", "@n[2]: 7"]
