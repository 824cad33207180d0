"""
Conversion of records to Arrow tables, column by column. A value that all rows share is repeated, others are copied.

The headers of adjacent records are packed first. Data are copied as bytes if a template has its fields at fixed
offsets. If a template consists of strings and numbers only, it is processed part by part, each part for all records.
All other data are decoded record by record.
"""

from __future__ import annotations

from array import array
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped
from dprobes.formatters.address_fields import code_names, function_of
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.templates.data_columns import RaggedData, fixed_places, steps_of
from dprobes.formatters.templates.data_extraction import Fault, FieldKind, decode_fields
from dprobes.formatters.templates.template_model import character
from dprobes.record.log_record import ITEM_TOKENS, UNSEEN, Item, decode_record, split_items
from dprobes.record.record_rows import PackedRows, repeated
from dprobes.tables.table_schema import HEADER_COLUMNS, field_columns, field_type, name_columns, name_type, table_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

    from dprobes.formatters.templates.data_extraction import Decoded, Field
    from dprobes.formatters.templates.template_model import Template, Value
    from dprobes.record.log_record import LogItem, LogRecord
    from dprobes.record.record_origin import Place
    from dprobes.record.record_rows import Rows
    from dprobes.trace.trace_content import TraceProgram

__all__ = ["NameColumns", "clean", "rows_table", "sparse"]

_UNSIGNED_MAX = (1 << 64) - 1
_TIME_MAX = (1 << 63) - 1

_ITEMS = {
    "cpu": Item.CPU, "pid": Item.PID, "tid": Item.TID, "uid": Item.UID, "cs": Item.CS, "ip": Item.IP, "ss": Item.SS,
    "sp": Item.SP, "monotonic": Item.TIME,
}  # fmt: skip

_PLACE_COLUMNS = ("module", "symbol", "function", "placed", "at_return")


def rows_table(rows: Rows, names: NameColumns, template: Template | None, wall_offset: int) -> pa.Table:
    """
    Return the table of records that all have the same major and minor code, and so one ``template`` or None.

    ``wall_offset`` converts times to nanoseconds since 1970.
    """
    import pyarrow as pa

    headers = rows.headers()
    count, shape, program = len(headers), headers.shape, names.program
    columns: dict[str, Any] = {
        name: _numbers(headers, shape.place(item), pa.type_for_alias(HEADER_COLUMNS[name]))
        for name, item in _ITEMS.items()
    }
    columns |= _place_columns(program, headers)
    columns |= names.functions(headers)
    columns["time"] = _times(headers, wall_offset)
    columns["process_name"] = _names(headers)
    columns["word_size"] = pa.repeat(pa.scalar(shape.word_size, pa.uint8()), count)
    columns["byte_order"] = pa.repeat(pa.scalar(shape.byte_order), count)
    columns["stack_trace"] = pa.repeat(pa.scalar(bool(shape.flags & Item.STACK_TRACE)), count)
    columns["lost_before"] = pa.nulls(count, pa.uint64())
    columns["data"] = _binary(rows)
    columns |= _item_columns(rows) if template is None else _field_columns(rows, template, names, headers)
    schema = table_schema(template)
    empty = {field.name: pa.nulls(count, field.type) for field in schema if field.name not in columns}
    columns |= empty
    return pa.table([columns[name] for name in schema.names], schema=schema)


# The columns of the header


def _place_columns(program: TraceProgram, rows: PackedRows) -> dict[str, pa.Array]:
    """Return the columns that describe the probepoint of each record, by name. Each probepoint is looked up once."""
    import pyarrow as pa

    probes, spread = _distinct(rows.probes(), len(rows))
    places = [program.place(probe) for probe in probes]
    values: list[list[Any]] = [
        clean([program.source.module] * len(places)),
        clean([place.where or None for place in places]),
        clean([place.routine or None for place in places]),
        [place.placed if place.placed is not None and 0 <= place.placed <= _UNSIGNED_MAX else None for place in places],
        [place.at_return for place in places],
    ]
    return {
        name: spread(pa.array(shown, pa.type_for_alias(HEADER_COLUMNS[name])))
        for name, shown in zip(_PLACE_COLUMNS, values, strict=True)
    }


