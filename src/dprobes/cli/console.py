"""
Messages for people, on standard error; standard output is for results.

What is quoted in them may be anybody's: nothing that disturbs a line or a terminal gets through.
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
    """Print text of several lines of ours; where nobody takes it, it is lost, and the command goes on."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(escaped_lines(text) + "\n")
        sys.stderr.flush()


def _message(severity: str, message: str, hint: str | None, details: str = "") -> None:
    text = f"dprobes: {severity}: {escaped(message)}"
    if details:
        text += f"\n{details}"
    write(text + (f"\nhint: {escaped(hint)}" if hint else ""))


def error(message: str, hint: str | None = None) -> None:
    """Print what ended the command."""
    _message("error", message, hint)


def warning(message: str, hint: str | None = None, details: str = "") -> None:
    """Print what the user should know although the command goes on; ``details`` are lines of ours below it."""
    _message("warning", message, hint, details)


def note(message: str, hint: str | None = None, details: str = "") -> None:
    """Print what helps to understand the command's output; ``details`` are lines of ours below it."""
    _message("note", message, hint, details)


def width() -> int | None:
    """Return how many columns the terminal has that messages go to; None if they go somewhere else."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def is_number(text: str) -> bool:
    """Return whether a cell of a table is a number: decimal, perhaps with a sign or a fraction."""
    return text.removeprefix("-").replace(".", "", 1).isdigit()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns under a header, each on one line; a column of numbers is aligned to the right."""
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
# What is in them may be anybody's: nothing that disturbs a line or a terminal gets through.


def _write_result(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_line(line: str = "") -> None:
    """Print one line."""
    _write_result(escaped(line))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, the whole at once."""
    _write_result("\n".join(map(escaped, lines)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under a header, and a title above it."""
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
        # A number is not broken, nor is a word of the header.
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
