"""The verb ``format``: the records of a file or a stream as text. They may be from another machine."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from dprobes.cli import console
from dprobes.cli.output.record_printer import DamageReport, Printer, skip_damaged_option
from dprobes.cli.record_options import read_templates, templates_option
from dprobes.errors import FormatError, reason_of
from dprobes.formatters import FORMATS
from dprobes.record.line_frames import Frame, FrameDecoder, Garbage, Lost
from dprobes.record.record_origin import RecordSource
from dprobes.sinks.target_kinds import is_trace_name
from dprobes.trace.trace_content import LostRecords, PlaceEntry, TraceOrigin, TraceProgram, TraceRecord
from dprobes.trace.trace_frames import is_trace
from dprobes.trace.trace_reader import TraceParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from dprobes.trace.trace_content import Damage

__all__ = ["format_command"]

_PIECE = 1 << 20


@click.command("format")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@templates_option("Prefer the templates in this directory to those in FILE.")
@click.option("--format", "format_name", type=click.Choice(FORMATS), default="text", show_default=True)
@skip_damaged_option()
def format_command(file: Path, templates: Path | None, format_name: str, skip_damaged: bool) -> int:
    """
    Print the records of FILE: a trace file, or the output of --log-format binary, also from another machine.

    A trace file contains the templates of its programs. With - as FILE standard input is read.
    """
    printer = Printer(format_name, read_templates(templates))
    report = DamageReport()
    with _opened(file) as stream:
        try:
            name = "standard input" if file == _DASH else str(file)
            printer.print(_records(stream, name, report if skip_damaged else None))
        except KeyboardInterrupt:
            return 130
        finally:
            report.finish()
    return 0


_DASH = Path("-")


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if file == _DASH:
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise FormatError(f"'{file}': {reason_of(error)}") from error


def _records(
    stream: BinaryIO, name: str, on_damage: Callable[[Damage], None] | None
) -> Iterator[TraceRecord | LostRecords]:
    """
    Iterate over records and notes of lost records in a stream, as soon as they can be read.

    ``name`` is the name of the stream in messages. ``on_damage`` is called for skipped bytes. Without it, damage raises
    ``FormatError``.
    """
    pieces = _pieces(stream, name)
    begin = b""
    for piece in pieces:
        begin += piece
        if len(begin) >= _BEGIN:
            break
    if not begin:
        return
    if is_trace(begin) or (on_damage is not None and is_trace_name(name)):
        yield from _trace(begin, pieces, name, on_damage)
    else:
        yield from _frames(begin, pieces, name)


_BEGIN = 16
"""Number of bytes that identify the kind of a stream."""


def _pieces(stream: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        while piece := stream.read(_PIECE):
            yield piece
    except OSError as error:
        raise FormatError(f"'{name}': {reason_of(error)}") from error


def _trace(
    begin: bytes, pieces: Iterator[bytes], name: str, on_damage: Callable[[Damage], None] | None
) -> Iterator[TraceRecord | LostRecords]:
    parser = TraceParser(name, on_damage)
    pieces = chain((begin,), pieces)
    piece: bytes | None = b""
    while piece is not None:
        try:
            for found in parser.feed(piece):
                if isinstance(found, LostRecords):
                    yield found
                else:
                    yield from found
            if (piece := next(pieces, None)) is None:
                parser.check_end()
        except FormatError as error:
            if on_damage is None or error.offset != parser.position:
                raise
            piece = b"" if _skip(parser, pieces) else None


def _skip(parser: TraceParser, pieces: Iterator[bytes]) -> bool:
    """
    Skip damaged bytes of a trace, and return whether an intact frame follows.

    ``pieces`` is the rest of the file; the bytes that it yields are passed to the parser.
    """
    while not parser.skip(at_end=False):
        if (piece := next(pieces, None)) is None:
            return parser.skip(at_end=True)
        parser.push(piece)
    return True


def _frames(begin: bytes, pieces: Iterator[bytes], name: str) -> Iterator[TraceRecord | LostRecords]:
    """
    Iterate over the records in the output of ``--log-format binary``; report bytes between frames at the end.

    ``begin`` has the bytes already read, ``pieces`` the rest. ``name`` is the name of the file in messages. Raise
    ``FormatError`` if there are bytes but no record.
    """
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
        console.warning(f"{garbage} bytes between the records of '{name}' are not records, and were skipped")
