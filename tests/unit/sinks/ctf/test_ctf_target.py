"""Keyed tables in CTF traces, as babeltrace2 reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import TableContents
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind
from support.babeltrace import NEEDS_BABELTRACE, read_trace
from unit.sinks.ctf.traces import SOURCE, batch, opened

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.sinks.ctf.ctf_trace import Trace

pytestmark = NEEDS_BABELTRACE


def table_lines(directory: Path) -> list[str]:
    lines = [re.sub(r"^\[\S+ \S+ ", "", line) for line in read_trace(directory)]
    return [line for line in lines if line.startswith("table:")]


def test_a_row_is_an_event_with_key_and_value(tmp_path: Path) -> None:
    hits = TableStore(Table("hits", TableKind.COUNT, (Key(KeyKind.STRING, 7), Key(KeyKind.WORD))))
    for text in ("a", "a", ""):
        hits.tally(text.encode().ljust(8, b"\0") + (3).to_bytes(8, "little"))
    stats, hist = TableStore(Table("s", TableKind.STATS)), TableStore(Table("h", TableKind.HIST))
    for value in (2, 3, 9):
        stats.tally(b"", value)
        hist.tally(b"", value)
    lost = TableContents(Table("n", TableKind.COUNT), lost=4)
    kept = TableStore(Table("k", TableKind.LAST, value=Key(KeyKind.STRING, 7)))
    kept.keep(b"", b"bash".ljust(8, b"\0"))
    stack = TableStore(Table("t", TableKind.LAST, value=Key(KeyKind.FRAMES, 2)))
    stack.keep(b"", (0x1000).to_bytes(8, "little") * 2)
    sink = opened(tmp_path)
    sink.log_tables(
        SOURCE, [each.contents() for each in (hits, stats, hist)] + [lost, kept.contents(), stack.contents()]
    )
    assert table_lines(tmp_path) == [
        'table:hits: { }, { key0 = "\\?", key1 = "3", value = 1 }',
        'table:hits: { }, { key0 = "a", key1 = "3", value = 2 }',
        "table:s: { }, { count = 3, sum = 14, min = 2, max = 9 }",
        (
            "table:h: { }, { count = 3, _bucket_lows_length = 2, bucket_lows = [ [0] = 2, [1] = 8 ],"
            " _bucket_counts_length = 2, bucket_counts = [ [0] = 2, [1] = 1 ] }"
        ),
        "table:n: { }, { lost = 4 }",
        'table:k: { }, { value = "bash" }',
        'table:t: { }, { value = "0x1000; 0x1000" }',
    ]


def test_tables_are_in_the_trace_of_the_records_and_come_again(tmp_path: Path) -> None:
    hits = TableStore(Table("hits", TableKind.COUNT))
    sink = opened(tmp_path)
    sink.log_events(batch([5], wall_offset=10**18))
    for _ in range(2):
        hits.tally(b"")
        sink.log_tables(SOURCE, [hits.contents()])
    sink.log_tables(SOURCE, [])
    assert len(list(tmp_path.iterdir())) == 1
    assert table_lines(tmp_path) == ["table:hits: { }, { value = 1 }", "table:hits: { }, { value = 2 }"]


def test_a_trace_that_cannot_be_written_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_trace: Trace, _events: object, _lost: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dprobes.sinks.ctf.ctf_trace.Trace.write", fail)
    hits = TableStore(Table("hits", TableKind.COUNT))
    hits.tally(b"")
    sink = opened(tmp_path)
    with pytest.raises(SinkError) as caught:
        sink.log_tables(SOURCE, [hits.contents()])
    assert caught.value.message == f"'{tmp_path}' cannot be written: no space left on device"
    assert list(tmp_path.iterdir()) == []
