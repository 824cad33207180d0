"""Syslog: the ways to a server, what can be known of what arrived, and what names mean."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import RecordsRefusedError, SinkError
from dprobes.keyed.table_entries import TableStore
from dprobes.keyed.table_layout import NO_NAMES, TableContents
from dprobes.rpn.keyed_tables import Key, KeyKind, Table, TableKind
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.syslog import syslog_transports
from dprobes.sinks.syslog.syslog_target import SyslogAddress, SyslogFormatter, SyslogSink
from dprobes.sinks.syslog.syslog_transports import Datagrams, Stream
from dprobes.sinks.target_kinds import parse_target
from unit.sinks.records import PLACE, SOURCE, batch, record
from unit.sinks.test_sink_thread import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "transport", "host", "port", "form", "limit"),
    [
        ("syslog", "unix", "/dev/log", 0, "3164", 8192),
        ("syslog:unix:///run/log?rfc=3164", "unix", "/run/log", 0, "3164", 8192),
        ("syslog:udp://there", "udp", "there", 514, "5424", 2048),
        ("syslog:tcp://[::1]:99?max=60000", "tcp", "::1", 99, "5424", 60_000),
        ("syslog:tcp://there/", "tcp", "there", 601, "5424", 8192),
        ("syslog:tls://there?rfc=5424", "tls", "there", 6514, "5424", 8192),
    ],
)
def test_names(name: str, transport: str, host: str, port: int, form: str, limit: int) -> None:
    target = parse_target(name)
    assert target.text == name
    address = SyslogAddress.parse(target.argument)
    assert (address.transport, address.host, address.port) == (transport, host, port)
    assert (address.form, address.limit) == (form, limit)


@pytest.mark.parametrize(
    ("argument", "message", "hint"),
    [
        (
            "there",
            "log target 'syslog:there': expected unix, udp, tcp or tls and '://', found 'there'",
            "syslog:udp://host:514, syslog:unix:///dev/log",
        ),
        (
            "http://there",
            "log target 'syslog:http://there': expected unix, udp, tcp or tls and '://', found 'http://there'",
            "syslog:udp://host:514, syslog:unix:///dev/log",
        ),
        ("udp://", "log target 'syslog:udp://' needs a host", None),
        ("unix://", "log target 'syslog:unix://' needs a path", None),
        (
            "udp://there/dev/log",
            "log target 'syslog:udp://there/dev/log': a host is followed by nothing but its port, found '/dev/log'",
            None,
        ),
        (
            "udp://there:x",
            "log target 'syslog:udp://there:x': expected a port, 1 to 65535, found 'x'",
            None,
        ),
        (
            "udp://there:99999",
            "log target 'syslog:udp://there:99999': expected a port, 1 to 65535, found '99999'",
            None,
        ),
        ("udp://[::1", "log target 'syslog:udp://[::1': invalid ipv6 url", None),
        ("udp://there?ca=/x", "log target 'syslog:udp://there?ca=/x': there is no option 'ca'", "options are max, rfc"),
        ("udp://there?max", "log target 'syslog:udp://there?max': expected max=480 to 65000, found ''", None),
        (
            "udp://there?max=70000",
            "log target 'syslog:udp://there?max=70000': expected max=480 to 65000, found '70000'",
            None,
        ),
        ("udp://there?rfc=1", "log target 'syslog:udp://there?rfc=1': expected rfc=5424 or 3164, found '1'", None),
        ("tls://there?ca=x", "log target 'syslog:tls://there?ca=x': the path ca=x must be absolute", None),
        ("tls://there?key=/x", "log target 'syslog:tls://there?key=/x': a key needs its certificate, cert=FILE", None),
        ("tls://there?ca=/no/such", "'/no/such' cannot be read: no such file or directory", None),
        ("tls://there?ca=/etc/passwd", "'/etc/passwd' has no certificate in PEM form", None),
        (
            "tls://there?cert=/etc/passwd",
            "'/etc/passwd' must be a certificate and its key in PEM form, without a password",
            None,
        ),
        ("unix:///no/such", "syslog at '/no/such': no such file or directory", None),
        ("tcp://127.0.0.1:1", "syslog at 'tcp://127.0.0.1:1': connection refused", None),
    ],
)
def test_what_is_no_server_is_refused(argument: str, message: str, hint: str | None) -> None:
    with pytest.raises(SinkError) as caught:
        parse_target(f"syslog:{argument}").open(SinkOptions())
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_name_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    for transport in ("udp", "tcp"):
        with pytest.raises(SinkError) as caught:
            parse_target(f"syslog:{transport}://nowhere:99").open(SinkOptions())
        assert caught.value.message == f"syslog at '{transport}://nowhere:99' is not found: name or service not known"


def test_bytes_are_refused() -> None:
    with pytest.raises(SinkError) as caught:
        parse_target("syslog:udp://127.0.0.1").open(SinkOptions("binary"))
    assert caught.value.message == "log target 'syslog' takes text, not the format 'binary'"


def test_a_malformed_record_is_shown() -> None:
    formatter = SyslogFormatter("text", "5424", 2048, is_local=False)
    formatter.create_event(SOURCE)
    (message,) = formatter.messages(Batch(SOURCE, [b"\1"], [PLACE], 0))
    assert message.startswith(b"<14>1 ")
    assert message.endswith(
        b" dprobes %d - - <a malformed record of 'app': a record of 1 bytes has no flag word (at byte 0)> | 01"
        % os.getpid()
    )


def test_the_old_form_names_the_host_only_elsewhere() -> None:
    for is_local, host in ((True, ""), (False, f"{socket.gethostname()} ")):
        formatter = SyslogFormatter("text", "3164", 2048, is_local=is_local)
        formatter.create_event(SOURCE)
        batch_ = Batch(SOURCE, [record(1, time=0)], [PLACE], 1_790_000_000_123_456_789)
        (message,) = formatter.messages(batch_)
        stamp = time.strftime("%b %e %H:%M:%S", time.localtime(1_790_000_000))
        text = f"<14>{stamp} {host}dprobes[{os.getpid()}]: {stamp[-8:]}.123456  main  01 02"
        assert message.decode() == text


def test_a_clock_that_is_set_shows_in_the_next_records() -> None:
    formatter = SyslogFormatter("text", "5424", 2048, is_local=False)
    formatter.create_event(SOURCE)
    stamps = []
    for offset in (1_790_000_000_000_000_000, 1_790_000_000_000_000_000 - 7_200_000_000_000, 1_790_000_000_500_000_000):
        (message,) = formatter.messages(Batch(SOURCE, [record(1, time=250_000_000)], [PLACE], offset))
        stamps.append(message.split(b" ")[1])
    assert stamps == [b"2026-09-21T14:13:20.250000Z", b"2026-09-21T12:13:20.250000Z", b"2026-09-21T14:13:20.750000Z"]


# What TCP knows


class Server:
    """Accept a connection, and read from it as the test says; what it was given was acknowledged."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []

    def accept(self) -> socket.socket:
        end, _ = self._listening.accept()
        self._ends.append(end)
        return end

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def read_all(end: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := end.recv(1 << 16):
            data += more
    return data


def messages_of(stream: bytes) -> list[bytes]:
    """Take octet-counted messages apart; what is not whole at the end is dropped."""
    messages = []
    while stream:
        count, blank, rest = stream.partition(b" ")
        if not blank or len(rest) < int(count):
            break
        messages.append(rest[: int(count)])
        stream = rest[int(count) :]
    return messages


def test_what_a_server_that_hangs_has_not_acknowledged_is_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_transports, "_PATIENCE", 0.3)
    stream = Stream("syslog", "127.0.0.1", server.port)
    end = server.accept()
    messages = [b"message %07d" % n for n in range(500_000)]
    with pytest.raises(SinkError) as caught:
        stream.send(messages)
    assert caught.value.message == "syslog: there is no answer"
    arrived = caught.value.taken - caught.value.lost
    assert 0 < arrived < caught.value.taken < len(messages)
    stream.close()  # what was said is not said again
    # All that was acknowledged, and nothing else, can still be read.
    assert messages_of(read_all(end)) == messages[:arrived]