def _distinct(keys: Any, count: int) -> tuple[dict[Any, int], Callable[[pa.Array], pa.Array]]:
    """
    Return the distinct values in a column, and a function that maps an array of these to all ``count`` rows.

    The first result maps each value to its first row. The function takes an array with one element for each distinct
    value, and returns one with an element for each row.
    """
    import pyarrow as pa

    if not isinstance(keys, list):
        return {keys: 0}, lambda values: pa.repeat(values[0], count)
    rows: dict[Any, int] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, row)
    numbers = {key: number for number, key in enumerate(rows)}
    indices = pa.array([numbers[key] for key in keys], pa.int32())
    return rows, lambda values: values.take(indices)


def clean(strings: Iterable[str | None]) -> list[str | None]:
    """Return strings with unprintable characters escaped, as in all output formats. None is unchanged."""
    return [None if text is None else escaped(text) for text in strings]


def sparse(values: Mapping[int, int], count: int) -> pa.Array:
    """Return a column of ``count`` rows from its few values that are not null, keyed by row."""
    import pyarrow as pa

    parts, end = [], 0
    for row, value in values.items():
        parts += [pa.nulls(row - end, pa.uint64()), pa.array([value], pa.uint64())]
        end = row + 1
    return pa.concat_arrays([*parts, pa.nulls(count - end, pa.uint64())])


def _numbers(rows: PackedRows, place: tuple[int, int] | None, kind: pa.DataType, *, signed: bool = False) -> Any:
    """
    Return a column of numbers. ``place`` is their offset and size in bytes in the rows; if it is None, all are null.

    ``kind`` is the type of the column. With ``signed``, the numbers are in two's complement.
    """
    import pyarrow as pa

    if place is None:
        return pa.nulls(len(rows), kind)
    start, size = place
    order = rows.shape.byte_order
    if rows.is_constant(start, size):
        number = int.from_bytes(rows.first[start : start + size], order, signed=signed)
        return pa.repeat(pa.scalar(number, kind), len(rows))
    own = pa.type_for_alias(f"{'' if signed else 'u'}int{8 * size}")
    numbers = pa.Array.from_buffers(own, len(rows), [None, pa.py_buffer(rows.raw(start, size, order))])
    return numbers if own == kind else numbers.cast(kind)


