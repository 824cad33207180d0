"""
Dataclasses as the schema of the manager's JSON: a field's annotation determines what is sent, and what is accepted.

``encode`` converts a dataclass to an object. ``decode`` converts an answer, and ``decode_arguments`` a request, to a
dataclass, checked field by field. Both sides of the socket use them, and a test compares the dataclasses with the
tables of docs/reference/manager.md::

    str    text        tuple[str, ...]              list of strings
    int    number      tuple[int, ...]              list of numbers
    float  time        tuple[tuple[int, ...], ...]  list of lists of numbers
    bool   boolean     a dataclass                  object
    bytes  binary      tuple[a dataclass, ...]      list of objects
    enum   text        Range, Codes                 two numbers

With ``| None`` it may be null. ``wire`` specifies further properties of a field. Unknown fields are skipped in answers,
and errors in requests.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import os
import re
import sys
from dataclasses import MISSING, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from dprobes import errors
from dprobes.errors import DprobesError, FormatError, ManagerError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable, Mapping

__all__ = [
    "LEFT_OUT",
    "NOT_SENT",
    "VERSION",
    "Codes",
    "Connection",
    "Message",
    "Range",
    "decode",
    "decode_arguments",
    "encode",
    "error_of",
    "line_of",
    "members",
    "message_of",
    "wire",
]

_T = TypeVar("_T")

Range = tuple[int, int]
"""A first and a last index."""

Codes = tuple[int, int]
"""A major and a minor code."""


class _UnfitError(Exception):
    """An invalid value; the message is the rest of a sentence about it."""


class _Type(NamedTuple):
    """A type of value: its name in docs/reference/manager.md, its checked decoder, and its encoder."""

    name: str
    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any] = lambda value: value


class Member(NamedTuple):
    """
    A field of an object.

    ``attribute`` is its name in the dataclass, ``name`` that in JSON. ``inner`` is the dataclass of an object, or of
    the objects of a list. ``is_left_out`` means that None is not sent at all.
    """

    attribute: str
    name: str
    value_type: _Type
    inner: type[Any] | None
    is_required: bool
    is_nullable: bool
    is_left_out: bool


def wire(
    name: str | None = None, *, bounds: tuple[int, int] | None = None, is_left_out: bool = False, is_sent: bool = True
) -> dict[str, Any]:
    """
    Return the metadata of a dataclass field: another name in JSON, and the bounds of a number.

    With ``is_left_out``, None is not sent at all. If ``is_sent`` is False, the field is not part of the JSON, and
    ``decode`` sets it to the received object.
    """
    return {"name": name, "bounds": bounds, "is_left_out": is_left_out, "is_sent": is_sent}


LEFT_OUT = wire(is_left_out=True)
NOT_SENT = wire(is_sent=False)


@cache
def members(kind: Hashable) -> tuple[Member, ...]:
    """Return the members of the JSON objects that represent the dataclass ``kind``."""
    assert isinstance(kind, type)
    found = []
    for each in fields(kind):
        data = each.metadata
        if data.get("is_sent", True):
            name, _, nullable = str(each.type).partition(" | ")
            value_type, inner = _type_of(name, sys.modules[kind.__module__].__dict__, data.get("bounds"))
            is_required = each.default is MISSING and each.default_factory is MISSING
            is_left_out = bool(data.get("is_left_out"))
            is_nullable = bool(nullable) and not is_left_out
            found.append(
                Member(
                    each.name, data.get("name") or each.name, value_type, inner, is_required, is_nullable, is_left_out
                )
            )
    return tuple(found)


def _type_of(name: str, names: Mapping[str, Any], bounds: tuple[int, int] | None) -> tuple[_Type, type[Any] | None]:
    """
    Return the JSON type for an annotation, and the dataclass of an object or of a list's objects, or None.

    ``names`` has the names with which annotations are evaluated. ``bounds`` has the limits (both included) of a number.
    """
    if name == "int" and bounds is not None:
        return _Type("number", partial(_bounded, *bounds)), None
    if (simple := _TYPES.get(name)) is not None:
        return simple, None
    if (listed := re.fullmatch(r"tuple\[(\w+), \.\.\.\]", name)) is not None:
        inner = names[listed[1]]
        return _Type(
            "list of objects", partial(_objects, inner), lambda values: [encode(each) for each in values]
        ), inner
    inner = names[name]
    if issubclass(inner, enum.Enum):
        return _Type("text", partial(_enum, inner), lambda value: value.value), None
    return _Type("object", partial(_object, inner), encode), inner


def encode(value: Any) -> dict[str, Any]:
    """Return the JSON object that represents a dataclass, as in ``decode``."""
    found: dict[str, Any] = {}
    for attribute, name, value_type, _, _, _, is_left_out in members(type(value)):  # type: ignore[arg-type]  # classes are hashable
        each = getattr(value, attribute)
        if each is not None:
            found[name] = value_type.encode(each)
        elif not is_left_out:
            found[name] = None
    return found


def decode(kind: type[_T], message: Any) -> _T:
    """Return the dataclass of an answer of the manager; raise ``ManagerError`` if it does not match."""
    try:
        return _object(kind, message)
    except _UnfitError as error:
        raise ManagerError(f"the probe manager's answer is not as expected: it {error}") from None


def decode_arguments(kind: type[_T], verb: str, values: Mapping[str, Any]) -> _T:
    """Return the arguments of a verb; raise ``ManagerError`` for undocumented or invalid ones."""
    known = members(kind)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for member in known:
        value = values.get(member.name)
        if member.is_required and (value is None or value == ""):
            raise ManagerError(f"'{verb}' needs the argument '{member.name}'")
        if value is None:
            continue
        try:
            if member.inner is not None:
                _check(isinstance(value, dict), "an object")
                found[member.attribute] = decode_arguments(member.inner, f"{verb}.{member.name}", value)
            else:
                found[member.attribute] = member.value_type.decode(value)
                _check_characters(found[member.attribute])
        except _UnfitError as error:
            raise ManagerError(f"argument '{member.name}' of '{verb}' {error}") from None
    if unknown := sorted(set(values) - {member.name for member in known}):
        names = ", ".join(f"'{name}'" for name in unknown)
        raise ManagerError(f"the manager's verb '{verb}' has no argument {names}")
    return kind(**found)


def _check_characters(value: Any) -> None:
    """Raise ``_UnfitError`` for strings with a NUL or with surrogates that do not represent bytes."""
    for text in value if isinstance(value, tuple) else (value,):
        try:
            is_fine = not isinstance(text, str) or b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:
            is_fine = False
        if not is_fine:
            raise _UnfitError("has a character no name has")


# Types


def _check(is_fine: bool, expected: str) -> None:
    if not is_fine:
        raise _UnfitError(f"must be {expected}")


def _object(kind: type[_T], value: Any) -> _T:
    _check(isinstance(value, dict), "an object")
    found: dict[str, Any] = {}
    for member in members(kind):  # type: ignore[arg-type]
        if member.name not in value:
            if member.is_required:
                raise _UnfitError(f"has no field '{member.name}'")
            continue
        each = value[member.name]
        if each is None and member.is_nullable:
            found[member.attribute] = None
            continue
        try:
            found[member.attribute] = member.value_type.decode(each)
        except _UnfitError as error:
            raise _UnfitError(f"has a field '{member.name}', which {error}") from None
    for each in fields(kind):  # type: ignore[arg-type]
        if not each.metadata.get("is_sent", True):
            found[each.name] = value
    return kind(**found)


def _objects(kind: type[_T], value: Any) -> tuple[_T, ...]:
    _check(isinstance(value, list), "a list of objects")
    return tuple(_object(kind, each) for each in value)


def _enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise _UnfitError(f"must be one of {', '.join(str(each.value) for each in kind)}") from None


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a whole number; ``true`` is an ``int`` in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> str:
    _check(isinstance(value, str), "a text")
    return str(value)


def _number(value: Any) -> int:
    _check(_is_number(value), "a number")
    return int(value)


def _bounded(low: int, high: int, value: Any) -> int:
    _check(isinstance(value, int), "a number")
    _check(_is_number(value) and low <= value <= high, f"a number from {low} to {high}")
    return int(value)


def _time(value: Any) -> float:
    _check(_is_number(value) or isinstance(value, float), "a time")
    return float(value)


def _boolean(value: Any) -> bool:
    _check(isinstance(value, bool), "true or false")
    return bool(value)


def _binary(value: Any) -> bytes:
    try:
        return base64.b64decode(_text(value), validate=True)
    except (binascii.Error, ValueError):
        raise _UnfitError("is not base64 text") from None


def _strings(value: Any) -> tuple[str, ...]:
    _check(isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of strings")
    return tuple(value)


def _numbers(value: Any) -> tuple[int, ...]:
    _check(isinstance(value, list) and all(_is_number(each) for each in value), "a list of numbers")
    return tuple(value)


def _lists(value: Any) -> tuple[tuple[int, ...], ...]:
    _check(isinstance(value, list), "a list of lists of numbers")
    return tuple(_numbers(each) for each in value)


def _pair(value: Any, expected: str) -> tuple[int, int]:
    _check(len(value) == 2 and all(_is_number(each) and each >= 0 for each in value), expected)
    return value[0], value[1]


def _range(value: Any) -> Range:
    _check(isinstance(value, list), "two numbers")
    first, last = _pair(value, "two numbers, a lower and a higher one")
    _check(first <= last, "two numbers, a lower and a higher one")
    return first, last


def _codes(value: Any) -> Codes:
    _check(isinstance(value, list), "a major and a minor code")
    return _pair(value, "a major and a minor code")


_TYPES = {
    "str": _Type("text", _text),
    "int": _Type("number", _number),
    "float": _Type("time", _time),
    "bool": _Type("boolean", _boolean),
    "bytes": _Type("binary", _binary, lambda data: base64.b64encode(data).decode("ascii")),
    "tuple[str, ...]": _Type("list of strings", _strings, list),
    "tuple[int, ...]": _Type("list of numbers", _numbers, list),
    "tuple[tuple[int, ...], ...]": _Type(
        "list of lists of numbers", _lists, lambda lists: [list(each) for each in lists]
    ),
    "Range": _Type("two numbers", _range, list),
    "Codes": _Type("two numbers", _codes, list),
}


# The protocol between client and manager: one JSON object a line, UTF-8, on a stream socket
# (docs/reference/manager.md).
#
# ::
#
#     client   {"dprobes": 1, "verb": VERB, "arguments": {...}}
#     manager  {"notice": {"message": TEXT, "hint": TEXT or null, "is_warning": BOOL, "details": TEXT}}
#               (any number of notices), then
#              {"result": {...}}   or   {"error": {"kind": NAME, "message": TEXT, "hint": TEXT or null}}
#
# Binary data is base64 text. A connection carries requests one after the other. The number after "dprobes" is the
# version of the protocol: a manager answers a different version with an error that contains both.


VERSION = 1

LINE_MAX = 64 << 20
"""Maximum size of a line in bytes."""

_PIECE = 1 << 16

Message = dict[str, Any]
"""The JSON object of one line."""


class Connection:
    """
    Socket that sends and receives lines. It is a context manager.

    The ``timeout`` of the socket applies to a line that is sent, and to each piece that is received. After it,
    ``TimeoutError`` is raised. If there is a callback ``on_silence``, the callback is called instead, and the wait
    continues.
    """

    def __init__(self, end: socket.socket, on_silence: Callable[[], None] | None = None) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._on_silence = on_silence

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def send(self, message: Message) -> None:
        """Send a message as one line; raise ``OSError`` if the peer has closed the connection."""
        if self._on_silence is None:
            self._socket.sendall(line_of(message))
            return
        left = memoryview(line_of(message))
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._on_silence()

    @property
    def has_more(self) -> bool:
        """True if at least part of a line has been received."""
        return bool(self._buffer)

    def receive(self) -> Message | None:
        """Return the next line, or None at the end; raise ``FormatError`` if it is invalid, or OSError."""
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start > LINE_MAX:
                raise FormatError(f"a line of the manager's protocol is longer than {LINE_MAX} bytes")
            try:
                piece = self._socket.recv(_PIECE)
            except TimeoutError:
                if self._on_silence is None:
                    raise
                self._on_silence()
                continue
            if not piece:
                if self._buffer:
                    raise FormatError("a line of the manager's protocol has no end")
                return None
            self._buffer += piece
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise FormatError("a line of the manager's protocol is not JSON") from None
        if not isinstance(message, dict):
            raise FormatError("a line of the manager's protocol is not a JSON object")
        return message


def line_of(message: Message) -> bytes:
    """Return a message as a line of JSON in UTF-8."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def message_of(error: DprobesError) -> Message:
    """Return the message that reports an error to the client."""
    return {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}


def error_of(message: Message) -> DprobesError:
    """Return the error that a message reports; a ``SourceError`` has the rendered diagnostics as its text."""
    reported = message["error"]
    text, hint = str(reported.get("message")), reported.get("hint")
    kind = getattr(errors, str(reported.get("kind")), ManagerError)
    if not (isinstance(kind, type) and issubclass(kind, DprobesError)):
        kind = ManagerError
    if kind is errors.SourceError:
        return errors.SourceError.rendered(text)
    return kind(text, hint=hint)
