"""The numbers of processes that have a name, for who gives a name where a number is asked for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["processes_named"]

_SHOWN_MAX = 5


def processes_named(name: str) -> str:
    """Return a clause that says which processes have a name, or execute a file of that name."""
    found = [number for number in sorted(_all()) if name in _names(number)]
    if not found:
        return "and none has that name"
    shown = ", ".join(map(str, found[:_SHOWN_MAX]))
    more = f" and {len(found) - _SHOWN_MAX} more" if len(found) > _SHOWN_MAX else ""
    return f"the process of that name is {shown}" if len(found) == 1 else f"processes of that name are {shown}{more}"


def _all() -> Iterator[int]:
    own = os.getpid()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != own:
            yield int(path.name)


def _names(number: int) -> set[str]:
    process = Path(f"/proc/{number}")
    names = set()
    with contextlib.suppress(OSError):
        names.add((process / "comm").read_text(errors="surrogateescape").rstrip("\n"))
        names.add((process / "exe").readlink().name)
    return names