def _times(rows: PackedRows, wall_offset: int) -> pa.Array:
    """Return the column of wall-clock times. Times outside the range of the type are null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    place = rows.shape.place(Item.TIME)
    kind = pa.timestamp("ns")
    if place is None:
        return pa.nulls(len(rows), kind)
    monotonic = _numbers(rows, place, pa.uint64())
    bounds = pc.min_max(monotonic).as_py()
    least, most = bounds["min"] + wall_offset, bounds["max"] + wall_offset
    if max(bounds["max"], abs(wall_offset)) <= _TIME_MAX and least >= -_TIME_MAX and most <= _TIME_MAX:
        return pc.add(monotonic.cast(pa.int64()), pa.scalar(wall_offset, pa.int64())).cast(kind)
    times = [time + wall_offset for time in monotonic.to_pylist()]
    return pa.array([time if -_TIME_MAX <= time <= _TIME_MAX else None for time in times], kind)


def _names(rows: PackedRows) -> pa.Array:
    import pyarrow as pa

    names, spread = _distinct(rows.strings(), len(rows))
    return spread(pa.array(clean(names), pa.string()))


# The names of addresses that templates print by name, and the functions where samples and accesses hit. They come from
# the trace file of the records, or from processes of this machine that are still running.


class NameColumns:
    """The columns of names for the records of a program in a trace file."""

    def __init__(self, program: TraceProgram) -> None:
        self.program = program
        self._symboliser = AddressSymboliser(program.source, live=program.may_run, carried=program.names)

    def of_fields(
        self, template: Template, rows: PackedRows, values: Sequence[Sequence[Value] | Value]
    ) -> dict[str, pa.Array]:
        """Return the columns of names for a template's address fields. ``values`` has the columns of all its fields."""

        def shown(record: LogRecord, place: Place, value: Value, *, is_stack: bool) -> str | list[str | None] | None:
            names = code_names(value, record, place, self._symboliser, is_stack=is_stack)
            return clean(names) if isinstance(names, tuple) else clean([names])[0]

        return {
            name: self._named(rows, values[each.position], partial(shown, is_stack=each.is_stack), name_type(each))
            for name, each in name_columns(template)
        }

    def functions(self, rows: PackedRows) -> dict[str, pa.Array]:
        """Return the column of functions by its name if the function may differ by hit, otherwise an empty mapping."""
        import pyarrow as pa

        addresses = rows.item(Item.IP)
        if addresses is None or all(self.program.place(probe).routine for probe in rows.probe_set()):
            return {}

        def function(record: LogRecord, place: Place, _: Value) -> str | None:
            return clean([function_of(record, place, self._symboliser) or None])[0]

        return {"function": self._named(rows, addresses, function, pa.string())}

    def _named(
        self,
        rows: PackedRows,
        values: Sequence[Value] | Value,
        name: Callable[[LogRecord, Place, Value], str | list[str | None] | None],
        kind: pa.DataType,
    ) -> pa.Array:
        """
        Return the column with the results of ``name``, which is called once for records with equal process and value.

        ``name`` gets a decoded record, its probepoint and the element of ``values``. ``kind`` is the type of its
        results.
        """
        import pyarrow as pa

        columns = [values, rows.probes(), rows.item(Item.PID), rows.names()]
        if self.program.names.has_changes:
            columns.append(rows.item(Item.TIME))
        keys: Any = tuple(columns)
        if any(isinstance(column, list) for column in columns):
            keys = list(zip(*(repeated(column, len(rows)) for column in columns), strict=True))
        distinct, spread = _distinct(keys, len(rows))
        names, module = [], self.program.source.module
        for key, row in distinct.items():
            probe, encoded = rows.pair(row)
            names.append(name(decode_record(encoded), self.program.place(probe).in_module(module), key[0]))
        return spread(pa.array(names, kind))


# The data


def _binary(rows: Rows) -> pa.Array:
    import pyarrow as pa

    if not isinstance(rows, PackedRows):
        body, starts, ends = rows.data_bounds()
        return pa.array([body[start:end] for start, end in zip(starts, ends, strict=True)], pa.binary())
    start, size = rows.shape.data, rows.data_size
    buffers = [None, pa.py_buffer(_offsets(len(rows), size)), pa.py_buffer(rows.raw(start, size))]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)


@lru_cache(16)
def _offsets(count: int, size: int) -> array[int]:
    return array("i", range(0, count * size + 1, size) if size else [0] * (count + 1))


def _item_columns(rows: Rows) -> dict[str, pa.Array]:
    """Return ``{"items": column}`` with the self-describing items of records, or an empty mapping if there are none."""
    import pyarrow as pa

    shape = rows.shape
    if shape.flags & Item.STACK_TRACE:
        return {}
    body, starts, ends = rows.data_bounds()
    found: list[Sequence[LogItem] | None] = [None] * len(rows)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if shape.flags & Item.CUT:
            found[row] = decode_record(rows.pair(row)[1]).items()
        elif start < end and body[start] in ITEM_TOKENS:
            found[row] = split_items(body[start:end], shape.word_size, shape.byte_order)
    shown = [[{"type": item.kind, "text": item.text} for item in items or ()] or None for items in found]
    return {"items": pa.array(shown, table_schema(None).field("items").type)} if any(shown) else {}


