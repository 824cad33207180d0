"""
Messages to the user, on standard error, and lines and tables on standard output, which is for results.

Quoted text is untrusted: characters that disturb a line or a terminal are escaped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from dprobes.escapes import escaped, escaped_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["error", "note", "print_line", "print_lines", "print_table", "table", "warning", "width", "write"]


def write(text: str) -> None:
    """Print text of several lines on standard error; text that cannot be written is lost, and the command continues."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(escaped_lines(text) + "\n")
        sys.stderr.flush()


def _message(severity: str, message: str, hint: str | None, details: str = "") -> None:
    text = f"dprobes: {severity}: {escaped(message)}"
    if details:
        text += f"\n{details}"
    write(text + (f"\nhint: {escaped(hint)}" if hint else ""))


def error(message: str, hint: str | None = None) -> None:
    """Print the error that ended the command."""
    _message("error", message, hint)


def warning(message: str, hint: str | None = None, details: str = "") -> None:
    """Print a warning, after which the command continues; ``details`` are trusted lines printed below it."""
    _message("warning", message, hint, details)


def note(message: str, hint: str | None = None, details: str = "") -> None:
    """Print information about the command's output; ``details`` are trusted lines printed below it."""
    _message("note", message, hint, details)


def width() -> int | None:
    """Return the number of columns of the terminal for messages; None if standard error is not a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def is_number(text: str) -> bool:
    """Return whether a table cell is a decimal number, with an optional sign or fraction."""
    return text.removeprefix("-").replace(".", "", 1).isdigit()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns under a header, each on one line; columns of numbers are right-aligned."""
    header, rows = [*map(escaped, header)], [[*map(escaped, row)] for row in rows]
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    right = [bool(rows) and all(is_number(row[n]) for row in rows) for n in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# Lines and tables on standard output: framed by rich at a terminal, aligned columns in a pipe.
#
# Their contents are untrusted: characters that disturb a line or a terminal are escaped.


def _write_result(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_line(line: str = "") -> None:
    """Print one line."""
    _write_result(escaped(line))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines with one write to standard output."""
    _write_result("\n".join(map(escaped, lines)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under a header, with an optional title above."""
    if not sys.stdout.isatty():
        if title:
            print_line(title)
        _write_result(table(header, rows))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(
        title=escape(escaped(title)) or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for n, name in enumerate(header):
        numeric = bool(rows) and all(is_number(row[n]) for row in rows)
        # Numbers and the words of the header are not wrapped.
        shown.add_column(
            escape(escaped(name)),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric and " " not in name,
            min_width=max(map(len, name.split()), default=0),
        )
    for row in rows:
        shown.add_row(*(escape(escaped(cell)) for cell in row))
    Console().print(shown)
