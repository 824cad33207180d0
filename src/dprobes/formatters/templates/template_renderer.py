"""
Text of a record, formatted by its template.

No data is hidden: missing data, and data without a placeholder, are shown in angle brackets.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dprobes.escapes import CUT, escaped
from dprobes.formatters.templates.data_extraction import CUT_OFF, NO_ROOM, compiled_of, read
from dprobes.formatters.templates.template_model import (
    ERROR_MAX,
    HEADER_ITEMS,
    Conversion,
    Fault,
    HeaderValue,
    Placeholder,
    Skip,
    Text,
    character,
    readable_number,
)
from dprobes.record.log_record import split_items
from dprobes.rpn.instruction_set import StackEnd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.formatters.address_names import Symboliser
    from dprobes.formatters.templates.data_extraction import Taken
    from dprobes.formatters.templates.template_model import Part, Template, Width
    from dprobes.record.log_record import LogRecord
    from dprobes.record.record_origin import Place
    from dprobes.target.code_names import CodeName

__all__ = ["STACK_ENDS", "hex_dump", "render"]

# Dumps of data, in the original's form (recovered reference 3.1).


def hex_dump(data: bytes) -> str:
    """Return a dump with 16 bytes a line: offset, groups of four bytes, and the ASCII column, which ignores bit 7."""
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        groups = " ".join(row[n : n + 4].hex() for n in range(0, len(row), 4))
        characters = "".join(chr(code) if 0x20 <= (code := byte & 0x7F) < 0x7F else "." for byte in row)
        lines.append(f"{start:#010x} : {groups:<35} : {characters}")
    return "\n".join(lines)


_NANOSECONDS = 1_000_000_000
_HEXADECIMAL_ITEMS = ("cs", "ip", "ss", "sp")


def render(
    template: Template,
    record: LogRecord,
    place: Place | None = None,
    *,
    wall_offset: int = 0,
    symboliser: Symboliser | None = None,
) -> str:
    """
    Return the text of a record, without a final line end; this never raises, whatever the data are.

    ``wall_offset`` is added to the record's time to get nanoseconds since 1970. Without ``symboliser``, addresses are
    numbers.
    """
    compiled = compiled_of(template, record.word_size, record.byte_order)
    if compiled is not None and len(record.data) == compiled.layout.size and not record.is_cut:
        return compiled.text_of(record.data, 0)
    names = _Names(symboliser, record, place)
    taken, rest = read(template, record)
    following = iter(taken)
    lines = [escaped(template.desc, "\n\t")] if template.desc else []
    for parts in template.lines:
        text = ""
        follows_lines = False
        for part in parts:
            if follows_lines:
                text += "\n"
            if isinstance(part, Placeholder) and part.conversion in _WITH_LINES:
                shown, follows_lines = _own_lines(part, next(following), names)
                text += f"\n{shown}" if text and follows_lines else shown
            else:
                follows_lines = False
                text += _in_line(part, following, names, wall_offset)
        if text or not parts or not all(map(_is_stack, parts)):  # the kernel's stack is empty if user code was running
            lines.append(text)
    if record.is_cut and all(each.problem != NO_ROOM for each in taken):
        lines.append(f"{lines.pop()} {CUT}" if lines else CUT)
    if rest:
        lines.append(_left(rest))
    return "\n".join(lines)


_WITH_LINES = (Conversion.DUMP, Conversion.STACK)


def _own_lines(part: Placeholder, taken: Taken, names: _Names) -> tuple[str, bool]:
    """
    Return the lines of a hex dump or a call stack, and True; for missing data a substitute, and False.

    A substitute is printed within the line of the template.
    """
    if part.conversion is Conversion.DUMP:
        dump = _dump(taken)
        return dump, dump.startswith(_DUMP_START)
    frames = _stack(taken, names)
    return frames, bool(frames)


def _in_line(part: Part, following: Iterator[Taken], names: _Names, wall_offset: int) -> str:
    """
    Return the text of a part that is neither dump nor call stack; a part with data consumes the next of ``following``.

    ``wall_offset`` converts the record's time to nanoseconds since 1970.
    """
    match part:
        case Text(literal):
            return escaped(literal, "\n\t")
        case Placeholder():
            return _value(part, next(following), names)
        case HeaderValue(name, width, precision):
            return _padded(_header_item(name, names.record, wall_offset, precision), width)
        case Skip():
            return _remarks(next(following))
    assert_never(part)


class _Names(NamedTuple):
    """Addresses of one record with their names. Without ``symboliser``, they are numbers."""

    symboliser: Symboliser | None
    record: LogRecord
    place: Place | None

    def of(self, address: int) -> str:
        name = self.symboliser.name_of(address, self.record, self.place) if self.symboliser is not None else None
        return f"{address:#x}" if name is None else escaped(name)

    def of_frame(self, number: int, address: int) -> list[str]:
        """Return the names of a frame by its number, preceded by those of calls inlined there."""
        if self.symboliser is None:
            return [f"{address:#x}"]
        if not number:
            name = self.symboliser.code_name(address, self.record, self.place)
            return [*_inlined(name), self.of(address)]
        name = self.symboliser.caller_name(address, self.record, self.place)
        return [f"{address:#x}"] if name is None else [*_inlined(name), escaped(name.text)]


def _inlined(name: CodeName | None) -> list[str]:
    return [] if name is None else [escaped(each) for each in name.inlined_texts]


def _header_item(name: str, record: LogRecord, wall_offset: int, precision: int | None) -> str:
    value = getattr(record, HEADER_ITEMS[name])
    if value is None:
        return f"<no {name}>"
    if name == "time":
        seconds, nanoseconds = divmod(value + wall_offset, _NANOSECONDS)
        return f"{seconds}.{nanoseconds // 1000:06}"
    if name in _HEXADECIMAL_ITEMS:
        return f"{value:#x}"
    return escaped(str(value)[:precision])


def _value(part: Placeholder, taken: Taken, names: _Names) -> str:
    match taken.value:
        case None:
            text = ""
        case Fault() as fault:
            text = _padded(str(fault), part.width)
        case str() as string:
            if part.is_item and part.precision is not None and not part.marks_cut:
                string = string[: part.precision]
            text = _padded(escaped(string), part.width)
        case bytes() as data if part.is_item:
            items = split_items(data, names.record.word_size, names.record.byte_order) or ()
            text = " ".join(escaped(item.text) for item in items)
        case bytes() as data:
            text = data.hex(" ")
        case int() as number:
            text = _padded(_number(part, number, names), part.width)
        case numbers if part.conversion is Conversion.CHARACTER:
            text = _padded("".join(escaped(character(number)) for number in numbers), part.width)
        case numbers:
            between = ", " if part.has_commas else " "
            text = between.join(_padded(_number(part, number, names), part.width) for number in numbers)
    return text + _remarks(taken)


_PLAIN = (Conversion.SIGNED, Conversion.UNSIGNED, Conversion.HEXADECIMAL, Conversion.OCTAL)
_FORMS = {Conversion.HEXADECIMAL: "x", Conversion.OCTAL: "o"}


def _number(part: Placeholder, number: int, names: _Names) -> str:
    named = None if part.conversion in _PLAIN else _named(part, number, names)
    return _digits(part, number) if named is None else named


def _named(part: Placeholder, number: int, names: _Names) -> str | None:
    """Return the name that is printed instead of a number's digits, or None if there is none."""
    match part.conversion:
        case Conversion.CHARACTER:
            return escaped(character(number))
        case Conversion.POINTER:
            return f"{number:#x}"
        case Conversion.ADDRESS:
            return names.of(number)
        case Conversion.VALUE:
            return readable_number(number, part.size or names.record.word_size)
        case Conversion.DURATION:
            from dprobes.keyed.table_text import quantity
            from dprobes.rpn.keyed_tables import Unit

            return quantity(number, Unit.NANOSECONDS)
        case Conversion.ENUMERATION | Conversion.UNSIGNED_ENUMERATION:
            return dict(part.names).get(number)
        case Conversion.ERROR if number == -1 and part.width.has_prefix:
            return "-1"
        case Conversion.ERROR if -ERROR_MAX <= number < 0 and -number in errno.errorcode:
            return f"-{errno.errorcode[-number]}"
    return None


