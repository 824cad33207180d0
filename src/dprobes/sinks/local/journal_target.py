"""
systemd journal, by its native protocol (systemd's documentation, JOURNAL_NATIVE_PROTOCOL).

Each entry is a datagram of fields. A field is ``NAME=value`` and a line end. If the value is binary or has several
lines, the field is ``NAME``, a line end, the length as a little-endian u64, the value and a line end. An entry that is
too large for a datagram is sent as the descriptor of a sealed memory file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING

from dprobes.errors import SinkError, reason_of
from dprobes.escapes import json_text
from dprobes.sinks.structured_records import DescribedRecords, lost_text, names_text, place_items, value_text
from dprobes.sinks.text_sinks import refuse_binary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.keyed.table_layout import TableContents
    from dprobes.keyed.table_text import ShownRow
    from dprobes.record.record_origin import Place, RecordSource
    from dprobes.rpn.keyed_tables import Table
    from dprobes.sinks import Batch, Sink, SinkOptions
    from dprobes.sinks.structured_records import KnownRecord

__all__ = ["MESSAGE_ID", "JournalSink", "open"]

_SOCKET = "/run/systemd/journal/socket"

_PATIENCE = 10.0
"""Seconds without progress after which a write to the journal fails."""

MESSAGE_ID = "8f3b6a0c6f0f4c0ea2e7d4a1c95d2b17"
"""The MESSAGE_ID of all records in the journal: ``journalctl MESSAGE_ID=…``."""

_NAME_MAX = 64
"""Maximum length of a field's name in bytes: journald drops fields with longer ones."""

_INFO, _WARNING = "6", "4"

_TOO_LARGE = (errno.EMSGSIZE, errno.ENOBUFS)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def open(argument: str, options: SinkOptions) -> Sink:  # noqa: A001 - the name that all sinks have
    """
    Return the sink for journald's socket, or for the socket whose path is ``argument``.

    Raise ``SinkError`` if that fails.
    """
    refuse_binary("journal", options)
    return JournalSink(argument or _SOCKET, options.format_name)


class JournalSink:
    """A sink that sends each record as a journal entry, its text as message, its items and values as fields."""

    def __init__(self, path: str, format_name: str) -> None:
        self._path = path
        self._records = DescribedRecords(format_name)
        self.create_event = self._records.create_event
        self.destroy_event = self._records.destroy_event
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_PATIENCE)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            hint = None
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED) and path == _SOCKET:
                hint = "no systemd-journald runs here; use 'syslog' or a file"
            raise SinkError(f"the journal at '{path}' cannot be reached: {reason_of(error)}", hint=hint) from error

    def log_events(self, batch: Batch) -> None:
        """Send the records of a batch, preceded by the number of lost ones."""
        taken = 0
        try:
            if batch.lost:
                self._send(_lost_entry(batch))
            for each in self._records.of_batch(batch):
                self._send(_entry(batch, *each))
                taken += 1
        except OSError as error:
            raise self._error(error, taken) from error

    def _error(self, error: OSError, taken: int = 0) -> SinkError:
        said = f"no data was accepted for {_PATIENCE:.0f} s" if isinstance(error, TimeoutError) else reason_of(error)
        return SinkError(f"the journal at '{self._path}': {said}", taken=taken)

    def log_tables(self, source: RecordSource, contents: Sequence[TableContents]) -> None:
        """Send a journal entry for each row of a program's keyed tables."""
        from dprobes.formatters.table_addresses import names_for
        from dprobes.keyed.table_text import shown_rows

        names = names_for(source, [each.table for each in contents])
        try:
            for each in contents:
                for row in shown_rows(each, names):
                    self._send(_table_entry(source, each.table, row))
        except OSError as error:
            raise self._error(error) from error

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.send(entry)
        except OSError as error:
            if error.errno not in _TOO_LARGE:
                raise
            self._send_as_file(entry)

    def _send_as_file(self, entry: bytes) -> None:
        file = os.memfd_create("dprobes-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(file, entry)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            socket.send_fds(self._socket, [b""], [file])
        finally:
            os.close(file)

    def flush(self) -> None:
        """Do nothing: entries are sent at once."""

    def close(self) -> None:
        """Close the socket to journald."""
        self._socket.close()


def _entry(batch: Batch, text: str, place: Place, data: bytes, known: KnownRecord | None) -> bytes:
    message = text.rstrip("\r\n")
    if known is None:
        return _encoded([*_common(message, _WARNING), ("DPROBES_PROGRAM", batch.source.name), ("DPROBES_DATA", data)])
    record, header, fields, names, _ = known
    items: list[tuple[str, str | bytes | None]] = [*_common(message, _INFO)]
    items += [(f"DPROBES_{name.upper()}", value) for name, value in (*place_items(batch.source, place), *header)]
    if record.time is not None:
        items.append(("DPROBES_TIMESTAMP", str((record.time + batch.wall_offset) // 1000)))
        items.append(("DPROBES_MONOTONIC", str(record.time)))
    items.append(("DPROBES_DATA", record.data))
    items += [(f"DPROBES_FIELD_{field.name.upper()}"[:_NAME_MAX], value_text(field, value)) for field, value in fields]
    items += [(f"DPROBES_FIELD_{name.upper()}"[:_NAME_MAX], names_text(each)) for name, each in names]
    return _encoded(items)


def _table_entry(source: RecordSource, table: Table, row: ShownRow) -> bytes:
    items: list[tuple[str, str | bytes | None]] = [
        *_common(row.line, _WARNING if "lost" in row.value else _INFO),
        ("DPROBES_PROGRAM", source.name),
        ("DPROBES_TABLE", table.name),
        ("DPROBES_KIND", table.kind.value),
    ]
    items += [(f"DPROBES_KEY{number}", key) for number, key in enumerate(row.keys)]
    items += [(f"DPROBES_{name.upper()}", json_text(value)) for name, value in row.value.items()]
    return _encoded(items)


def _lost_entry(batch: Batch) -> bytes:
    items = [("DPROBES_PROGRAM", batch.source.name), ("DPROBES_LOST", str(batch.lost))]
    return _encoded([*_common(lost_text(batch), _WARNING), *items])


def _common(message: str, priority: str) -> tuple[tuple[str, str], ...]:
    return (
        ("MESSAGE", message),
        ("MESSAGE_ID", MESSAGE_ID),
        ("PRIORITY", priority),
        ("SYSLOG_FACILITY", "1"),
        ("SYSLOG_IDENTIFIER", "dprobes"),
    )


def _encoded(items: Iterable[tuple[str, str | bytes | None]]) -> bytes:
    parts = []
    for name, value in items:
        if value is None:
            continue
        data = value if isinstance(value, bytes) else value.encode("utf-8", "backslashreplace")
        if isinstance(value, bytes) or b"\n" in data:
            parts.append(b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(data)), data))
        else:
            parts.append(b"%b=%b\n" % (name.encode(), data))
    return b"".join(parts)
