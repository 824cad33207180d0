"""
Packed records as tables, column by column: what is the same in all rows is repeated, the rest is bytes as they are.

There is a table of packed records if their data is what a template takes whole, or if they have none; for others
records are decoded one by one.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from dprobes.errors import FormatError
from dprobes.escapes import escaped
from dprobes.formatters.address_fields import code_names, function_of
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.templates.data_columns import RaggedData, fixed_places, steps_of
from dprobes.formatters.templates.data_extraction import FieldKind
from dprobes.record.boot_clock import boot_id
from dprobes.record.log_items import split_items
from dprobes.record.log_record import Item, decode_record, header_struct
from dprobes.record.record_table import NAME_SPACE, PROBE_SIZE, PackedRows
from dprobes.rpn.instruction_set import Token
from dprobes.tables.table_schema import HEADER_COLUMNS, field_columns, field_type, name_columns, name_type, table_schema
from dprobes.trace.record_columns import RaggedRows, ragged_rows_of
from dprobes.trace.trace_frames import RECORD_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

    from dprobes.formatters.templates.data_columns import FieldPlace
    from dprobes.formatters.templates.template_model import Template, Value
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place
    from dprobes.trace.trace_content import RecordBlock, TraceProgram

__all__ = ["NameColumns", "clean", "packed_table", "place_columns", "plain_rows", "plain_table"]

# The columns that say where probepoints are, and names as tables have them.


_PLACE_COLUMNS = ("module", "symbol", "function", "placed", "at_return")
_UNSIGNED_MAX = (1 << 64) - 1


def place_columns(program: TraceProgram, module: str, probes: Sequence[int]) -> dict[str, pa.Array]:
    """Return the columns of probepoints; each place is looked up once."""
    import pyarrow as pa

    numbers = {probe: number for number, probe in enumerate(dict.fromkeys(probes))}
    places = [program.place(probe) for probe in numbers]
    indices = pa.array([numbers[probe] for probe in probes], pa.int32())
    values: list[list[Any]] = [
        clean([module] * len(places)),
        clean([place.where or None for place in places]),
        clean([place.routine or None for place in places]),
        [None if place.placed is None else _unsigned(place.placed) for place in places],
        [place.at_return for place in places],
    ]
    columns = {}
    for name, shown in zip(_PLACE_COLUMNS, values, strict=True):
        columns[name] = pa.array(shown, pa.type_for_alias(HEADER_COLUMNS[name])).take(indices)
    return columns


def _unsigned(number: int) -> int | None:
    """Return a number of a file, which may say anything, if a column can hold it."""
    return number if 0 <= number <= _UNSIGNED_MAX else None


def clean(strings: Iterable[str | None]) -> list[str | None]:
    """Return names as all formats have them: with escapes for what cannot be printed."""
    strings = list(strings)
    known = {text: text if text is None else escaped(text) for text in set(strings)}
    return [known[text] for text in strings]


# The columns of names: those of addresses that templates print by name, and the functions where samples and accesses
# hit.
#
# Names come with the records in their trace file, and from processes of this machine that still run.


class NameColumns:
    """Make the columns of names for the records of a program in a trace file."""

    def __init__(self, program: TraceProgram) -> None:
        own = boot_id()
        is_live = bool(own) and program.origin.boot_id == own
        self._program = program
        self._symboliser = AddressSymboliser(program.source, live=is_live, carried=program.names)

    def _place(self, probe: int) -> Place:
        return self._program.place(probe).in_module(self._program.source.module)

    def _are_in_code(self, probes: Iterable[int]) -> bool:
        return all(self._program.place(probe).routine for probe in probes)

    # Records that were decoded

    def of_values(
        self, template: Template, records: Sequence[LogRecord], probes: Sequence[int], values: Sequence[Sequence[Value]]
    ) -> dict[str, pa.Array]:
        """Return the columns beside those of a template's fields, whose ``values`` are given by columns."""
        import pyarrow as pa

        found = {}
        for name, each in name_columns(template):
            names: list[str | list[str | None] | None] = []
            for record, probe, value in zip(records, probes, values[each.position], strict=True):
                shown = code_names(value, record, self._place(probe), self._symboliser, is_stack=each.is_stack)
                names.append(list(clean(shown)) if isinstance(shown, tuple) else clean([shown])[0])
            found[name] = pa.array(names, name_type(each))
        return found

    def functions(self, records: Sequence[LogRecord], probes: Sequence[int]) -> dict[str, pa.Array]:
        """Return the column of functions if some hits may have been in any; else nothing."""
        import pyarrow as pa

        if self._are_in_code(set(probes)):
            return {}
        pairs = zip(records, map(self._place, probes), strict=True)
        names = clean([function_of(record, place, self._symboliser) or None for record, place in pairs])
        return {"function": pa.array(names, pa.string())}

    # Packed records

    def of_packed(self, template: Template, records: PackedRows, places: Sequence[FieldPlace]) -> dict[str, pa.Array]:
        """Return the same of records whose fields are at fixed ``places`` of the data."""

        def named(record: LogRecord, place: Place, address: int) -> str | None:
            shown = code_names(address, record, place, self._symboliser, is_stack=False)
            return shown if isinstance(shown, str) else None

        found = {}
        for name, each in name_columns(template):
            place = places[each.position]
            at = (records.shape.data + place.start, place.size)
            found[name] = self._named(records, at, named)
        return found

    def functions_of_packed(self, records: PackedRows) -> dict[str, pa.Array]:
        """Return the same as ``functions``."""
        probes, at = records.probes(), records.shape.place(Item.IP)
        if at is None or self._are_in_code({probes} if isinstance(probes, int) else set(probes)):
            return {}

        def function(record: LogRecord, place: Place, _: int) -> str | None:
            return function_of(record, place, self._symboliser) or None

        return {"function": self._named(records, at, function)}

    def _named(
        self, records: PackedRows, at: tuple[int, int], name: Callable[[LogRecord, Place, int], str | None]
    ) -> pa.Array:
        """Return the column of what ``name`` gives for addresses ``at`` some place; like records are named once."""
        import pyarrow as pa

        addresses = records.numbers(*at, records.shape.byte_order)
        columns = [addresses, records.probes(), records.item(Item.PID), records.names()]
        if self._program.names.has_changes:
            columns.append(records.item(Item.TIME))
        if not any(isinstance(column, list) for column in columns):
            keys: list[tuple[Any, ...]] = [tuple(columns)]
        else:
            keys = list(zip(*(c if isinstance(c, list) else repeat(c, len(records)) for c in columns), strict=True))
        numbers: dict[tuple[Any, ...], int] = {}
        names = []
        for row, key in enumerate(keys):
            if key not in numbers:
                numbers[key] = len(numbers)
                probe, encoded = records.pair(row)
                names.append(name(decode_record(encoded), self._place(probe), key[0]))
        shown = pa.array(clean(names), pa.string())
        if len(keys) == 1:
            return pa.repeat(shown[0], len(records))
        return shown.take(pa.array([numbers[key] for key in keys], pa.int32()))


