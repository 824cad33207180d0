"""
Event classes: the TSDL descriptions of events with the same fields, and the encoding of these events.

An event class has an event context with the items of the record's header, and a payload with the fields of its data.
All integers are little-endian and all fields begin at whole bytes, so ``struct`` packs them. A field of bytes or an
array is a sequence, preceded by its length.

Field names begin with an underscore here, which readers remove. So they cannot be keywords of TSDL.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped
from dprobes.formatters.templates.data_extraction import FieldKind
from dprobes.record.log_record import FIXED_ITEMS, Item, LogRecord
from dprobes.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from uuid import UUID

    from dprobes.formatters.templates.data_extraction import Field
    from dprobes.record.record_origin import RecordSource
    from dprobes.sinks.structured_records import ArgumentValue, Shape

__all__ = ["STREAM_CLASS", "STREAM_CLASS_WITHOUT_CPU", "EventClass", "HeaderItems", "Metadata"]

EVENT_HEADER = struct.Struct("<IQ")
"""The number of the event class, and the time; ``Metadata`` declares the same layout in TSDL."""

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}
"""The codes of ``struct`` for signed integers by size in bytes; the capital letters are the codes of unsigned ones."""

_LENGTH = struct.Struct("<I")

_NAME_MAX = 1024

_WORDS_OF_TSDL = ("_Bool", "_Complex", "_Imaginary")
"""The keywords of TSDL that begin with an underscore."""

_BASES = {8: "o", 10: "", 16: "x"}
"""The bases in which numbers are displayed, with the prefixes of their types' names."""

_HEXADECIMAL = (Item.CS, Item.IP, Item.SS, Item.SP)
_WORDS = (Item.IP, Item.SP)
_ELSEWHERE = (Item.CPU, Item.TIME)
"""The items that are in the packet's context and the event's header instead of the event context."""


