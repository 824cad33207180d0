"""
The items of loops in blocks of the tool: tasks of the system, files and mappings of a process.

``FIELDS`` is the only list of their fields. The values are those of proc(5) at the time of the loop.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from dprobes.dpc.types.c_types import INT, UNSIGNED_LONG_LONG, Integer

__all__ = ["FIELDS", "ITEMS_MAX", "ItemKind", "ProcessItem", "numbers_of", "strings_of"]

ITEMS_MAX = 1 << 20
"""Maximum number of items that all loops of one execution of a block visit."""


class ItemKind(Enum):
    """The kind of the items of a loop; the value is the word in the source."""

    TASKS = "tasks"
    FILES = "files"
    MAPS = "maps"

    @property
    def is_of_process(self) -> bool:
        """True for items of one process, whose number is in parentheses after the word."""
        return self is not ItemKind.TASKS


_TEXT_MAX = 0
"""Size of a string field whose length is limited by ``max_strlen`` of the program only."""

FIELDS: dict[ItemKind, dict[str, Integer | int]] = {
    ItemKind.TASKS: {"pid": INT, "tid": INT, "ppid": INT, "state": 1, "comm": 63},
    ItemKind.FILES: {"fd": INT, "path": _TEXT_MAX},
    ItemKind.MAPS: {
        "begin": UNSIGNED_LONG_LONG,
        "end": UNSIGNED_LONG_LONG,
        "offset": UNSIGNED_LONG_LONG,
        "permissions": 4,
        "path": _TEXT_MAX,
    },
}
"""The fields of the items: the type of a number, or the maximum number of bytes of a string."""


class ProcessItem(NamedTuple):
    """One item of a loop: its numbers and its strings, each in the order of ``FIELDS``."""

    numbers: tuple[int, ...]
    strings: tuple[bytes, ...]


def numbers_of(kind: ItemKind) -> list[str]:
    """Return the names of the fields that are numbers."""
    return [name for name, form in FIELDS[kind].items() if isinstance(form, Integer)]


def strings_of(kind: ItemKind) -> list[str]:
    """Return the names of the fields that are strings."""
    return [name for name, form in FIELDS[kind].items() if not isinstance(form, Integer)]
