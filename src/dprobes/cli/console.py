"""
Messages to the user, on standard error, and lines and tables on standard output, which is for results.

Quoted text is untrusted: characters that disturb a line or a terminal are escaped.

An operation that takes more than a second has a progress line on standard error, if that is a terminal. The cursor is
left at the line's beginning, so that other output overwrites it. The line is cleared when the operation ends, at the
latest with the command. It bypasses Python's streams, because a process that is forked meanwhile must not inherit
locked locks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from dprobes.escapes import escaped, escaped_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

__all__ = [
    "Progress",
    "clear_screen",
    "counted",
    "error",
    "note",
    "print_line",
    "print_lines",
    "print_table",
    "table",
    "warning",
    "width",
    "write",
]


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
    """Print the error that ended the command on standard error. ``hint`` is a remedy, on a line of its own."""
    _message("error", message, hint)


def warning(message: str, hint: str | None = None, details: str = "") -> None:
    """Print a warning, after which the command continues; ``details`` are trusted lines printed below it."""
    _message("warning", message, hint, details)


def note(message: str, hint: str | None = None, details: str = "") -> None:
    """Print information about the command's output; ``details`` are trusted lines printed below it."""
    _message("note", message, hint, details)


def width() -> int | None:
    """Return the number of columns of the terminal for messages, or None if standard error is not a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


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


def clear_screen() -> None:
    """Clear the screen if standard output is a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")


def print_line(line: str = "") -> None:
    """Print one line on standard output."""
    _write_result(escaped(line))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines with one write to standard output. Tabs are not escaped."""
    _write_result("\n".join(escaped(line, "\t") for line in lines))


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


_PATIENCE = 1.0
"""Seconds before the line is shown."""

_INTERVAL = 0.5

_STANDARD_ERROR = 2

_CLEAR = "\r\x1b[K"
"""Move the cursor to the beginning of the line, and erase it (ECMA-48, 8.3.41, "erase in line")."""


class Progress:
    """A progress line; as a context manager, for the duration of its block."""

    def __init__(self, what: str = "") -> None:
        self._what = what
        self._ended: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of_command(cls) -> Self:
        """Return a progress line that ends with the current command, before the command's error is printed."""
        from click import get_current_context

        progress = cls()
        get_current_context().call_on_close(progress.end)
        return progress

    def __enter__(self) -> Self:
        self.begin(self._what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, what: str) -> None:
        """Show the operation ``what`` if it lasts longer than ``_PATIENCE`` seconds from now on."""
        self.end()
        if os.isatty(_STANDARD_ERROR) and os.environ.get("TERM", "dumb") != "dumb":
            self._ended = threading.Event()
            self._thread = threading.Thread(target=_show, args=(what, self._ended), daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Erase the progress line from the terminal."""
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join(_PATIENCE)  # the timeout is for a stopped terminal
            self._ended = self._thread = None


def _show(what: str, ended: threading.Event) -> None:
    began = time.monotonic()
    if ended.wait(_PATIENCE):
        return
    while True:
        _write(f"\r{what} ... {time.monotonic() - began:.0f} s\x1b[K\r")
        if ended.wait(_INTERVAL):
            break
    _write(_CLEAR)


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STANDARD_ERROR, text.encode())
