"""
The text of a record as its template says.

Nothing is hidden: what the data lacks, and what no place-holder takes, is shown in angle brackets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.formatters.dumping import hex_dump
from dprobes.formatters.templates.model import HEADER_ITEMS, Conversion, HeaderValue, Placeholder, Skip, Text
from dprobes.formatters.templates.reading import read
from dprobes.formatters.templates.values import Fault

if TYPE_CHECKING:
    from dprobes.formatters.templates.model import Template, Width
    from dprobes.formatters.templates.reading import Taken
    from dprobes.record.layout import LogRecord

__all__ = ["Symboliser", "render"]

_NANOSECONDS = 1_000_000_000
_UNICODE_MAX = 0x10FFFF
_HEXADECIMAL_ITEMS = ("cs", "ip", "ss", "sp")


class Symboliser(Protocol):
    """Name addresses of the process that a record is of."""

    def name_of(self, address: int, record: LogRecord) -> str | None:
        """Return ``symbol+0x4 (module)`` or the like; None if nothing is known of the address."""


def render(template: Template, record: LogRecord, *, wall_offset: int = 0, symboliser: Symboliser | None = None) -> str:
    """
    Return the text of a record, without a final line end; never raises, whatever the data is.

    ``wall_offset`` is added to the record's time to get nanoseconds since 1970. Without ``symboliser``, addresses are
    numbers.
    """
    taken, rest = read(template, record)
    following = iter(taken)
    lines = [escaped(template.desc, "\n\t")] if template.desc else []
    for parts in template.lines:
        text = ""
        follows_dump = False
        for part in parts:
            if follows_dump:
                text += "\n"
            follows_dump = False
            match part:
                case Text(literal):
                    text += escaped(literal, "\n\t")
                case HeaderValue(name, width):
                    text += _padded(_header_item(name, record, wall_offset), width)
                case Skip():
                    text += _remarks(next(following))
                case Placeholder(conversion=Conversion.DUMP):
                    dump = _dump(next(following))
                    follows_dump = dump.startswith(_DUMP_START)
                    text += "\n" + dump if text and follows_dump else dump
                case Placeholder():
                    text += _value(part, next(following), record, symboliser)
        lines.append(text)
    if rest:
        lines.append(_left(rest))
    return "\n".join(lines)


def escaped(text: str, keep: str = "") -> str:
    """Return text with escapes in the place of characters that would disturb a line or a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return _ESCAPES.get(character) or (f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}")


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def _header_item(name: str, record: LogRecord, wall_offset: int) -> str:
    value = getattr(record, HEADER_ITEMS[name])
    if value is None:
        return f"<no {name}>"
    if name == "time":
        seconds, nanoseconds = divmod(value + wall_offset, _NANOSECONDS)
        return f"{seconds}.{nanoseconds // 1000:06}"
    if name in _HEXADECIMAL_ITEMS:
        return f"{value:#x}"
    return escaped(str(value))


def _value(part: Placeholder, taken: Taken, record: LogRecord, symboliser: Symboliser | None) -> str:
    match taken.value:
        case None:
            text = ""
        case Fault() as fault:
            text = _padded(str(fault), part.width)
        case str() as string:
            if part.is_item and part.precision is not None:
                string = string[: part.precision]
            text = _padded(escaped(string), part.width)
        case bytes() as data:
            text = data.hex(" ")
        case int() as number:
            text = _padded(_number(part, number, record, symboliser), part.width)
        case numbers if part.conversion is Conversion.CHARACTER:
            text = _padded("".join(_character(number) for number in numbers), part.width)
        case numbers:
            text = " ".join(_padded(_number(part, number, record, symboliser), part.width) for number in numbers)
    return text + _remarks(taken)


def _number(part: Placeholder, number: int, record: LogRecord, symboliser: Symboliser | None) -> str:
    match part.conversion:
        case Conversion.HEXADECIMAL:
            digits = f"{number:x}"
        case Conversion.OCTAL:
            digits = f"{number:o}"
        case Conversion.CHARACTER:
            return _character(number)
        case Conversion.POINTER:
            return f"{number:#x}"
        case Conversion.ADDRESS:
            name = symboliser.name_of(number, record) if symboliser is not None else None
            return f"{number:#x}" if name is None else escaped(name)
        case _:
            digits = str(abs(number))
    sign = "-" if number < 0 else ""
    if part.precision is not None:
        return sign + digits.zfill(part.precision)
    if part.width.with_zeros and not part.width.to_left:
        return sign + digits.zfill(part.width.columns - len(sign))
    return sign + digits


def _character(code: int) -> str:
    return escaped(chr(code)) if code <= _UNICODE_MAX else f"<no character: {code:#x}>"


def _padded(text: str, width: Width) -> str:
    if not width.columns:
        return text
    return text.ljust(width.columns) if width.to_left else text.rjust(width.columns)


_DUMP_START = "0x"


def _dump(taken: Taken) -> str:
    """Return a dump, which has lines of its own, or what stands for it."""
    match taken.value:
        case bytes() as data:
            text = hex_dump(data)
        case Fault() as fault:
            text = str(fault)
        case _:
            text = ""
    return text + _remarks(taken)


def _remarks(taken: Taken) -> str:
    """Return what is to be said about data that is not as the template has it."""
    parts = []
    if taken.odd:
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
