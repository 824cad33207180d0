r"""
The paper's text: a header line, then the data in hexadecimal (seed 000, section 5; recovered reference 3.1).

::

    DProbes(%d,%d) cpu=%d name=%s pid=%d uid=%d cs=%x eip=%08lx ss=%x esp=%08lx tsc=%08lx:%08lx

An item that the record does not carry is left out. Programs with 8-byte words have ``rip=%016lx`` and ``rsp=%016lx``; a
thread id, ``cut=1`` where the log buffer had no room for all, and the function that a pattern matched (these are ours)
come last. ``tsc`` is wall-clock time in seconds and microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.escapes import escaped
from dprobes.formatters.headerlines import HeaderLines
from dprobes.formatters.hexdump import hex_dump
from dprobes.record.codec import decode_record

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord
    from dprobes.record.probeinfo import Place

__all__ = ["DumpFormatter", "HexFormatter", "header_line"]

_NANOSECONDS = 1_000_000_000


def header_line(record: LogRecord, wall_offset: int, function: str = "") -> str:
    """Return the header of a record; ``function`` is named in it if it is not empty."""
    parts = [f"DProbes({record.major or 0},{record.minor or 0})"]
    if record.cpu is not None:
        parts.append(f"cpu={record.cpu}")
    if record.process_name is not None:
        parts.append(f"name={escaped(record.process_name, blanks=True)}")
    if record.pid is not None:
        parts.append(f"pid={record.pid}")
    if record.uid is not None:
        parts.append(f"uid={record.uid}")
    wide = record.word_size == 8
    if record.cs is not None:
        parts.append(f"cs={record.cs:x}")
    if record.ip is not None:
        parts.append(f"rip={record.ip:016x}" if wide else f"eip={record.ip:08x}")
    if record.ss is not None:
        parts.append(f"ss={record.ss:x}")
    if record.sp is not None:
        parts.append(f"rsp={record.sp:016x}" if wide else f"esp={record.sp:08x}")
    if record.time is not None:
        seconds, nanoseconds = divmod(record.time + wall_offset, _NANOSECONDS)
        parts.append(f"tsc={seconds:08x}:{nanoseconds // 1000:08x}")
    if record.tid is not None:
        parts.append(f"tid={record.tid}")
    if record.is_cut:
        parts.append("cut=1")
    if function:
        parts.append(f"function={escaped(function, blanks=True)}")
    return " ".join(parts)


class HexFormatter:
    """Print the header line, and the data as bytes in hexadecimal."""

    heading = ""

    def __init__(self, wall_offset: int) -> None:
        self.wall_offset = wall_offset
        self._headers = HeaderLines()

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""
        header = header_line(record, self.wall_offset, place.function)
        return f"{header}\n{record.data.hex(' ')}" if record.data else header

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the text of an encoded record."""
        split = self._headers.split(record, self.wall_offset, place.function)
        if split is None:
            return self(decode_record(record), place)
        header, start = split
        data = record[start:]
        return f"{header}\n{data.hex(' ')}" if data else header


class DumpFormatter:
    """Print the header line, and the data as a dump."""

    heading = ""

    def __init__(self, wall_offset: int) -> None:
        self.wall_offset = wall_offset

    def __call__(self, record: LogRecord, place: Place) -> str:
        """Return the text of a record."""
        header = header_line(record, self.wall_offset, place.function)
        return f"{header}\n{hex_dump(record.data)}" if record.data else header

    def encoded(self, record: bytes, place: Place) -> str:
        """Return the text of an encoded record."""
        return self(decode_record(record), place)
