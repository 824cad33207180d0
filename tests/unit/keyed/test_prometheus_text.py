"""Tables for Prometheus."""

from __future__ import annotations

from dprobes.keyed.prometheus_text import exposition
from dprobes.keyed.table_entries import TableStore
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind, Unit


def text_of(table: Table, *tallies: tuple[bytes, int]) -> list[str]:
    store = TableStore(table)
    for key, value in tallies:
        store.tally(key, value)
    return exposition([store.contents()]).splitlines()


def test_counts_with_labels() -> None:
    table = Table("hits", TableKind.COUNT, (Key(KeyKind.COMM), Key(KeyKind.STRING, 7)), room=1)
    key = b'a"\\\n'.ljust(16, b"\0") + b"x".ljust(8, b"\0")
    assert text_of(table, (key, 0), (key, 0), (bytes(24), 0)) == [
        "# TYPE dprobes_hits counter",
        'dprobes_hits_total{comm="a\\"\\\\\\n",key1="x"} 2',
        "# TYPE dprobes_hits_lost counter",
        "dprobes_hits_lost_total 1",
    ]


def test_a_histogram_counts_what_is_at_most_so_much() -> None:
    table = Table("took", TableKind.HIST, unit=Unit.NANOSECONDS)
    assert text_of(table, (b"", 1), (b"", 5), (b"", 6), (b"", 1 << 30)) == [
        "# TYPE dprobes_took_seconds histogram",
        'dprobes_took_seconds_bucket{le="1e-09"} 1',
        'dprobes_took_seconds_bucket{le="7e-09"} 3',
        'dprobes_took_seconds_bucket{le="2.147483647"} 4',
        'dprobes_took_seconds_bucket{le="+Inf"} 4',
        "dprobes_took_seconds_count 4",
    ]


def test_statistics_and_single_numbers() -> None:
    assert text_of(Table("s", TableKind.STATS, unit=Unit.BYTES), (b"", 3), (b"", -1)) == [
        "# TYPE dprobes_s_bytes summary",
        "dprobes_s_bytes_count 2",
        "dprobes_s_bytes_sum 2",
        "# TYPE dprobes_s_bytes_min gauge",
        "dprobes_s_bytes_min -1",
        "# TYPE dprobes_s_bytes_max gauge",
        "dprobes_s_bytes_max 3",
    ]
    assert text_of(Table("m", TableKind.MIN, (Key(KeyKind.ADDRESS),)), ((16).to_bytes(8, "little"), 3)) == [
        "# TYPE dprobes_m gauge",
        'dprobes_m{key0="0x10"} 3',
    ]


def test_what_is_kept_is_a_label() -> None:
    store = TableStore(Table("n", TableKind.LAST, (Key(KeyKind.WORD),), value=Key(KeyKind.STRING, 7)))
    store.keep((5).to_bytes(8, "little"), b"bash".ljust(8, b"\0"))
    stacks = TableStore(Table("s", TableKind.LAST, value=Key(KeyKind.FRAMES, 2)))
    stacks.keep(b"", (0x1000).to_bytes(8, "little") + (0x2000).to_bytes(8, "little"))
    assert exposition([store.contents(), stacks.contents()]).splitlines() == [
        "# TYPE dprobes_n gauge",
        'dprobes_n{key0="5",value="bash"} 1',
        "# TYPE dprobes_s gauge",
        'dprobes_s{value="0x2000;0x1000"} 1',
    ]
