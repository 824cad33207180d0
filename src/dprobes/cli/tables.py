"""Tables on standard output: framed by rich at a terminal, aligned columns in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from dprobes.cli.console import table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["print_table"]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under a header, and a title above it."""
    if not sys.stdout.isatty():
        if title:
            click.echo(title)
        click.echo(table(header, rows))
        return
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    shown = Table(
        title=escape(title) or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for n, name in enumerate(header):
        numeric = bool(rows) and all(row[n].isdigit() for row in rows)
        # A number is not broken, nor is a word of the header.
        shown.add_column(
            escape(name),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric and " " not in name,
            min_width=max(map(len, name.split()), default=0),
        )
    for row in rows:
        shown.add_row(*(escape(cell) for cell in row))
    Console().print(shown)
