"""A keyed table as users of the Python API read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.keyed.json import table_objects, value_object
from dprobes.keyed.layout import shown_value
from dprobes.keyed.parts import NO_NAMES, Names, kept_part, parts_of
from dprobes.keyed.text import table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.keyed.contents import TableContents

__all__ = ["KeyedTable"]


class KeyedTable:
    """
    A table at the moment at which it was asked for: a mapping from keys to values, by tuples of the keys' parts.

    ``lost`` counts the values that found no room for their keys. A part of a key is a number, a string, or a tuple of
    the frames of a stack. The value is the number that ``push table`` gives, or, of a table that keeps these, a string
    or the frames of a stack; ``details`` has all that is kept for a key.
    """

    def __init__(self, contents: TableContents, names: Names = NO_NAMES) -> None:
        self.contents = contents
        self.name = contents.table.name
        self.kind = contents.table.kind.value
        self.unit = contents.table.unit.value
        self.lost = contents.lost
        self._names = names
        self._rows = {self._key(row.key): row.cells for row in contents.rows}

    def _key(self, key: bytes) -> tuple[Any, ...]:
        parts = parts_of(self.contents.table, key, self._names)
        return tuple(tuple(part) if isinstance(part, list) else part for part in parts)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        table, cells = self.contents.table, self._rows[key]
        if not table.keeps_bytes:
            return shown_value(table, cells)
        part = kept_part(table, cells, self._names)
        return tuple(part) if isinstance(part, list) else part

    def get(self, key: tuple[Any, ...], default: Any = 0) -> Any:
        """Return what is under a key, or ``default``."""
        return self[key] if key in self._rows else default

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Iterate over keys and values."""
        return ((key, self[key]) for key in self._rows)

    def details(self, key: tuple[Any, ...]) -> dict[str, Any]:
        """Return all that is kept for a key: ``value``, or ``count``, ``sum``, ``buckets`` and so on, as in JSON."""
        return value_object(self.contents.table, self._rows[key], self._names)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as in JSON, the greatest number last."""
        return list(table_objects(self.contents, names=self._names))

    def __str__(self) -> str:
        return "\n".join(table_lines(self.contents, names=self._names))

    def __repr__(self) -> str:
        return f"<KeyedTable {self.name}: {self.kind}, {len(self)} keys>"