def _field_columns(rows: Rows, template: Template, names: NameColumns, headers: PackedRows) -> dict[str, pa.Array]:
    """
    Return the columns of a template's fields, of names of addresses, of problems, and of the remaining bytes.

    ``headers`` are the same records with header items only.
    """
    import pyarrow as pa

    if rows.shape.flags & Item.STACK_TRACE:
        return {}
    described = field_columns(template)
    if isinstance(rows, PackedRows) and (found := _fixed_columns(rows, template, names)) is not None:
        return found
    steps = None if rows.shape.flags & Item.CUT else steps_of(template, rows.shape.word_size)
    values = None if steps is None else RaggedData(rows).fields(steps, range(len(rows)))
    columns: dict[str, pa.Array] = {}
    if values is None:
        values, columns = _decoded_columns(rows, template)
    for (name, field), column in zip(described, values, strict=True):
        columns[name] = pa.array(_shown(field, column), field_type(field))
    return columns | names.of_fields(template, headers, values)


def _fixed_columns(rows: PackedRows, template: Template, names: NameColumns) -> dict[str, pa.Array] | None:
    """Return the columns of the fields if all have fixed offsets and cover the data of the records, otherwise None."""
    found = fixed_places(template, rows.shape.word_size)
    described, start = field_columns(template), rows.shape.data
    is_simple = not any(field.kind is FieldKind.CHARACTER for _, field in described)
    if found is None or found[1] != rows.data_size or not is_simple or rows.shape.flags & Item.CUT:
        return None
    columns = {
        name: _numbers(rows, (start + place.start, place.size), field_type(field), signed=place.is_signed)
        for (name, field), place in zip(described, found[0], strict=True)
    }
    if not name_columns(template):
        return columns
    values = [rows.numbers(start + place.start, place.size, rows.shape.byte_order) for place in found[0]]
    return columns | names.of_fields(template, rows, values)


def _decoded_columns(rows: Rows, template: Template) -> tuple[list[list[Any]], dict[str, pa.Array]]:
    """
    Return the values of each field, and the columns ``problems`` and ``rest`` if any record has some.

    Each record is decoded.
    """
    import pyarrow as pa

    names = [name for name, _ in field_columns(template)]
    is_cut = bool(rows.shape.flags & Item.CUT)
    values: list[tuple[Any, ...]] = []
    problems: list[Any] = []
    rests: list[bytes | None] = []
    for row in range(len(rows)):
        decoded = decode_fields(template, decode_record(rows.pair(row)[1]))
        problems.append(_problems(names, decoded, is_cut=is_cut))
        values.append(tuple(None if isinstance(value, Fault) else value for value in decoded.values))
        rests.append(decoded.rest or None)
    schema = table_schema(template)
    columns = {
        name: pa.array(column, schema.field(name).type)
        for name, column in (("problems", problems), ("rest", rests))
        if any(column)
    }
    return list(map(list, zip(*values, strict=True))), columns


def _shown(described: Field, column: Sequence[Any]) -> Sequence[Any]:
    """Return a column with the codes of characters replaced by strings. Other columns are unchanged."""
    if described.kind is not FieldKind.CHARACTER:
        return column
    return [None if v is None else _characters(v if isinstance(v, tuple) else (v,)) for v in column]


def _characters(codes: tuple[int, ...]) -> str:
    return "".join(map(character, codes)).encode("utf-8", "backslashreplace").decode()


def _problems(names: Sequence[str], decoded: Decoded, *, is_cut: bool) -> list[dict[str, Any]] | None:
    found: list[dict[str, Any]] = []
    for name, value in zip(names, decoded.values, strict=True):
        if value is None:
            found.append({"field": name, "problem": "cut" if is_cut else "missing", "address": None})
        elif isinstance(value, Fault):
            kind = "selector fault" if value.is_selector else UNSEEN if value.is_unseen else "fault"
            address = None if value.is_unseen else value.address
            found.append({"field": name, "problem": kind, "address": address})
    if is_cut and None not in decoded.values:
        found.append({"field": None, "problem": "cut", "address": None})
    return found or None
