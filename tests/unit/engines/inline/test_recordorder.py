"""Records of several rings come in the order of their time."""

from __future__ import annotations

from dprobes.engines.inline.recordorder import RecordOrder
from dprobes.record.layout import Item, header_struct

FLAGS = int(Item.MAJOR | Item.MINOR | Item.CPU | Item.TIME | Item.PROCESS_NAME)


def record(time: int) -> bytes:
    return header_struct(FLAGS, "little").pack(FLAGS, 0, 1, 0, time) + b"name\0" + b"log"


def test_what_is_older_comes_first() -> None:
    order = RecordOrder()
    assert order.sorted([(1, record(30)), (2, record(50)), (3, record(20))], 100) == [
        (3, record(20)), (1, record(30)), (2, record(50)),
    ]  # fmt: skip


def test_what_is_younger_than_the_reading_waits_for_what_is_still_to_come() -> None:
    order = RecordOrder()
    assert order.sorted([(1, record(30)), (2, record(50))], 40) == [(1, record(30))]
    assert order.sorted([(3, record(45))], 60) == [(3, record(45)), (2, record(50))]
    assert order.sorted([(4, record(90))], 60) == []
    assert order.sorted([], None) == [(4, record(90))]


def test_records_without_a_time_stay_as_they_come() -> None:
    flags = int(Item.MAJOR | Item.MINOR)
    records = [(n, header_struct(flags, "little").pack(flags, 0, n)) for n in (3, 1, 2)]
    assert RecordOrder().sorted(records, 1) == records
