"""The columns of lines at a terminal: aligned, and in colours where the user wants some."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["STYLES", "TerminalColumns", "columns_of"]

STYLES = {"time": "2", "process": "36", "place": "1"}
"""The columns, with how they look: dim, cyan, bold (ECMA-48, 8.3.117, "select graphic rendition")."""

_WIDTH_MAX = 40
"""What is wider moves the rest of its line, and no other."""


class TerminalColumns:
    """Keep how wide the columns of an output have become; lines of several formatters are aligned by one of these."""

    def __init__(self, *, has_colours: bool) -> None:
        self._has_colours = has_colours
        self._widths = dict.fromkeys(STYLES, 0)

    def shown(self, column: str, text: str) -> str:
        """Return the text of a column as it is to be printed."""
        if len(text) <= _WIDTH_MAX:
            self._widths[column] = max(self._widths[column], len(text))
        padding = " " * (self._widths[column] - len(text))
        return f"\x1b[{STYLES[column]}m{text}\x1b[0m{padding}" if self._has_colours else text + padding


def columns_of(stream: TextIO) -> TerminalColumns | None:
    """Return the columns of what is printed to a stream; None if that is no terminal. See https://no-color.org."""
    if not stream.isatty():
        return None
    return TerminalColumns(has_colours=not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb")
