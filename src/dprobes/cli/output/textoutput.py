"""
Lines and tables on standard output: framed by rich at a terminal, aligned columns in a pipe.

What is in them may be anybody's: nothing that disturbs a line or a terminal gets through.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dprobes.cli.console import is_number, table
from dprobes.escapes import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["print_line", "print_lines", "print_table"]


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_line(line: str = "") -> None:
    """Print one line."""
    _write(escaped(line))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines, the whole at once."""
    _write("\n".join(map(escaped, lines)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under a header, and a title above it."""
    if not sys.stdout.isatty():
        if title:
            print_line(title)
        _write(table(header, rows))
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
