"""
Data of a record as named, typed values, for log targets that have types.

A template names the values. Without a template, the values are the bytes, ``data``, and the items of data that describe
themselves. A field whose value could not be read at the hit is replaced by ``NAME_fault``, the address of the fault. A
field beyond the end of the data is omitted. Bytes without a field are ``rest``, and ``cut`` marks data for which the
log buffer had no room. The names of addresses that a template prints by name follow (``formatters.address_fields``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from dprobes.errors import FormatError
from dprobes.escapes import CUT, escaped
from dprobes.formatters.address_fields import address_fields, code_names, code_names_of, function_of
from dprobes.formatters.address_names import AddressSymboliser
from dprobes.formatters.templates.data_columns import fixed_layout
from dprobes.formatters.templates.data_extraction import Fault, Field, FieldKind, decode_fields, fields_of, unique_name
from dprobes.formatters.templates.template_collection import ProgramTemplates
from dprobes.record.log_record import CUT_ITEM, UNSEEN, decode_record
from dprobes.sinks.text_sinks import BatchFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import Value
    from dprobes.formatters.templates.template_model import Template
    from dprobes.record.log_record import ByteOrder, LogItem, LogRecord
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.sinks import Batch

__all__ = [
    "ArgumentReader",
    "ArgumentValue",
    "DescribedRecords",
    "KnownRecord",
    "Shape",
    "lost_text",
    "names_text",
    "place_items",
    "value_text",
]

# Records as names and strings, for logs with structured data: syslog and the systemd journal.

_NUMBERS = ("major", "minor", "cpu", "pid", "tid", "uid")
_ADDRESSES = ("cs", "ip", "ss", "sp")


class KnownRecord(NamedTuple):
    """
    Record, the items of its header as strings, and the fields of its template or its handler.

    Bytes without a field are a last field, ``rest``. ``names`` has the names of the fields' addresses, as separate
    fields. ``function`` is the function that a sampler or a watchpoint hit, if known; ``place_items`` returns the
    function of other places.
    """

    record: LogRecord
    items: Sequence[tuple[str, str]]
    fields: Sequence[tuple[Field, Value]]
    names: Sequence[tuple[str, str | tuple[str, ...]]] = ()
    function: str = ""


class FieldReader:
    """A decoder of programs' records by their templates; addresses are named while their processes may still run."""

    def __init__(self) -> None:
        self._templates: dict[int, ProgramTemplates] = {}
        self._symbolisers: dict[int, AddressSymboliser] = {}
        self._fields: dict[tuple[Template, int], tuple[Field, ...]] = {}

    def create_event(self, source: RecordSource) -> None:
        """Store the description of a program before its first record, or replace it."""
        self._templates[source.number] = ProgramTemplates.of_source(source)
        if source.number not in self._symbolisers:
            self._symbolisers[source.number] = AddressSymboliser(source, live=True)
        self._symbolisers[source.number].know(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the description of a program after its last record."""
        self._templates.pop(source.number, None)
        self._symbolisers.pop(source.number, None)
        self._fields.clear()

    def read(self, source: RecordSource, data: bytes, place: Place) -> KnownRecord:
        """Return the decoded record with its fields; raise ``FormatError`` if it is invalid."""
        record = decode_record(data, place)
        template = self._templates[source.number].of(record)
        symboliser = self._symbolisers[source.number]
        fields: Sequence[tuple[Field, Value]] = ()
        names: Sequence[tuple[str, str | tuple[str, ...]]] = ()
        if template is not None:
            decoded = decode_fields(template, record)
            fields = list(zip(self._fields_of(template, record.word_size), decoded.values, strict=True))
            if decoded.rest:
                fields.append((_rest_field(fields), decoded.rest))
            names = code_names_of(template, record, decoded.values, place, symboliser)
        function = "" if place.is_code else function_of(record, place, symboliser)
        items = _items(record)
        if function and not place.routine:
            items.insert(0, ("function", escaped(function)))
        return KnownRecord(record, items, fields, names, function)

    def _fields_of(self, template: Template, word_size: int) -> tuple[Field, ...]:
        key = (template, word_size)
        if (found := self._fields.get(key)) is None:
            found = self._fields[key] = fields_of(template, word_size)
        return found


class DescribedRecords:
    """The records of batches as strings, together with their decoded forms."""

    def __init__(self, format_name: str) -> None:
        self._strings = BatchFormatter(format_name, has_items=True)
        self._fields = FieldReader()

    def create_event(self, source: RecordSource) -> None:
        """Store the description of a program before its first record, or replace it."""
        self._strings.create_event(source)
        self._fields.create_event(source)

    def destroy_event(self, source: RecordSource) -> None:
        """Drop the description of a program after its last record."""
        self._strings.destroy_event(source)
        self._fields.destroy_event(source)

    def of_batch(self, batch: Batch) -> Iterator[tuple[str, Place, bytes, KnownRecord | None]]:
        """
        Iterate over the records of a batch: text, place, bytes and decoded form.

        The decoded form of an invalid record is None.
        """
        strings = self._strings.strings(batch._replace(lost=0) if batch.lost else batch)
        for text, data, place in zip(strings, batch.records, batch.places, strict=True):
            try:
                known = self._fields.read(batch.source, data, place)
            except FormatError:  # the text reports it
                yield text, place, data, None
            else:
                yield text, place, data, known


def lost_text(batch: Batch) -> str:
    """Return the message about records that were lost before a batch."""
    return f"{batch.lost} records of '{batch.source.name}' were lost here"


def _rest_field(fields: Sequence[tuple[Field, Value]]) -> Field:
    """Return the field for bytes that belong to no other field, such as those after a truncated dump."""
    return _bytes_field("rest", {field.name for field, _ in fields})


def place_items(source: RecordSource, place: Place) -> list[tuple[str, str]]:
    """Return pairs of name and value that describe a record's probepoint; all formats use these names."""
    items = [("program", source.name), ("module", place.module), ("symbol", place.symbol)]
    if place.routine:
        items.append(("function", place.routine))
    if place.placed is not None:
        items.append(("placed", f"{place.placed:#x}"))
    return [(name, escaped(text)) for name, text in items]


def _items(record: LogRecord) -> list[tuple[str, str]]:
    """Return the items of a record's header; characters that would disturb a line are escaped."""
    items = [(name, str(value)) for name in _NUMBERS if (value := getattr(record, name)) is not None]
    if record.process_name is not None:
        items.append(("name", escaped(record.process_name)))
    items += [(name, f"{value:#x}") for name in _ADDRESSES if (value := getattr(record, name)) is not None]
    if record.is_stack_trace:
        items.append(("stack_trace", "1"))
    if record.is_cut:
        items.append(("cut", "1"))
    return items


def value_text(field: Field, value: Value) -> str | None:
    """Return the value of a field as text, None if the record has none."""
    match value:
        case None:
            return None
        case int():
            return _number_text(field, value)
        case tuple():
            return " ".join(_number_text(field, one) for one in value)
        case bytes():
            return value.hex()
        case Fault() | str():
            return str(value)


def names_text(names: str | tuple[str, ...]) -> str:
    """Return the name of an address, or of several, as one text."""
    return escaped(names if isinstance(names, str) else "; ".join(names))


def _number_text(field: Field, number: int) -> str:
    match field.kind, field.base:
        case FieldKind.CHARACTER, _:
            return chr(number) if 0x20 <= number < 0x7F else f"\\x{number:02x}"
        case FieldKind.ADDRESS, _:
            return f"{number:#x}"
        case _, 16:
            return f"{number:#x}"
        case _, 8:
            return f"0{number:o}"
    return str(number)


ArgumentValue = int | str | bytes | tuple[int, ...] | tuple[str, ...]

_BYTE_ORDERS: tuple[ByteOrder, ...] = ("little", "big")

_SHAPES_MAX = 64
"""Maximum number of record shapes of one template; records of further shapes are logged as bytes."""

_ITEM_KINDS = {
    "string": FieldKind.STRING,
    CUT_ITEM: FieldKind.STRING,
    UNSEEN: FieldKind.ADDRESS,
    "memory": FieldKind.BYTES,
    "fault": FieldKind.ADDRESS,
    "selector fault": FieldKind.ADDRESS,
}


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """
    Fields of records with the same layout.

    Shapes are compared by identity, which makes them fast dictionary keys.
    """

    fields: tuple[Field, ...]


class ArgumentReader:
    """
    A decoder of the data of records with one word size and one template; without a template if ``template`` is None.

    ``symboliser`` names addresses.
    """

    def __init__(self, template: Template | None, word_size: int, symboliser: Symboliser | None = None) -> None:
        self._template = template
        self._symboliser = symboliser
        self._named = () if template is None or symboliser is None else address_fields(template, word_size)
        self._with_names: dict[tuple[Shape, tuple[str, ...]], Shape] = {}
        self._word_size = word_size
        self._fields = fields_of(template, word_size) if template is not None else ()
        self._full = Shape(self._fields)
        self._raw = Shape((_bytes_field("data", set()),))
        taken: set[str] = set()
        self._cut = Shape((_bytes_field("data", taken), self._item_field(CUT_ITEM, taken)))
        self._stack_trace = Shape((_bytes_field("stack_trace", set()),))
        self._layouts = {
            order: None if template is None else fixed_layout(template, word_size, order) for order in _BYTE_ORDERS
        }
        self._others: dict[tuple[str, ...], Shape] = {}

    def read(self, record: LogRecord, place: Place) -> tuple[Shape, Sequence[ArgumentValue]]:
        """
        Return the fields of a record's data and their values, in the same order.

        Names of addresses are included as further fields.
        """
        shape, values = self._read(record)
        if not self._named or shape in (self._raw, self._stack_trace) or self._symboliser is None:
            return shape, values
        by_name = {field.name: value for field, value in zip(shape.fields, values, strict=True)}
        names: dict[str, str | tuple[str, ...]] = {}
        for each in self._named:
            value = by_name.get(self._fields[each.position].name)
            if isinstance(value, int | tuple):
                numbers = cast("int | tuple[int, ...]", value)
                found = code_names(numbers, record, place, self._symboliser, is_stack=each.is_stack)
                names[each.name] = escaped(found) if isinstance(found, str) else tuple(map(escaped, found or ()))
        key = (shape, tuple(names))
        if (named := self._with_names.get(key)) is None:
            more = [Field(e.name, FieldKind.STRING, 0, 10, e.is_array) for e in self._named if e.name in names]
            named = self._with_names[key] = Shape((*shape.fields, *more))
        return named, [*values, *names.values()]

    def _read(self, record: LogRecord) -> tuple[Shape, Sequence[ArgumentValue]]:
        if record.is_stack_trace:
            return self._stack_trace, (record.data,)
        if self._template is None:
            return self._by_items(record)
        layout = self._layouts[record.byte_order]
        if layout is not None and len(record.data) == layout.size:
            return self._full, layout.unpack(record.data)
        decoded = decode_fields(self._template, record)
        marks = [_mark(value) for value in decoded.values if value is None or isinstance(value, Fault)]
        if not marks and not decoded.rest and not record.is_cut:
            return self._full, decoded.values  # type: ignore[return-value] # neither None nor Fault is in them
        return self._incomplete(record, decoded.values, decoded.rest)

    def _incomplete(
        self, record: LogRecord, values: tuple[Value, ...], rest: bytes
    ) -> tuple[Shape, Sequence[ArgumentValue]]:
        key = (*(_mark(value) for value in values), "rest" if rest else "", CUT_ITEM if record.is_cut else "")
        shape = self._others.get(key)
        if shape is None:
            if len(self._others) >= _SHAPES_MAX:
                return self._raw, (record.data,)
            shape = self._others[key] = self._shape_of(key)
        found = [value.address if isinstance(value, Fault) else value for value in values if value is not None]
        return shape, [*found, *((rest,) if rest else ()), *((CUT,) if record.is_cut else ())]

    def _shape_of(self, marks: tuple[str, ...]) -> Shape:
        fields: list[Field] = []
        taken = {field.name for field in self._fields}
        for field, mark in zip(self._fields, marks[:-2], strict=True):
            match mark:
                case "missing":
                    continue
                case "":
                    fields.append(field)
                case _:
                    name = unique_name(f"{field.name}_{mark}", taken)
                    fields.append(Field(name, FieldKind.ADDRESS, self._word_size, 16, is_array=False))
        if marks[-2]:
            fields.append(_bytes_field(marks[-2], taken))
        if marks[-1]:
            fields.append(self._item_field(marks[-1], taken))
        return Shape(tuple(fields))

    def _by_items(self, record: LogRecord) -> tuple[Shape, Sequence[ArgumentValue]]:
        items = record.items()
        if not items:
            return (self._cut, (record.data, CUT)) if record.is_cut else (self._raw, (record.data,))
        key = tuple(item.kind for item in items)
        shape = self._others.get(key)
        if shape is None:
            if len(self._others) >= _SHAPES_MAX:
                return self._raw, (record.data,)
            taken: set[str] = set()
            fields = [_bytes_field("data", taken), *(self._item_field(kind, taken) for kind in key)]
            shape = self._others[key] = Shape(tuple(fields))
        return shape, [record.data, *(_item_value(item) for item in items)]

    def _item_field(self, item_kind: str, taken: set[str]) -> Field:
        name = unique_name(item_kind.replace(" ", "_"), taken)
        kind = _ITEM_KINDS.get(item_kind, FieldKind.UNSIGNED)
        match kind:
            case FieldKind.STRING | FieldKind.BYTES:
                return Field(name, kind, 0, 16, is_array=False)
            case FieldKind.ADDRESS:
                return Field(name, kind, self._word_size, 16, is_array=False)
        return Field(name, kind, self._word_size, 10, is_array=True)


def _mark(value: Value) -> str:
    """Return the mark of a value that is not an ordinary one; records with different marks have different shapes."""
    match value:
        case None:
            return "missing"
        case Fault(is_unseen=True):
            return "entry_not_seen"
        case Fault(is_selector=is_selector):
            return "selector_fault" if is_selector else "fault"
    return ""


def _item_value(item: LogItem) -> ArgumentValue:
    if item.kind in ("string", CUT_ITEM):
        return item.text
    return item.value


def _bytes_field(name: str, taken: set[str]) -> Field:
    return Field(unique_name(name, taken), FieldKind.BYTES, 0, 16, is_array=False)
