"""
Packed records as tables, column by column: what is the same in all rows is repeated, the rest is bytes as they are.

There is a table of packed records if their data is what a template takes whole, or if they have none; for others
records are decoded one by one.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dprobes.formatters.templates.fields import FieldKind
from dprobes.record.items import split_items
from dprobes.record.layout import Item
from dprobes.rpn.isa import Token
from dprobes.sinks.fixedlayout import fixed_layout, fixed_places
from dprobes.tables.placecolumns import clean, place_columns
from dprobes.tables.schema import HEADER_COLUMNS, field_columns, field_type, name_columns, table_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from dprobes.formatters.templates.model import Template
    from dprobes.record.packed import PackedRecords
    from dprobes.tables.namecolumns import NameColumns
    from dprobes.trace.content import TraceProgram

__all__ = ["packed_table"]

_ITEMS = {
    "cpu": Item.CPU, "pid": Item.PID, "tid": Item.TID, "uid": Item.UID, "cs": Item.CS, "ip": Item.IP, "ss": Item.SS,
    "sp": Item.SP, "monotonic": Item.TIME,
}  # fmt: skip
_TIME_MAX = (1 << 63) - 1
_TOKENS = bytes(byte in frozenset(Token) for byte in range(256))
"""For each byte whether an item may begin with it."""


def packed_table(
    records: PackedRecords,
    program: TraceProgram,
    names: NameColumns,
    template: Template | None,
    wall_offset: int,
    lost: Mapping[int, int],
    data: dict[str, pa.Array] | None = None,
) -> pa.Table | None:
    """
    Return the table of records with one major and minor code; ``lost`` says how many were lost before which rows.

    ``data`` are the columns of the data of records that are packed without. None if it has to be made record by record.
    """
    import pyarrow as pa

    if records.shape.flags & Item.CUT:
        return None
    columns = _data_columns(records, template, names) if data is None else data
    times = _times(records, wall_offset)
    if columns is None or times is None:
        return None
    count, shape = len(records), records.shape
    for name, item in _ITEMS.items():
        columns[name] = _numbers(records, shape.place(item), pa.type_for_alias(HEADER_COLUMNS[name]))
    probes = records.probes()
    if isinstance(probes, int):
        places = place_columns(program, program.source.module, [probes])
        columns |= {name: _repeated(column[0], count) for name, column in places.items()}
    else:
        columns |= place_columns(program, program.source.module, probes)
    columns |= names.functions_of_packed(records)
    columns["time"] = times
    columns["process_name"] = _names(records)
    columns["word_size"] = _repeated(pa.scalar(8 if shape.flags & Item.WIDE else 4, pa.uint8()), count)
    columns["byte_order"] = _repeated(pa.scalar(shape.byte_order), count)
    columns["stack_trace"] = _repeated(pa.scalar(bool(shape.flags & Item.STACK_TRACE)), count)
    columns["lost_before"] = _sparse(lost, count)
    if data is None:
        columns["data"] = _binary(records, shape.data, records.row_size - shape.data)
    schema = table_schema(template)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _sparse(values: Mapping[int, int], count: int) -> pa.Array:
    """Return a column with few values."""
    import pyarrow as pa

    parts, end = [], 0
    for row, value in values.items():
        parts += [pa.nulls(row - end, pa.uint64()), pa.array([value], pa.uint64())]
        end = row + 1
    return pa.concat_arrays([*parts, pa.nulls(count - end, pa.uint64())])


def _repeated(value: pa.Scalar, count: int) -> pa.Array:
    import pyarrow as pa

    return pa.repeat(value, count)


def _numbers(records: PackedRecords, place: tuple[int, int] | None, kind: pa.DataType, *, signed: bool = False) -> Any:
    """Return a column of the numbers at some place of the rows; of nothing where there is no place."""
    import pyarrow as pa

    if place is None:
        return pa.nulls(len(records), kind)
    start, size = place
    order = records.shape.byte_order
    if records.is_constant(start, size):
        number = int.from_bytes(records.first[start : start + size], order, signed=signed)
        return _repeated(pa.scalar(number, kind), len(records))
    own = pa.type_for_alias(f"{'' if signed else 'u'}int{8 * size}")
    numbers = pa.Array.from_buffers(own, len(records), [None, pa.py_buffer(records.raw(start, size, order))])
    return numbers if own == kind else numbers.cast(kind)


def _times(records: PackedRecords, wall_offset: int) -> pa.Array | None:
    """Return the column of the time of day; None if there are times that it cannot have."""
    import pyarrow as pa
    import pyarrow.compute as pc

    place = records.shape.place(Item.TIME)
    kind = pa.timestamp("ns")
    if place is None:
        return pa.nulls(len(records), kind)
    monotonic = _numbers(records, place, pa.uint64())
    bounds = pc.min_max(monotonic).as_py()
    if not -_TIME_MAX <= wall_offset <= _TIME_MAX or bounds["max"] > _TIME_MAX:
        return None
    if not (bounds["min"] + wall_offset >= -_TIME_MAX and bounds["max"] + wall_offset <= _TIME_MAX):
        return None
    return pc.add(monotonic.cast(pa.int64()), pa.scalar(wall_offset, pa.int64())).cast(kind)


def _names(records: PackedRecords) -> pa.Array:
    import pyarrow as pa

    names = records.names()
    if names is None:
        return pa.nulls(len(records), pa.string())
    if isinstance(names, bytes):
        (text,) = clean([_decoded(names)])
        return _repeated(pa.scalar(text, pa.string()), len(records))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    shown = pa.array(clean(map(_decoded, numbers)), pa.string())
    return shown.take(pa.array([numbers[name] for name in names], pa.int32()))


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _binary(records: PackedRecords, start: int, size: int) -> pa.Array:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(_offsets(len(records), size)), pa.py_buffer(records.raw(start, size))]
    return pa.Array.from_buffers(pa.binary(), len(records), buffers)


@lru_cache(16)
def _offsets(count: int, size: int) -> array[int]:
    return array("i", range(0, count * size + 1, size) if size else [0] * (count + 1))


# The data


def _data_columns(records: PackedRecords, template: Template | None, named: NameColumns) -> dict[str, pa.Array] | None:
    import pyarrow as pa

    schema = table_schema(template)
    count, shape = len(records), records.shape
    is_trace = bool(shape.flags & Item.STACK_TRACE)
    if template is None:
        items = None if is_trace else _items(records)
        return {"items": pa.nulls(count, schema.field("items").type) if items is None else pa.array(
            items, schema.field("items").type)}  # fmt: skip
    names = [name for name, _ in field_columns(template)]
    others = {name: pa.nulls(count, schema.field(name).type) for name in ("problems", "rest")}
    if is_trace:
        names += [name for name, _ in name_columns(template)]
        return others | {name: pa.nulls(count, schema.field(name).type) for name in names}
    word_size = 8 if shape.flags & Item.WIDE else 4
    layout, places = fixed_layout(template, word_size, shape.byte_order), fixed_places(template, word_size)
    if layout is None or places is None or layout.size != records.row_size - shape.data:
        return None
    for (name, field), (start, size, is_signed) in zip(field_columns(template), places, strict=True):
        if field.kind is FieldKind.CHARACTER:
            return None
        others[name] = _numbers(records, (shape.data + start, size), field_type(field), signed=is_signed)
    return others | named.of_packed(template, records, places)


def _items(records: PackedRecords) -> list[list[dict[str, str]] | None] | None:
    """Return the items of data that describes itself; None if none does."""
    place, size = records.shape.data, records.row_size
    if place == size:
        return None
    plane = records.planes.get(place)
    if plane is None:
        numbers = range(len(records) if _TOKENS[records.first[place]] else 0)
        found = list(numbers)
    else:
        begins = plane.translate(_TOKENS)
        found, at = [], begins.find(1)
        while at >= 0:
            found.append(at)
            at = begins.find(1, at + 1)
    if not found:
        return None
    data, length, order = records.raw(place, size - place), size - place, records.shape.byte_order
    word_size = 8 if records.shape.flags & Item.WIDE else 4
    result: list[list[dict[str, str]] | None] = [None] * len(records)
    for number in found:
        items = split_items(bytes(data[number * length : (number + 1) * length]), word_size, order)
        if items is not None:
            result[number] = [{"type": item.kind, "text": item.text} for item in items]
    return result
