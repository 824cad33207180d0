"""Tables of packed records: the same as those that are made record by record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.record.record_table import RecordTable
from dprobes.tables.table_conversion import Piece, pieces_of
from dprobes.trace.packed_blocks import TableBlock
from dprobes.trace.trace_content import LostRecords, PlaceEntry, RecordBlock, TraceProgram
from dprobes.trace.trace_frames import RECORDS_HEAD, records_frame

if TYPE_CHECKING:
    from dprobes.trace.packed_blocks import Block

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

FILES = {
    "templates.lst": b"1 t.fmt",
    "t.fmt": b'major = 1\nminor = 1\nfmt = "fd=%d flags=%dx %+2half=%wd"\nminor = 2\nfmt = "path=%*s"\n'
    b'minor = 3\nfmt = "letter=%bc"\n',
}
SOURCE = RecordSource(1, "app", "lib", 1, (), FILES)
Pairs = list[tuple[int, bytes]]


@st.composite
def blocks(draw: st.DrawFn) -> list[tuple[Pairs, int, int]]:
    """Return some blocks of records of one shape, each with the wall clock's offset and how many were lost before."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        model = LogRecord(
            draw(st.sampled_from([None, 1])), 1, pid=draw(st.none() | st.just(7)), ip=draw(st.none() | st.just(0x1234)),
            time=draw(st.none() | st.sampled_from([0, 10**18, 2**63 - 5, 2**64 - 1])),
            process_name=draw(st.none() | st.just("x")), tid=draw(st.none() | st.just(9)),
            word_size=draw(st.sampled_from([4, 8])), byte_order=draw(st.sampled_from(["little", "big"])),
            is_stack_trace=draw(st.booleans()),
        )  # fmt: skip
        size, minors = draw(st.sampled_from([0, 1, 4, 8, 16])), draw(st.sampled_from([[1], [2], [4], [1, 2, 3, 4]]))
        pairs = []
        for _ in range(draw(st.integers(1, 6))):
            data = draw(st.binary(min_size=size, max_size=size) | st.just(b"\2\1\0a".ljust(size, b"\0")[:size]))
            record = model._replace(minor=draw(st.sampled_from(minors)), data=data)
            if model.process_name is not None:
                record = record._replace(process_name=draw(st.sampled_from(["x", "a\nb", ""])))
            pairs.append((draw(st.integers(0, 2)), encode_record(record)))
        found.append((pairs, draw(st.sampled_from([0, 0, 10**18, -5])), draw(st.sampled_from([0, 0, 3]))))
    return found


def rows_of(found: list[Block | LostRecords]) -> dict[object, list[object]]:
    """Return the rows of all tables, by what the tables are of."""
    import pyarrow as pa

    result: dict[object, list[object]] = {}
    pieces: list[Piece] = list(pieces_of(found))
    for piece in pieces:
        at = piece.rows.schema.get_field_index("time")
        rows = piece.rows.set_column(at, "time", piece.rows["time"].cast(pa.int64())).to_pylist()
        result.setdefault(piece.partition, []).extend(rows)
    return result


@given(blocks())
def test_packed_records_have_the_rows_that_each_of_them_has(found: list[tuple[Pairs, int, int]]) -> None:
    places = [PlaceEntry("main", "", None), PlaceEntry("f*", "first", 16, at_return=True)]
    program = TraceProgram(SOURCE, SOURCE.details(), places)
    packed: list[Block | LostRecords] = []
    plain: list[Block | LostRecords] = []
    for pairs, offset, lost in found:
        records = RecordTable.of_records(pairs)
        assert records is not None
        for blocks, block in (
            (packed, TableBlock(program, records, offset, 5, 0)),
            (plain, RecordBlock(program, records_frame(1, 5, pairs)[12:], RECORDS_HEAD.size, offset, 5, 0)),
        ):
            if lost:
                blocks.append(LostRecords(program, lost, 0))
            blocks.append(block)
    assert rows_of(packed) == rows_of(plain)


def test_mixed_records_are_rows_in_their_order() -> None:
    program = TraceProgram(SOURCE, SOURCE.details(), [PlaceEntry("main", "", None)])
    pairs = [(0, encode_record(LogRecord(1, 4, pid=n, data=bytes(n % 3)))) for n in range(30)]
    records = RecordTable.of_records(pairs)
    assert isinstance(records, RecordTable)
    (rows,) = rows_of([LostRecords(program, 3, 0), TableBlock(program, records, 0, 5, 0)]).values()
    assert [row["pid"] for row in rows if isinstance(row, dict)] == [*range(30)]
    assert [row["lost_before"] for row in rows if isinstance(row, dict)] == [3] + [None] * 29