def _digits(part: Placeholder, number: int) -> str:
    """Return a number formatted as the placeholder's conversion in C's printf."""
    width, conversion = part.width, part.conversion
    before = "-" if number < 0 else width.plus if conversion is Conversion.SIGNED else ""
    form = _FORMS.get(conversion)
    digits = str(abs(number)) if form is None else f"{number:{form}}"
    if width.in_capitals:
        digits = digits.upper()
    if part.precision is not None:
        # Zero with a precision of zero has no digits (C17, 7.21.6.1, paragraph 8).
        digits = digits.zfill(part.precision) if number or part.precision else ""
    if width.has_prefix and conversion is Conversion.HEXADECIMAL and number:
        before = "0X" if width.in_capitals else "0x"
    if width.has_prefix and conversion is Conversion.OCTAL and not digits.startswith("0"):
        digits = f"0{digits}"
    if width.with_zeros and not width.to_left and part.precision is None:
        digits = digits.zfill(width.columns - len(before))
    return before + digits


def _padded(text: str, width: Width) -> str:
    if not width.columns:
        return text
    return text.ljust(width.columns) if width.to_left else text.rjust(width.columns)


_DUMP_START = "0x"


def _dump(taken: Taken) -> str:
    """Return a hex dump on lines of its own, or, if there are no data, the text of the fault or of the missing item."""
    match taken.value:
        case bytes() as data:
            text = hex_dump(data)
        case Fault() as fault:
            text = str(fault)
        case _:
            text = ""
    return text + _remarks(taken)


