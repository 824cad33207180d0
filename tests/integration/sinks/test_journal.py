"""The systemd journal: the protocol, byte for byte, and what a real journald and systemd-journal-remote make of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import SinkError
from dprobes.keyed.table_entries import TableStore
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import RecordSource
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.local.journal_target import MESSAGE_ID, JournalSink
from dprobes.sinks.target_kinds import parse_target
from integration.sinks.journald import Journald, entries_of
from integration.sinks.test_syslog import OFFSET, PLACE, batch_of, opened
from integration.sinks.test_syslog import send as send_to
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator

REMOTES = ("/lib/systemd/systemd-journal-remote", "/usr/lib/systemd/systemd-journal-remote")

CLOCK = time.strftime("%H:%M:%S", time.localtime(1_790_000_000))
TEXT = f'{CLOCK}.123456  a\\x20b[77/78]  uid=5  an open\n    fd={{}} path=/tmp/a]b"c\\d é\\n mode=644'

FIELDS = {
    "MESSAGE_ID": MESSAGE_ID,
    "PRIORITY": "6",
    "SYSLOG_FACILITY": "1",
    "SYSLOG_IDENTIFIER": "dprobes",
    "DPROBES_PROGRAM": "svc",
    "DPROBES_MODULE": "libsvc.so",
    "DPROBES_SYMBOL": "open_it",
    "DPROBES_FUNCTION": "open_this",
    "DPROBES_MAJOR": "7",
    "DPROBES_MINOR": "1",
    "DPROBES_CPU": "1",
    "DPROBES_PID": "77",
    "DPROBES_TID": "78",
    "DPROBES_UID": "5",
    "DPROBES_NAME": "a b",
    "DPROBES_IP": "0x1234",
    "DPROBES_TIMESTAMP": "1790000000123456",
    "DPROBES_MONOTONIC": "123456789",
    "DPROBES_FIELD_PATH": '/tmp/a]b"c\\d é\n',
    "DPROBES_FIELD_MODE": "0644",
}


class Receiver:
    """Take entries at a socket, and check that they follow the protocol."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(20)

    def raw_entry(self) -> bytes:
        data, files, flags, _ = socket.recv_fds(self._socket, 1 << 18, 1)
        assert not flags & socket.MSG_TRUNC
        if not files:
            return data
        (file,) = files
        assert data == b""
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        assert seals & (wanted := fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE) == wanted
        assert str(Path(f"/proc/self/fd/{file}").readlink()).startswith("/memfd:")
        data = os.pread(file, 1 << 24, 0)
        os.close(file)
        return data

    def entry(self) -> dict[str, bytes]:
        return fields_of(self.raw_entry())

    def close(self) -> None:
        self._socket.close()


def fields_of(data: bytes) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    while data:
        line, end, rest = data.partition(b"\n")
        assert end
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        assert name.decode().replace("_", "A").isalnum()
        assert name == name.upper()
        assert not name.startswith(b"_")
        assert name.decode() not in fields
        fields[name.decode()] = value
        data = rest
    return fields


@pytest.fixture
def receiver(short_path: Path) -> Iterator[Receiver]:
    made = Receiver(short_path / "journal")
    yield made
    made.close()


@pytest.fixture
def journald() -> Iterator[Journald]:
    made = Journald()
    yield made
    made.close()


def send(path: Path, *batches: Batch) -> None:
    send_to(f"journal:{path}", *batches)


def test_a_record_is_an_entry(receiver: Receiver, short_path: Path) -> None:
    send(short_path / "journal", batch_of([opened(3)], lost=9))
    lost = {name: value.decode() for name, value in receiver.entry().items()}
    assert lost == {
        "MESSAGE": "9 records of 'svc' were lost here",
        "MESSAGE_ID": MESSAGE_ID,
        "PRIORITY": "4",
        "SYSLOG_FACILITY": "1",
        "SYSLOG_IDENTIFIER": "dprobes",
        "DPROBES_PROGRAM": "svc",
        "DPROBES_LOST": "9",
    }
    entry = receiver.entry()
    data = entry.pop("DPROBES_DATA")
    assert data.startswith(b"\x03\0\0\0\0\0\0\0\x01\x10\0/tmp")
    expected = {**FIELDS, "MESSAGE": TEXT.format(3), "DPROBES_FIELD_FD": "3"}
    assert {name: value.decode() for name, value in entry.items()} == expected


def test_an_entry_that_is_too_large_for_a_datagram_is_a_sealed_file(receiver: Receiver, short_path: Path) -> None:
    record = encode_record(LogRecord(major=1, minor=1, data=bytes(65_535)))
    send(short_path / "journal", batch_of([record, opened(1)]))
    entry = receiver.entry()
    assert entry["DPROBES_DATA"] == bytes(65_535)
    assert entry["MESSAGE"] == b"open_this  " + b" ".join([b"00"] * 65_535)
    assert receiver.entry()["DPROBES_FIELD_FD"] == b"1"


def test_a_journal_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(f"journal:{tmp_path}/no").open(SinkOptions())
    assert caught.value.message == f"the journal at '{tmp_path}/no' cannot be reached: no such file or directory"