_ITEMS = {
    "cpu": Item.CPU, "pid": Item.PID, "tid": Item.TID, "uid": Item.UID, "cs": Item.CS, "ip": Item.IP, "ss": Item.SS,
    "sp": Item.SP, "monotonic": Item.TIME,
}  # fmt: skip
_TIME_MAX = (1 << 63) - 1
_TOKENS = bytes(byte in frozenset(Token) for byte in range(256))
"""For each byte whether an item may begin with it."""


def packed_table(
    records: PackedRows,
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
    columns["word_size"] = _repeated(pa.scalar(shape.word_size, pa.uint8()), count)
    columns["byte_order"] = _repeated(pa.scalar(shape.byte_order), count)
    columns["stack_trace"] = _repeated(pa.scalar(bool(shape.flags & Item.STACK_TRACE)), count)
    columns["lost_before"] = _sparse(lost, count)
    if data is None:
        columns["data"] = _binary(records, shape.data, records.data_size)
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


def _numbers(records: PackedRows, place: tuple[int, int] | None, kind: pa.DataType, *, signed: bool = False) -> Any:
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


def _times(records: PackedRows, wall_offset: int) -> pa.Array | None:
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


def _names(records: PackedRows) -> pa.Array:
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


def _binary(records: PackedRows, start: int, size: int) -> pa.Array:
    import pyarrow as pa

    buffers = [None, pa.py_buffer(_offsets(len(records), size)), pa.py_buffer(records.raw(start, size))]
    return pa.Array.from_buffers(pa.binary(), len(records), buffers)


@lru_cache(16)
def _offsets(count: int, size: int) -> array[int]:
    return array("i", range(0, count * size + 1, size) if size else [0] * (count + 1))


# The data


def _data_columns(records: PackedRows, template: Template | None, named: NameColumns) -> dict[str, pa.Array] | None:
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
    word_size = shape.word_size
    found = fixed_places(template, word_size)
    if found is None or found[1] != records.data_size:
        return None
    for (name, field), (start, size, is_signed, _) in zip(field_columns(template), found[0], strict=True):
        if field.kind is FieldKind.CHARACTER:
            return None
        others[name] = _numbers(records, (shape.data + start, size), field_type(field), signed=is_signed)
    return others | named.of_packed(template, records, found[0])


def _items(records: PackedRows) -> list[list[dict[str, str]] | None] | None:
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
    word_size = records.shape.word_size
    result: list[list[dict[str, str]] | None] = [None] * len(records)
    for number in found:
        items = split_items(bytes(data[number * length : (number + 1) * length]), word_size, order)
        if items is not None:
            result[number] = [{"type": item.kind, "text": item.text} for item in items]
    return result


# Records of various sizes, as those with strings, as tables: their headers as packed records, their data part by part.
#
# There is a table of records whose template takes nothing but strings and numbers, and all of their data; for others
# records are decoded one by one.


def plain_rows(block: RecordBlock) -> list[RaggedRows] | None:
    """Return the rows of a block; None if one of its records is none."""
    try:
        rows = list(ragged_rows_of(block))
        for each in rows:
            each.data_bounds()
    except FormatError:
        return None
    return rows


def plain_table(
    rows: RaggedRows,
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

    if template is None or name_columns(template) or rows.shape.flags & (Item.STACK_TRACE | Item.CUT):
        return None
    steps = steps_of(template, rows.shape.word_size)
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


def _headers(rows: RaggedRows, ragged: RaggedData, wanted: Sequence[int]) -> PackedRows:
    """Return the records as packed ones without data."""
    body, tid = ragged.body, 4 if rows.shape.flags & Item.TID else 0
    heads = [(rows.start(row), ragged.starts[row]) for row in wanted]
    size = RECORD_HEAD.size
    if rows.shape.flags & Item.PROCESS_NAME:
        fixed = header_struct(rows.shape.flags, rows.shape.byte_order).size
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
    return PackedRows.of_table(b"".join(parts), stride, range(stride))
