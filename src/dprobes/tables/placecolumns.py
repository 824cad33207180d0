"""The columns that say where probepoints are, and names as tables have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped
from dprobes.tables.schema import HEADER_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from dprobes.trace.content import TraceProgram

__all__ = ["clean", "place_columns"]

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
