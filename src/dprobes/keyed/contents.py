"""What a table says at a moment, for all who show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from dprobes.rpn.tables import Table

__all__ = ["TableContents", "TableRow"]


class TableRow(NamedTuple):
    """A key, and the cells of its value (``layout``)."""

    key: bytes
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TableContents:
    """A table with its rows in no order; ``lost`` tallies found no room for their keys, or could not be carried."""

    table: Table
    rows: tuple[TableRow, ...] = ()
    lost: int = 0
