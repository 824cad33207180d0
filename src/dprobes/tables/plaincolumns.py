"""
Records of various sizes, as those with strings, as tables: their headers as packed records, their data part by part.

There is a table of records whose template takes nothing but strings and numbers, and all of their data; for others
records are decoded one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.formatters.templates.fields import FieldKind
from dprobes.record.layout import Item, header_struct
from dprobes.record.packed import NAME_SPACE, PROBE_SIZE, PackedRecords
from dprobes.sinks.raggedcolumns import RaggedData, steps_of
from dprobes.tables.packedcolumns import packed_table
from dprobes.tables.schema import field_columns, field_type, name_columns, table_schema
from dprobes.trace.columns import PlainRows, rows_of
from dprobes.trace.frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from dprobes.formatters.templates.model import Template
    from dprobes.tables.namecolumns import NameColumns
    from dprobes.trace.content import RecordBlock, TraceProgram

__all__ = ["plain_rows", "plain_table"]


def plain_rows(block: RecordBlock) -> list[PlainRows] | None:
    """Return the rows of a block; None if one of its records is none."""
    try:
        rows = [each for each in rows_of(block) if isinstance(each, PlainRows)]
        for each in rows:
            each.data_bounds()
    except FormatError:
        return None
    return rows


def plain_table(
    rows: PlainRows,
    wanted: Sequence[int],
    program: TraceProgram,
    names: NameColumns,
    template: Template | None,
    lost: Mapping[int, int],
) -> pa.Table | None:
    """
    Return the table of the records ``wanted``, which have one major and minor code; ``lost`` as in ``packed_table``.

    None if it has to be made record by record.
    """
    import pyarrow as pa

    if template is None or name_columns(template) or rows.flags & (Item.STACK_TRACE | Item.CUT):
        return None
    steps = steps_of(template, rows.word_size)
    described = field_columns(template)
    if steps is None or any(field.kind is FieldKind.CHARACTER for _, field in described):
        return None
    ragged = RaggedData(rows, lambda _: None)
    found = ragged.fields(steps, wanted)
    if found is None:
        return None
    columns: dict[str, Any] = {
        name: pa.array(values, field_type(field)) for (name, field), values in zip(described, found, strict=True)
    }
    schema = table_schema(template)
    columns |= {name: pa.nulls(len(wanted), schema.field(name).type) for name in ("problems", "rest")}
    body = ragged.body
    columns["data"] = pa.array([body[ragged.starts[row] : ragged.ends[row]] for row in wanted], pa.binary())
    return packed_table(_headers(rows, ragged, wanted), program, names, template, rows.block.wall_offset, lost, columns)


def _headers(rows: PlainRows, ragged: RaggedData, wanted: Sequence[int]) -> PackedRecords:
    """Return the records as packed ones without data."""
    body, tid = ragged.body, 4 if rows.flags & Item.TID else 0
    heads = [(rows.start(row), ragged.starts[row]) for row in wanted]
    size = RECORD_HEAD.size
    if rows.flags & Item.PROCESS_NAME:
        fixed = header_struct(rows.flags, rows.byte_order).size
        parts = [
            body[start : start + PROBE_SIZE]
            + body[start + size : start + size + fixed]
            + body[start + size + fixed : end - tid].ljust(NAME_SPACE, b"\0")
            + body[end - tid : end]
            for start, end in heads
        ]
    else:
        parts = [body[start : start + PROBE_SIZE] + body[start + size : end] for start, end in heads]
    stride = len(parts[0])
    return PackedRecords.of_table(b"".join(parts), stride, range(stride))
