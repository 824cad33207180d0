"""The verb ``format``: records from elsewhere as text."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from dprobes.cli import console
from dprobes.cli.logprinting import Printer
from dprobes.cli.templates import read_templates, templates_option
from dprobes.errors import FormatError, reason_of
from dprobes.formatters import FORMATS
from dprobes.record.framing import Frame, FrameDecoder, Garbage, Lost
from dprobes.record.source import RecordSource
from dprobes.record.tracecontent import LostRecords, PlaceEntry, TraceOrigin, TraceProgram, TraceRecord
from dprobes.record.traceframes import is_trace
from dprobes.record.traceparser import TraceParser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["command"]

_PIECE = 1 << 20


@click.command("format")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@templates_option("Print records by the templates in this directory before those that are in FILE.")
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
def command(file: Path, templates: Path | None, format_name: str) -> int:
    """
    Print the records of FILE, which may come from another machine: a trace file, or what --log-format binary gave.

    The templates that programs brought with them are in a trace file. With - for FILE standard input is read.
    """
    printer = Printer(format_name, read_templates(templates))
    with _opened(file) as stream:
        try:
            printer.print(_records(stream, "standard input" if file == _DASH else str(file)))
        except KeyboardInterrupt:
            return 130
    return 0


_DASH = Path("-")


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if file == _DASH:
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise FormatError(f"'{file}': {reason_of(error)}") from error


def _records(stream: BinaryIO, name: str) -> Iterator[TraceRecord | LostRecords]:
    """Iterate over what is in a stream, as it comes."""
    pieces = _pieces(stream, name)
    begin = b""
    for piece in pieces:
        begin += piece
        if len(begin) >= _BEGIN:
            break
    if not begin:
        return
    if is_trace(begin):
        yield from _trace(begin, pieces, name)
    else:
        yield from _frames(begin, pieces, name)


_BEGIN = 16
"""Bytes that tell what a stream is."""


def _pieces(stream: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        while piece := stream.read(_PIECE):
            yield piece
    except OSError as error:
        raise FormatError(f"'{name}': {reason_of(error)}") from error


def _trace(begin: bytes, pieces: Iterator[bytes], name: str) -> Iterator[TraceRecord | LostRecords]:
    parser = TraceParser(name)
    for piece in chain((begin,), pieces):
        for found in parser.feed(piece):
            if isinstance(found, LostRecords):
                yield found
            else:
                yield from found


def _frames(begin: bytes, pieces: Iterator[bytes], name: str) -> Iterator[TraceRecord | LostRecords]:
    """Iterate over records in frames; what lies between them is said at the end."""
    program = TraceProgram(RecordSource(0, name), places=[PlaceEntry("")], origin=TraceOrigin(name))
    decoder = FrameDecoder()
    count = garbage = 0
    for found in chain(chain.from_iterable(map(decoder.feed, chain((begin,), pieces))), decoder.finish()):
        match found:
            case Frame(record):
                count += 1
                yield TraceRecord(program, 0, record, wall_offset=0, written=0)
            case Lost(lost):
                yield LostRecords(program, lost, wall_time=0)
            case Garbage(size):
                garbage += size
    if garbage and not count:
        hint = "it may be a trace file (.dpt), or records as '--log-format binary' sends them"
        raise FormatError(f"'{name}' holds no records", hint=hint)
    if garbage:
        console.warning(f"{garbage} bytes between the records of '{name}' are none, and were passed over")
