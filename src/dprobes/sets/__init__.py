"""
Instrumentation sets: probe programs whose probes have promised names and fields.

A set is a directory with ``set.toml``, its description, and files in DProbes C. A view of a set is another program in
its directory, which answers one question, or a query in SQL on the records of its probes. ``set_description`` reads the
description, ``set_library`` finds sets by name, and ``set_program`` makes a program of a set or a view. The names and
fields of probes are promised; the places at which they are inserted are not, and may differ between versions of a
module.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SET_FILE", "is_set_name", "is_set_path", "is_view_name", "view_in"]

SET_FILE = "set.toml"
"""The name of the description in the directory of a set. A program with this name is a set."""

_VIEW = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?", re.ASCII)


def is_set_name(word: str) -> bool:
    """Return whether a word can be the name of a set: ``sqlite``, ``net.tcp``."""
    return _NAME.fullmatch(word) is not None


def is_view_name(word: str) -> bool:
    """Return whether a word can be the name of a view: ``queries``, ``off-cpu``."""
    return _VIEW.fullmatch(word) is not None


def is_set_path(path: Path) -> bool:
    """Return whether a program's path is that of a set, its ``set.toml``, or of a view, ``set.toml/VIEW``."""
    return SET_FILE in (path.name, path.parent.name)


def view_in(path: Path) -> str | None:
    """Return the name of the view in the path of a program; None for a set, and for other programs."""
    return path.name if path.parent.name == SET_FILE else None