def test_a_journal_that_takes_nothing_is_an_error(
    receiver: Receiver, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprobes.sinks.local.journal_target._PATIENCE", 0.2)
    with pytest.raises(SinkError) as caught:
        send(short_path / "journal", batch_of([opened(n) for n in range(10_000)]))
    assert caught.value.message == f"the journal at '{short_path}/journal': no data was accepted for 0 s"
    for number in range(caught.value.taken):
        assert receiver.entry()["DPROBES_FIELD_FD"] == str(number).encode()


def test_journalctl_shows_records_of_a_real_journald(journald: Journald) -> None:
    large = encode_record(LogRecord(major=7, minor=9, data=bytes(range(256)) * 240))
    send(journald.socket, batch_of([opened(n) for n in range(500)]), batch_of([large], lost=3))
    entries = journald.await_entries(502, f"MESSAGE_ID={MESSAGE_ID}")
    assert len(entries) == 502
    for number, entry in enumerate(entries[:500]):
        assert (entry["MESSAGE"], entry["DPROBES_FIELD_FD"]) == (TEXT.format(number), str(number))
    assert FIELDS.items() <= entries[7].items()
    assert entries[7]["_PID"] == str(os.getpid())
    assert (entries[500]["DPROBES_LOST"], entries[500]["PRIORITY"]) == ("3", "4")
    assert bytes(entries[501]["DPROBES_DATA"]) == bytes(range(256)) * 240
    (found,) = journald.entries("DPROBES_FIELD_FD=77", "DPROBES_PID=77")
    assert found["MESSAGE"] == TEXT.format(77)
    text = subprocess.run(
        ["journalctl", "-D", journald.journal, "--no-pager", "-q", "-t", "dprobes", "-n", "3", "-o", "cat"],
        capture_output=True,
        check=True,
        text=True,
        timeout=TIMEOUT,
    ).stdout
    assert text.startswith(TEXT.format(499) + "\n3 records of 'svc' were lost here\nopen_this  00 01 02 03")


def test_syslog_without_a_server_is_understood_by_journald(journald: Journald, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprobes.sinks.syslog.syslog_target._LOCAL", str(journald.dev_log))
    send_to("syslog", batch_of([opened(3)]))
    (entry,) = journald.await_entries(1, "SYSLOG_IDENTIFIER=dprobes")
    assert entry["MESSAGE"] == TEXT.format(3).replace("\n    ", " | ")
    assert (entry["PRIORITY"], entry["SYSLOG_FACILITY"], entry["SYSLOG_PID"]) == ("6", "1", str(os.getpid()))


def test_systemd_journal_remote_takes_the_entries(receiver: Receiver, short_path: Path, tmp_path: Path) -> None:
    remote = next((path for path in REMOTES if Path(path).exists()), None)
    if remote is None or shutil.which("journalctl") is None:
        pytest.skip("systemd-journal-remote is not installed (package systemd-journal-remote)")
    send(short_path / "journal", batch_of([opened(n) for n in range(5)]))
    # The export format has the same fields as the native protocol, a time, and an empty line after each entry.
    export = b"".join(b"__REALTIME_TIMESTAMP=%d\n%b\n" % (OFFSET // 1000 + n, receiver.raw_entry()) for n in range(5))
    output = tmp_path / "remote.journal"
    subprocess.run([remote, f"--output={output}", "-"], input=export, check=True, capture_output=True, timeout=TIMEOUT)
    entries = entries_of(["--file", str(output)], "SYSLOG_IDENTIFIER=dprobes")
    assert [entry["DPROBES_FIELD_FD"] for entry in entries] == ["0", "1", "2", "3", "4"]
    assert FIELDS.items() <= entries[4].items()
    assert entries[4]["MESSAGE"] == TEXT.format(4)
    assert PLACE.symbol == entries[4]["DPROBES_SYMBOL"]


def test_a_row_of_a_table_is_an_entry(receiver: Receiver, short_path: Path) -> None:
    store = TableStore(Table("hits", TableKind.STATS, (Key(KeyKind.WORD),)))
    for value in (4, 6):
        store.tally((7).to_bytes(8, "little"), value)
    sink = JournalSink(str(short_path / "journal"), "text")
    source = RecordSource(1, "svc")
    sink.create_event(source)
    sink.log_tables(source, [store.contents()])
    sink.close()
    assert {name: value.decode() for name, value in receiver.entry().items()} == {
        "MESSAGE": "@hits[7]: count 2, average 5, total 10, min 4, max 6",
        "MESSAGE_ID": MESSAGE_ID,
        "PRIORITY": "6",
        "SYSLOG_FACILITY": "1",
        "SYSLOG_IDENTIFIER": "dprobes",
        "DPROBES_PROGRAM": "svc",
        "DPROBES_TABLE": "hits",
        "DPROBES_KIND": "stats",
        "DPROBES_KEY0": "7",
        "DPROBES_COUNT": "2",
        "DPROBES_SUM": "10",
        "DPROBES_MIN": "4",
        "DPROBES_MAX": "6",
        "DPROBES_AVERAGE": "5.0",
    }
