"""The paper's text header (seed 000, section 5): its own template, with any of its items left out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.record_options import LOG_ITEMS, log_items_of
from dprobes.formatters import formatter
from dprobes.record.log_record import Item, LogRecord, decode_record, encode_record
from dprobes.record.record_origin import Place

if TYPE_CHECKING:
    from typing import Literal

TEMPLATE = "DProbes(%d,%d) cpu=%d name=%s pid=%d uid=%d cs=%x eip=%08lx ss=%x esp=%08lx tsc=%08lx:%08lx"

SECONDS, MICROSECONDS = 0x3A1B2C3D, 0xABCDE
ITEMS: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "cpu": ({"cpu": 3}, (3,)),
    "name": ({"process_name": "bash"}, ("bash",)),
    "pid": ({"pid": 4711}, (4711,)),
    "uid": ({"uid": 1000}, (1000,)),
    "cs": ({"cs": 0x23, "ip": 0x8048000}, (0x23, 0x8048000)),
    "ss": ({"ss": 0x2B, "sp": 0xBFFFF000}, (0x2B, 0xBFFFF000)),
    "tsc": ({"time": (SECONDS * 10**6 + MICROSECONDS) * 1000 + 999}, (SECONDS, MICROSECONDS)),
}
"""For each item of the template the fields of a record, and what printf is given."""

PLACE = Place("app", "main")


def parts_of(template: str) -> dict[str, str]:
    """Return the items of the template; eip belongs to cs, esp to ss."""
    words = template.replace(" eip=", "\teip=").replace(" esp=", "\tesp=").split(" ")[1:]
    return {word.partition("=")[0]: word.replace("\t", " ") for word in words}


@pytest.mark.parametrize("word_size", [4, 8])
def test_the_header_is_the_papers_with_any_of_its_items(word_size: Literal[4, 8]) -> None:
    template = TEMPLATE
    if word_size == 8:
        template = template.replace("eip=%08lx", "rip=%016lx").replace("esp=%08lx", "rsp=%016lx")
        template = template.replace(" rip=", " eip=").replace(" rsp=", " esp=")
    parts = parts_of(template)
    assert list(parts) == list(ITEMS)
    for count in range(len(ITEMS) + 1):
        for names in itertools.combinations(ITEMS, count):
            fields: dict[str, Any] = {}
            values: tuple[object, ...] = (7, 9)
            expected = "DProbes(%d,%d)"
            for name in names:
                fields |= ITEMS[name][0]
                values += ITEMS[name][1]
                expected += " " + parts[name]
            line = expected % values
            if word_size == 8:
                line = line.replace(" eip=", " rip=").replace(" esp=", " rsp=")
            record = encode_record(LogRecord(major=7, minor=9, word_size=word_size, data=b"\x01\xfe", **fields))
            shown = formatter("hex", wall_offset=0)
            assert shown.encoded(record, PLACE) == shown(decode_record(record), PLACE) == f"{line}\n01 fe"
            assert formatter("dump", wall_offset=0).encoded(record, PLACE).splitlines()[0] == line


def test_each_item_of_the_paper_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda _name: 1)
    always = Item.MAJOR | Item.MINOR
    assert {name: log_items_of([name.lower()], is_tree=True) & ~always for name in LOG_ITEMS} == {
        "PROCNAME": Item.PROCESS_NAME,
        "PID": Item.PID,
        "UID": Item.UID,
        "CSEIP": Item.CS | Item.IP,
        "SSESP": Item.SS | Item.SP,
        "TSC": Item.TIME,
        "TID": Item.TID,
    }
    assert log_items_of([], is_tree=True) == always
    monkeypatch.setattr("os.sysconf", lambda _name: 2)
    assert log_items_of([], is_tree=True) == always | Item.CPU  # always shown where there are several
