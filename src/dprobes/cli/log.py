"""The verb ``log``: what the manager has recorded."""

from __future__ import annotations

import select
import sys
import time
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.options import PROGRAM_FILE
from dprobes.errors import FormatError
from dprobes.formatters import FORMATS, Formatter, formatter
from dprobes.record.place import Place
from dprobes.record.tracecontent import LostRecords, TraceRecord
from dprobes.record.tracefile import older_part
from dprobes.record.tracereader import TraceReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["command"]

_INTERVAL = 0.1
"""Seconds between two looks for more."""


@click.command("log")
@click.argument("file", type=PROGRAM_FILE, required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--name", metavar="NAME", help="Only records of the program of this name.")
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
def command(file: Path | None, follow: bool, name: str | None, format_name: str) -> int:
    """
    Print the records of a trace file, by default the manager's.

    That holds the latest records of all programs that were inserted, also of those that have been removed.
    """
    if file is None:
        from dprobes.manager.paths import manager_paths

        file = manager_paths().trace
        if not file.exists() and not follow:
            raise FormatError(f"'{file}': nothing has been recorded", hint="'dprobes insert FILE' begins it")
    printer = _Printer(format_name, name)
    try:
        for found in _followed(file) if follow else _recorded(file):
            printer.print(found)
    except KeyboardInterrupt:
        pass
    return 0


def _recorded(path: Path) -> Iterator[TraceRecord | LostRecords]:
    if older_part(path).exists():
        yield from _only(older_part(path))
    yield from _only(path)


def _followed(path: Path) -> Iterator[TraceRecord | LostRecords]:
    """Iterate over what is there and what comes, through all changes of the file."""
    while not path.exists():
        time.sleep(_INTERVAL)
    if older_part(path).exists():
        yield from _only(older_part(path))
    reader = TraceReader(path)
    while True:
        yield from reader.read()
        if reader.was_replaced and path.exists():
            yield from reader.read()  # what came before the change
            reader.close()
            reader = TraceReader(path)
            continue
        if _nobody_reads():
            return
        time.sleep(_INTERVAL)


def _nobody_reads() -> bool:
    """Return whether standard output is a pipe that nobody reads any more; writing would tell only with a record."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


def _only(path: Path) -> Iterator[TraceRecord | LostRecords]:
    reader = TraceReader(path)
    try:
        yield from reader.read()
    finally:
        reader.close()


class _Printer:
    """Print records as a formatter shows them, and say where some were lost."""

    def __init__(self, format_name: str, name: str | None) -> None:
        self._format_name = format_name
        self._name = name
        self._offset = 0
        self._format: Formatter = formatter(format_name, wall_offset=0)

    def print(self, found: TraceRecord | LostRecords) -> None:
        if self._name is not None and found.program.name != self._name:
            return
        if isinstance(found, LostRecords):
            console.warning(f"{found.count} records of '{found.program.name}' were lost here")
            return
        if found.wall_offset != self._offset:
            self._offset = found.wall_offset
            self._format = formatter(self._format_name, wall_offset=self._offset)
        where, function, placed = found.program.place(found.probe)
        click.echo(self._format.encoded(found.record, Place(found.program.name, where, function, placed)))