STACK_ENDS = {
    StackEnd.NO_TABLE: "no unwind table goes on from here",
    StackEnd.BAD_TABLE: "the unwind table cannot be understood here",
    StackEnd.UNREADABLE: "the stack cannot be read here",
    StackEnd.NOT_RISING: "the stack does not rise here",
    StackEnd.GONE: "the process had ended before its stack was followed",
    StackEnd.NO_COPY: "there was no room for a copy of the stack",
}
"""The text for a stack that was not followed to its end."""


def _is_stack(part: object) -> bool:
    return isinstance(part, Placeholder) and part.conversion is Conversion.STACK


def _stack(taken: Taken, names: _Names) -> str:
    """Return the frames of a call stack, a line for each, and the reason why it ends early."""
    frames = taken.value if isinstance(taken.value, tuple) else ()
    lines: list[str] = []
    for number, each in enumerate(frames):
        if number and each in STACK_ENDS:
            lines.append(f"<{STACK_ENDS[StackEnd(each)]}>")
        else:
            lines += names.of_frame(number, each)
    if isinstance(taken.value, Fault):
        lines.append(str(taken.value))
    if remarks := _remarks(taken):
        lines.append(remarks.strip())
    return "\n".join(lines)


def _remarks(taken: Taken) -> str:
    """Return remarks such as ``<missing 4 bytes>`` if data do not match the template, else an empty string."""
    if taken.problem == NO_ROOM:
        return CUT
    parts = []
    if taken.odd and taken.problem != CUT_OFF:
        parts.append(_left(taken.odd))
    if taken.problem:
        parts.append(f"<missing {taken.problem}>")
    elif taken.missing:
        parts.append(f"<missing {_bytes(taken.missing)}>")
    return (" " if taken.value is not None and parts else "") + " ".join(parts)


def _left(data: bytes) -> str:
    return f"<{_bytes(len(data))} left: {data.hex(' ')}>"


def _bytes(count: int) -> str:
    return f"{count} byte{'s' * (count != 1)}"
