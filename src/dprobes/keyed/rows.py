"""
Rows of tables as single lines with their data beside them, for whoever takes messages or events.

::

    @hits[bash, 3]: 42
    @latency[bash]: [1, 2) 2, [2, 4) 10; 12 in all; about p50 2.8, p90 3.8, p99 4
    @leaks[malloc+0x4 [libc.so.6]; main]: 16

The data of a row is that of JSON (``json``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dprobes.keyed.json import value_object
from dprobes.keyed.layout import buckets_of
from dprobes.keyed.parts import NO_NAMES, Names, parts_of
from dprobes.keyed.quantities import bucket_label
from dprobes.keyed.text import lost_text, ordered_rows, quantiles_text, shown_name, value_text
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.keyed.contents import TableContents

__all__ = ["ShownRow", "shown_rows"]


class ShownRow(NamedTuple):
    """
    What is said of a row.

    ``title`` is the table with the key, ``text`` the value, ``keys`` are the parts of the key. ``value`` has what
    JSON says of the value; that of the last row is ``lost`` where tallies found no room.
    """

    title: str
    text: str
    keys: tuple[str, ...]
    value: dict[str, Any]

    @property
    def line(self) -> str:
        """Title and value."""
        return f"{self.title}: {self.text}"


def shown_rows(contents: TableContents, names: Names = NO_NAMES, limit: int | None = None) -> Iterator[ShownRow]:
    """Iterate over the rows of a table, the greatest value last; with ``limit`` over so many of these."""
    table, name = contents.table, shown_name(contents.table)
    for row in ordered_rows(contents, limit):
        keys = tuple(
            "; ".join(part) if isinstance(part, list) else str(part) for part in parts_of(table, row.key, names)
        )
        title = f"{name}[{', '.join(keys)}]" if keys else name
        if buckets := buckets_of(table):
            filled = [
                f"{bucket_label(table, bucket)} {count}"
                for bucket, count in zip(buckets, row.cells, strict=True)
                if count
            ]
            text = "; ".join((", ".join(filled), quantiles_text(table, row.cells)))
        else:
            text = value_text(table, row.cells, names)
            if isinstance(part := value_object(table, row.cells, names).get("value"), list):
                text = "; ".join(part)
        yield ShownRow(title, text, keys, value_object(table, row.cells, names))
    if contents.lost:
        yield ShownRow(name, lost_text(contents), (), {"lost": contents.lost})