def quoted(text: str) -> str:
    """Return a string literal of TSDL; unprintable characters become escape sequences, which readers display."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_NAME_MAX])
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"') + '"'


class HeaderItems:
    """
    An encoder of event contexts for records with the same items in their header as a given record.

    With ``has_function`` the context contains the function of the hit, for places that are not code.
    """

    def __init__(self, record: LogRecord, *, has_function: bool = False) -> None:
        names: list[str] = []
        codes = "<"
        self.declarations: list[str] = []
        for item, name in FIXED_ITEMS:
            if getattr(record, name) is not None and item not in _ELSEWHERE:
                size = record.word_size if item in _WORDS else 4
                names.append(name)
                codes += _CODES[size].upper()
                self.declarations.append(f"{_integer(size, base=16 if item in _HEXADECIMAL else 10)} _{name};")
        self._layout = struct.Struct(codes)
        self._items = _getter([LogRecord._fields.index(name) for name in names])
        self._has_name = record.process_name is not None
        self._has_tid = record.tid is not None
        if self._has_name:
            self.declarations.append("string _name;")
        if self._has_tid:
            self.declarations.append(f"{_integer(4)} _tid;")
        self.has_function = has_function
        if has_function:
            self.declarations.append("string _function;")

    def encode(self, record: LogRecord, function: str = "") -> bytes:
        """Return the CTF event context of a record: its header items, and ``function`` if the context has it."""
        data = self._layout.pack(*self._items(record))
        if self._has_name:
            data += escaped(record.process_name or "").encode() + b"\0"
        if self._has_tid:
            data += _LENGTH.pack(record.tid)
        if self.has_function:
            data += escaped(function).encode() + b"\0"
        return data


class EventClass:
    """
    A class of events that have one name, the same header items, and one shape.

    ``text`` is its declaration in the metadata. ``content`` is the declaration without the number of the class.
    """

    def __init__(self, number: int, stream_class: int, name: str, header: HeaderItems, shape: Shape) -> None:
        self.number = number
        self._header = header
        self._encode = [_encoder(field) for field in shape.fields]
        self._numbers = _numbers(shape.fields)
        context = " ".join(header.declarations)
        fields = " ".join(_declarations(shape.fields))
        self.content = (
            f"\tname = {quoted(name)};\n\tstream_id = {stream_class};\n"
            f"\tcontext := struct {{ {context} }};\n\tfields := struct {{ {fields} }};\n"
        )
        self.text = f"event {{\n\tid = {number};\n{self.content}}};\n"

    def encode(self, time: int, record: LogRecord, values: Sequence[ArgumentValue], function: str = "") -> bytes:
        """Return the bytes of an event; ``time`` is CLOCK_MONOTONIC in nanoseconds."""
        start = EVENT_HEADER.pack(self.number, time) + self._header.encode(record, function)
        if self._numbers is not None:
            return start + self._numbers.pack(*values)
        return start + b"".join([encode(value) for encode, value in zip(self._encode, values, strict=True)])


def _getter(indices: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda record: tuple(record[index] for index in indices)


def _integer(size: int, *, signed: bool = False, base: int = 10) -> str:
    """
    Return the name of a TSDL integer type, such as ``uint32_t``; ``size`` is in bytes.

    ``base`` is the base in which its numbers are displayed, and determines the prefix of the name.
    """
    return f"{_BASES[base]}{'' if signed else 'u'}int{8 * size}_t"


def _alias(size: int, *, signed: bool, base: int) -> str:
    name, sign = _integer(size, signed=signed, base=base), str(signed).lower()
    return f"typealias integer {{ size = {8 * size}; align = 8; signed = {sign}; base = {base}; }} := {name};\n"


TYPES = "".join(
    _alias(size, signed=signed, base=base)
    for signed, base in ((True, 10), *((False, base) for base in _BASES))
    for size in _CODES
)
"""Declarations of the types. Strings need none, because they are UTF-8 by default."""


def _type(field: Field) -> str:
    match field.kind:
        case FieldKind.STRING:
            return "string"
        case FieldKind.BYTES:
            return _integer(1, base=16)
    return _integer(field.size, signed=field.kind is FieldKind.SIGNED, base=field.base)


def _declarations(fields: Sequence[Field]) -> list[str]:
    """Return the TSDL declarations of the fields of a payload, with unique names."""
    taken = {f"_{field.name}" for field in fields}

    def free(identifier: str) -> str:
        while identifier in taken:
            identifier += "_"
        taken.add(identifier)
        return identifier

    declarations = []
    for each in fields:
        name = f"_{each.name}"
        if name in _WORDS_OF_TSDL:
            name = free(f"{name}_")
        if each.is_array or each.kind is FieldKind.BYTES:
            length = free(f"__{each.name}_length")  # readers remove the first underscore and show the second
            declarations.append(f"{_integer(4)} {length}; {_type(each)} {name}[ {length} ];")
        else:
            declarations.append(f"{_type(each)} {name};")
    return declarations


def _code(field: Field) -> str:
    code = _CODES[field.size]
    return code if field.kind is FieldKind.SIGNED else code.upper()


def _numbers(fields: Sequence[Field]) -> struct.Struct | None:
    """Return the ``struct`` of a payload that consists only of numbers, or None for a payload with strings or lists."""
    if any(field.is_array or not field.size for field in fields):
        return None
    return struct.Struct("<" + "".join(_code(field) for field in fields))


def _encoder(field: Field) -> Callable[[Any], bytes]:
    match field.kind:
        case FieldKind.STRING if field.is_array:
            return lambda strings: _LENGTH.pack(len(strings)) + b"".join(map(_string, strings))
        case FieldKind.STRING:
            return _string
        case FieldKind.BYTES:
            return _bytes
    code = _code(field)
    if not field.is_array:
        return struct.Struct(f"<{code}").pack
    return lambda values: struct.pack(f"<I{len(values)}{code}", len(values), *values)


def _string(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0") + b"\0"


def _bytes(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


# The metadata of a trace: a description of its files as text in TSDL (CTF 1.8.3, section 7). It declares the layouts
# that ``ctf_trace`` packs, and ``EVENT_HEADER``.

STREAM_CLASS = 0
STREAM_CLASS_WITHOUT_CPU = 1
"""Number of the stream class for records without a CPU."""

_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class Metadata:
    """
    The metadata of a trace.

    ``wall_offset``, added to a time, results in nanoseconds since 1970. ``clock`` identifies the clock, which is the
    same in all traces since the machine was booted.
    """

    trace: UUID
    clock: UUID
    wall_offset: int
    hostname: str
    programs: list[RecordSource] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def add_program(self, source: RecordSource) -> bool:
        """Add or update the description of a program; return whether the metadata have changed."""
        for index, known in enumerate(self.programs):
            if (known.name, known.module) == (source.name, source.module):
                self.programs[index] = source
                return known.build_ids != source.build_ids
        self.programs.append(source)
        return True

    def text(self) -> str:
        """Return the contents of the trace's ``metadata`` file in TSDL."""
        return "\n".join([
            "/* CTF 1.8 */\n",
            TYPES,
            _TRACE.replace("UUID", str(self.trace)),
            self._environment(),
            self._clock(),
            _STREAMS,
            *self.classes,
        ])  # fmt: skip

    def _environment(self) -> str:
        lines = [
            f"hostname = {quoted(self.hostname)};",
            'domain = "dprobes";',
            'tracer_name = "dprobes";',
            f"tracer_version = {quoted(__version__)};",
        ]
        for number, source in enumerate(self.programs, 1):
            lines.append(f"program_{number} = {quoted(source.name)};")
            lines.append(f"program_{number}_module = {quoted(source.module)};")
            if source.build_ids:
                lines.append(f"program_{number}_build_ids = {quoted(' '.join(source.build_ids))};")
        return _block("env", lines)

    def _clock(self) -> str:
        seconds, nanoseconds = divmod(self.wall_offset, _NANOSECONDS)
        return _block("clock", [
            "name = monotonic;",
            f'uuid = "{self.clock}";',
            'description = "CLOCK_MONOTONIC";',
            f"freq = {_NANOSECONDS};",
            f"offset_s = {seconds};",
            f"offset = {nanoseconds};",
            "absolute = TRUE;",
        ]) + _TIME  # fmt: skip


def _block(name: str, lines: Iterable[str]) -> str:
    return f"{name} {{\n" + "".join(f"\t{line}\n" for line in lines) + "};\n"


_TRACE = """\
trace {
	major = 1;
	minor = 8;
	uuid = "UUID";
	byte_order = le;
	packet.header := struct {
		uint32_t magic;
		uint8_t uuid[16];
		uint32_t stream_id;
		uint64_t stream_instance_id;
	};
};
"""

_TIME = "typealias integer { size = 64; align = 8; signed = false; map = clock.monotonic.value; } := monotonic_t;\n"

_STREAM = """\
stream {
	id = ID;
	packet.context := struct {
		uint64_t packet_size;
		uint64_t content_size;
		monotonic_t timestamp_begin;
		monotonic_t timestamp_end;
		uint64_t events_discarded;
CPU	};
	event.header := struct {
		uint32_t id;
		monotonic_t timestamp;
	};
};
"""

_STREAMS = "\n".join((
    _STREAM.replace("ID", str(STREAM_CLASS)).replace("CPU", "\t\tuint32_t cpu_id;\n"),
    _STREAM.replace("ID", str(STREAM_CLASS_WITHOUT_CPU)).replace("CPU", ""),
))  # fmt: skip
