"""A recording: hits that somebody wrote down, one JSON object a line (docs/engines.md)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dprobes.errors import EngineError, reason_of
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["RecordedHit", "read_recording"]


class RecordedHit(NamedTuple):
    """One hit: its line, for messages; the field and the value that name its probepoint; and all other fields."""

    where: str
    place: tuple[str, int | str]
    fields: dict[str, Any]


def read_recording(path: str) -> Iterator[RecordedHit]:
    """Iterate over the hits in a file; raise ``EngineError`` for a line that is none, or if it cannot be read."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _hit(line, f"{path}:{number}")
    except OSError as error:
        raise EngineError(f"the recording '{path}' cannot be read: {reason_of(error)}") from None


def _hit(line: bytes, where: str) -> RecordedHit:
    name = "hit"
    try:
        fields = _of(dict, "an object")(json.loads(line))
        for name, value in fields.items():
            fields[name] = _FIELDS[name](value)
    except KeyError:
        raise EngineError(f"{where}: a hit has no field '{name}'; fields are {', '.join(_FIELDS)}") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where}: '{name}': {error}") from None
    places = [(name, fields.pop(name)) for name in ("probe", "offset", "address", "symbol") if name in fields]
    if len(places) != 1:
        raise EngineError(f"{where}: a hit has one of the fields probe, offset, address, symbol")
    return RecordedHit(where, places[0], fields)


def _number(value: object) -> int:
    number = int(value, 0) if isinstance(value, str) else value
    if type(number) is not int or not 0 <= number < 1 << 64:
        raise ValueError(f"expected a number of up to 64 bits, found {json.dumps(value)}")
    return number


def _of(kind: type, called: str) -> Callable[[Any], Any]:
    def check(value: object) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {called}, found {json.dumps(value)}")
        return value

    return check


def _mapping(key: Callable[[Any], Any], item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: {key(name): item(each) for name, each in _of(dict, "an object")(value).items()}


_TEXT = _of(str, "a string")
_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("probe", "offset", "address", "base", "pid", "tid", "uid", "cpu", "task", "time"), _number),
    **dict.fromkeys(("symbol", "name"), _TEXT),
    "return": _of(bool, "true or false"),
    **dict.fromkeys(("registers", "entry"), _mapping(str, _number)),
    "segments": _mapping(_number, _number),
    **dict.fromkeys(("memory", "read_only"), _mapping(_number, lambda value: bytes.fromhex(_TEXT(value)))),
}