def test_a_connection_that_the_server_has_closed_takes_nothing(server: Server) -> None:
    stream = Stream("syslog", "127.0.0.1", server.port)
    end = server.accept()
    stream.send([b"one", b"two"])
    assert end.recv(100) == b"3 one3 two"
    end.close()
    with pytest.raises(SinkError) as caught:
        stream.send([b"three"])
    assert (caught.value.message, caught.value.taken, caught.value.lost) == (
        "syslog: the server has closed the connection",
        0,
        0,
    )
    stream.close()


def test_the_end_of_a_connection_waits_until_everything_is_acknowledged(server: Server) -> None:
    stream = Stream("syslog", "127.0.0.1", server.port)
    end = server.accept()
    messages = [b"message %07d" % n for n in range(30_000)]
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(read_all(end)))
    stream.send(messages[:1000])
    reader.start()
    stream.send(messages[1000:])
    stream.close()
    reader.join()
    assert messages_of(received[0]) == messages


def test_an_end_that_is_not_acknowledged_says_what_is_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_transports, "_GOODBYE", 0.2)
    stream = Stream("syslog", "127.0.0.1", server.port)
    end = server.accept()
    sent = 0
    messages = [b"message %07d" % n for n in range(20_000)]
    stream.send(messages)
    with pytest.raises(SinkError) as caught:
        stream.close()
    sent = len(messages)
    assert 0 < caught.value.lost < sent
    assert caught.value.message == f"syslog: {caught.value.lost} messages were not acknowledged"
    assert messages_of(read_all(end)) == messages[: sent - caught.value.lost]


