"""The fields that ``--count``, ``--hist``, ``--sum`` and ``--by`` name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click

from dprobes.lazynamedtuple import NamedTuple
from dprobes.record.layout import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WantedFields"]


class WantedFields(NamedTuple):
    """Hold the fields of ``--count``, each of which makes a table, of ``--hist``, ``--sum`` and ``--by``."""

    counted: tuple[tuple[str, ...], ...] = ()
    measured: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    @classmethod
    def of_options(
        cls, counted: Sequence[str], measured: Sequence[str], summed: Sequence[str] = (), by: Sequence[str] = ()
    ) -> Self:
        """Return what options say; raise ``UsageError`` if they do not go together."""
        found = cls(
            tuple(_fields_of(text) for text in counted),
            tuple(text.strip() for text in measured),
            tuple(text.strip() for text in summed),
            tuple(dict.fromkeys(field for text in by for field in _fields_of(text))),
        )
        if found.by and not (found.measured or found.summed):
            raise click.UsageError("--by is about --hist and --sum; --count takes several fields: --count name,pid")
        return found

    def __bool__(self) -> bool:
        return bool(self.counted or self.measured or self.summed)

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all fields."""
        return (*(field for fields in self.counted for field in fields), *self.measured, *self.summed, *self.by)

    @property
    def items(self) -> Item:
        """The header items that are needed for them."""
        from dprobes.formatters.fieldvalues import HEADER_FIELDS

        items = Item(0)
        for field in self.all:
            items |= HEADER_FIELDS.get(field, Item(0))
        return items


def _fields_of(text: str) -> tuple[str, ...]:
    """Return the fields that a ``--count`` names."""
    return tuple(field.strip() for field in text.split(","))
