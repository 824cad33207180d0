"""The records of the ptrace engine are those of the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.engines.hits.probe_hits import RecordBuilder
from dprobes.record.log_record import Item, LogRecord, decode_record
from dprobes.vm import Ending, Outcome

if TYPE_CHECKING:
    from dprobes.engines.hits.hit_context import HitContext


class Context:
    def cpu(self) -> int:
        return 1

    def pid(self) -> int:
        return 2

    def uid(self) -> int:
        return 3

    def tid(self) -> int:
        return 4

    def time(self) -> int:
        return 5

    def pointers(self) -> tuple[int, int, int, int]:
        return 0x33, 0x1234, 0x2B, 0x5678

    def process_name(self) -> bytes:
        return b"a-name-of-more-than-15-bytes"


VALUES: dict[Item, dict[str, Any]] = {
    Item.CPU: {"cpu": 1},
    Item.PID: {"pid": 2},
    Item.UID: {"uid": 3},
    Item.TID: {"tid": 4},
    Item.TIME: {"time": 5},
    Item.CS: {"cs": 0x33},
    Item.IP: {"ip": 0x1234},
    Item.SS: {"ss": 0x2B},
    Item.SP: {"sp": 0x5678},
    Item.PROCESS_NAME: {"process_name": "a-name-of-more-"},
}

EVERYTHING = Item(sum(VALUES))


@pytest.mark.parametrize("word_size", [4, 8])
@pytest.mark.parametrize("items", [Item(0), *VALUES, EVERYTHING], ids=str)
def test_a_record_carries_what_was_asked_for(items: Item, word_size: int) -> None:
    builder = RecordBuilder(int(items))
    outcome = Outcome(Ending.EXIT, b"log", b"trace", 10, 20)
    context = cast("HitContext", Context())
    expected: dict[str, Any] = {"word_size": word_size}
    for item, field in VALUES.items():
        if items & item:
            expected |= field
    header = builder.header(context, word_size)
    assert LogRecord(major=10, minor=20, data=b"log", **expected) == decode_record(builder.record(header, outcome))
    trace = LogRecord(major=0, minor=0, data=b"trace", is_stack_trace=True, **expected)
    assert trace == decode_record(builder.stack_trace(header, outcome))


def test_a_record_has_the_byte_order_of_its_target() -> None:
    builder = RecordBuilder(int(EVERYTHING), "big")
    record = builder.record(builder.header(cast("HitContext", Context()), 8), Outcome(Ending.EXIT, b"log", b"", 10, 20))
    decoded = decode_record(record)
    assert (decoded.byte_order, decoded.ip, decoded.tid, decoded.major, decoded.data) == ("big", 0x1234, 4, 10, b"log")