def test_a_server_that_speaks_no_tls_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_transports, "_CONNECTING", 0.2)
    with pytest.raises(SinkError) as caught:
        parse_target(f"syslog:tls://127.0.0.1:{server.port}").open(SinkOptions())
    assert caught.value.message == f"syslog at 'tls://127.0.0.1:{server.port}': there is no answer"


def test_a_server_that_says_something_else_is_an_error(server: Server) -> None:
    def talk() -> None:
        end = server.accept()
        end.send(b"220 mail.example.org ESMTP\r\n")

    thread = threading.Thread(target=talk)
    thread.start()
    with pytest.raises(SinkError) as caught:
        parse_target(f"syslog:tls://127.0.0.1:{server.port}").open(SinkOptions())
    thread.join()
    assert caught.value.message.startswith(f"syslog at 'tls://127.0.0.1:{server.port}': TLS: ")


def test_a_local_socket_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syslog_transports, "_PATIENCE", 0.2)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("log")
        datagrams = Datagrams("syslog", "log")
        with pytest.raises(SinkError) as caught:
            datagrams.send([b"%d" % n for n in range(100_000)])
        assert caught.value.message == "syslog: there is no answer"
        end.settimeout(0)
        received = 0
        with contextlib.suppress(BlockingIOError):
            while end.recv(100) == b"%d" % received:
                received += 1
        assert received == caught.value.taken > 0
        datagrams.close()


def test_a_port_that_nobody_listens_at_is_noticed_one_datagram_later() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind(("127.0.0.1", 0))
        port = end.getsockname()[1]
    sink = parse_target(f"syslog:udp://127.0.0.1:{port}").open(SinkOptions())
    sink.create_event(SOURCE)
    errors: list[SinkError] = []

    def is_noticed() -> bool:
        try:
            sink.log_events(batch(1))
        except SinkError as error:
            errors.append(error)
        return bool(errors)

    await_true(is_noticed)
    assert errors[0].message == f"syslog at 'udp://127.0.0.1:{port}': connection refused"
    sink.close()


def test_a_message_that_is_too_long_for_a_datagram_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        end = Datagrams("syslog", str(path))
        end._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with pytest.raises(RecordsRefusedError) as caught:
            end.send([b"first", bytes(60_000), b"last"])
        assert (caught.value.message, caught.value.lost) == ("syslog: message too long", 1)
        assert [server.recv(100) for _ in range(2)] == [b"first", b"last"]
        end.close()


def table_of(*counts: int) -> TableContents:
    store = TableStore(Table("hits", TableKind.COUNT, (Key(KeyKind.STRING, 8),)))
    for number, count in enumerate(counts):
        for _ in range(count):
            store.tally(f"k{number}]".encode().ljust(16, b"\0"))
    return store.contents()


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("text", "@hits[k0]]: 3"),
        ("json", '{"table": "hits", "kind": "count", "keys": ["k0]"], "value": 3}'),
    ],
)
def test_a_row_of_a_table_is_a_message(format_name: str, text: str) -> None:
    formatter = SyslogFormatter(format_name, "5424", 2048, is_local=False)
    first, second = formatter.table_messages(SOURCE, [table_of(3, 4)], NO_NAMES)
    head, _, rest = first.decode().partition(f" dprobes {os.getpid()} ")
    assert head.startswith("<14>1 ")
    structured = '[dprobes@32473 program="app" table="hits" kind="count"][fields@32473 key0="k0\\]" value="3"]'
    assert rest == f"table {structured} {text}"
    assert b' value="4"' in second


def test_the_old_form_has_the_line_alone() -> None:
    formatter = SyslogFormatter("text", "3164", 2048, is_local=True)
    (message,) = formatter.table_messages(SOURCE, [table_of(1)], NO_NAMES)
    assert message.endswith(b"dprobes[%d]: @hits[k0]]: 1" % os.getpid())


def test_values_that_found_no_room_are_a_warning() -> None:
    formatter = SyslogFormatter("text", "5424", 2048, is_local=False)
    contents = TableContents(Table("n", TableKind.COUNT, (Key(KeyKind.WORD),)), lost=2)
    (message,) = formatter.table_messages(SOURCE, [contents], NO_NAMES)
    assert message.startswith(b"<12>1 ")
    assert b'[dprobes@32473 program="app" table="n" kind="count" lost="2"] @n: 2 values did not fit' in message


def test_tables_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("log")
        sink = SyslogSink(SyslogAddress.parse(f"unix://{tmp_path}/log"), "text")
        sink.create_event(SOURCE)
        sink.log_tables(SOURCE, [table_of(1, 2)])
        sink.close()
        assert [end.recv(2048).rpartition(b" @")[2] for _ in range(2)] == [b"hits[k0]]: 1", b"hits[k1]]: 2"]
