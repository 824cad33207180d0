"""Syslog messages as a real rsyslogd understands them."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.errors import SinkError
from dprobes.record.log_record import LogRecord, encode_record
from dprobes.record.record_origin import Place, RecordSource
from dprobes.sinks import Batch, SinkOptions
from dprobes.sinks.sink_thread import LogTarget
from dprobes.sinks.syslog import syslog_transports
from dprobes.sinks.syslog.syslog_transports import Tls
from dprobes.sinks.target_kinds import parse_target
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.sinks.rsyslog import Certificates, Rsyslog

TEMPLATES = {
    "templates.lst": b"7 seven.fmt\n",
    "seven.fmt": b'major = 7\nminor = 1\ndesc = "an open"\nfmt = "fd=%d path=%*s mode=%o"\n',
}
SOURCE = RecordSource(1, "svc", "libsvc.so", 7, (), TEMPLATES)
PLACE = Place("libsvc.so", "open_it", "open_this")
OFFSET = 1_790_000_000_000_000_000
PATH = '/tmp/a]b"c\\d é\n'

_ELEMENT = re.compile(r'\[([^ \]]+)((?: [^=]+="(?:[^"\\\]]|\\.)*")*)\]')
_PARAMETER = re.compile(r' ([^=]+)="((?:[^"\\\]]|\\.)*)"')


def structured(message: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Take structured data apart as RFC 5424, 6.3, says; nothing may be left."""
    text = message["structured"]
    elements = {}
    while text:
        element = _ELEMENT.match(text)
        assert element is not None, text
        found = _PARAMETER.findall(element[2])
        elements[element[1]] = {name: re.sub(r"\\(.)", r"\1", value) for name, value in found}
        text = text[element.end() :]
    return elements


def opened(number: int, path: str = PATH) -> bytes:
    name = path.encode()
    item = b"\x01" + len(name).to_bytes(2, "little") + name
    record = LogRecord(major=7, minor=1, cpu=1, pid=77, tid=78, uid=5, ip=0x1234, time=123_456_789, process_name="a b")
    return encode_record(record._replace(data=number.to_bytes(8, "little") + item + (0o644).to_bytes(8, "little")))


def batch_of(records: list[bytes], lost: int = 0) -> Batch:
    return Batch(SOURCE, records, [PLACE] * len(records), OFFSET, lost)


def send(name: str, *batches: Batch, format_name: str = "text") -> None:
    sink = parse_target(name).open(SinkOptions(format_name))
    try:
        sink.create_event(SOURCE)
        for batch in batches:
            sink.log_events(batch)
        sink.destroy_event(SOURCE)
    except SinkError:
        with contextlib.suppress(SinkError):
            sink.close()
        raise
    sink.close()


def check_message(message: dict[str, Any], number: int) -> None:
    assert message["priority"] == "14"
    assert message["time"] == "2026-09-21T14:13:20.123456Z"
    assert (message["app"], message["kind"]) == ("dprobes", "7.1")
    assert structured(message) == {
        "dprobes@32473": {
            "program": "svc",
            "module": "libsvc.so",
            "symbol": "open_it",
            "function": "open_this",
            "major": "7",
            "minor": "1",
            "cpu": "1",
            "pid": "77",
            "tid": "78",
            "uid": "5",
            "name": "a b",
            "ip": "0x1234",
        },
        "fields@32473": {"fd": str(number), "path": PATH.replace("\n", "\\n"), "mode": "0644"},
    }
    assert message["message"] == text_of(number)


def text_of(number: int, path: str = PATH.replace("\n", "\\n")) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(1_790_000_000))
    return f"{clock}.123456  a\\x20b[77/78]  uid=5  an open | fd={number} path={path} mode=644"


NAMES: dict[str, Callable[[Rsyslog], str]] = {
    "unix": lambda server: f"syslog:unix://{server.socket}",
    "udp": lambda server: f"syslog:udp://127.0.0.1:{server.udp_port}",
    "tcp": lambda server: f"syslog:tcp://localhost:{server.tcp_port}",
}


@pytest.mark.parametrize("transport", NAMES)
def test_a_record_is_one_message_with_structured_data(rsyslog: Rsyslog, transport: str) -> None:
    send(NAMES[transport](rsyslog), batch_of([opened(n) for n in range(3)]), batch_of([opened(3)], lost=12))
    messages = rsyslog.await_count(5)
    for number, message in enumerate([*messages[:3], messages[4]]):
        check_message(message, number)
    lost = messages[3]
    assert (lost["priority"], lost["kind"], lost["message"]) == ("12", "lost", "12 records of 'svc' were lost here")
    assert structured(lost) == {"dprobes@32473": {"program": "svc", "lost": "12"}}


def test_a_server_that_has_a_good_certificate_gets_messages(tls_rsyslog: Rsyslog, certificates: Certificates) -> None:
    name = f"syslog:tls://localhost:{tls_rsyslog.tcp_port}?ca={certificates.authority}"
    send(name, batch_of([opened(n) for n in range(2000)]))
    messages = tls_rsyslog.await_count(2000)
    for number, message in enumerate(messages):
        assert structured(message)["fields@32473"]["fd"] == str(number)
    check_message(messages[-1], 1999)


def test_a_server_may_ask_for_our_certificate(asking_rsyslog: Rsyslog, certificates: Certificates) -> None:
    name = f"syslog:tls://localhost:{asking_rsyslog.tcp_port}?ca={certificates.authority}"
    with_ours = f"{name}&cert={certificates.client}&key={certificates.key(certificates.client)}"
    send(with_ours, batch_of([opened(1)]))
    check_message(asking_rsyslog.await_count(1)[0], 1)
    # TLS 1.3 tells a client only after its handshake that its certificate was missed.
    with pytest.raises(SinkError):
        send(name, *[batch_of([opened(n)]) for n in range(2000)])
    send(with_ours, batch_of([opened(2)]))
    assert [structured(message)["fields@32473"]["fd"] for message in asking_rsyslog.await_count(2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("host", "authority", "message"),
    [
        ("localhost", "other_authority", "unable to get local issuer certificate"),
        ("127.0.0.1", "authority", "IP address mismatch, certificate is not valid for '127.0.0.1'."),
    ],
)
def test_a_server_whose_certificate_is_bad_gets_nothing(
    tls_rsyslog: Rsyslog, certificates: Certificates, host: str, authority: str, message: str
) -> None:
    name = f"syslog:tls://{host}:{tls_rsyslog.tcp_port}?ca={getattr(certificates, authority)}"
    with pytest.raises(SinkError) as caught:
        send(name, batch_of([opened(1)]))
    where = f"tls://{host}:{tls_rsyslog.tcp_port}"
    assert caught.value.message == f"syslog at '{where}': the server's certificate is refused: {message}"
    assert tls_rsyslog.received() == []


def test_tls_counts_as_lost_what_was_not_acknowledged(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syslog_transports, "_PATIENCE", 0.5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server, certificates.key(certificates.server))
    is_over = threading.Event()
    received = bytearray()

    def serve(listening: socket.socket) -> None:
        end, _ = listening.accept()
        with context.wrap_socket(end, server_side=True) as tls:
            received.extend(tls.recv(1000))
            is_over.wait(TIMEOUT)
            with contextlib.suppress(OSError):
                while data := tls.recv(1 << 16):
                    received.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        ours = ssl.create_default_context(cafile=str(certificates.authority))
        stream = Tls("syslog", "localhost", listening.getsockname()[1], ours)
        with pytest.raises(SinkError) as caught:
            stream.send([b"message %07d" % n for n in range(1_000_000)])
        stream.close()
        is_over.set()
        server.join()
    assert caught.value.message == "syslog: there is no answer"
    arrived = received.count(b"15 message ")
    written = caught.value.taken - caught.value.lost
    assert 0 < written < caught.value.taken
    # What is counted as written has arrived; of a TLS record that was acknowledged in part nothing is.
    assert (
        caught.value.taken - caught.value.lost <= arrived <= caught.value.taken - caught.value.lost + 2 * 16_384 // 18
    )


def test_the_old_form_is_what_an_ordinary_local_socket_expects(
    rsyslog: Rsyslog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dprobes.sinks.syslog.syslog_target._LOCAL", str(rsyslog.old_socket))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    send("syslog", batch_of([opened(1)]))
    (message,) = rsyslog.await_count(1)
    assert message["message"].lstrip().startswith("14:13:20.123456  a\\x20b[77/78]  uid=5  an open | ")
    assert message["message"].endswith("mode=644")
    assert (message["priority"], message["app"]) == ("14", "dprobes")
    assert message["process"].isdigit()


@pytest.mark.parametrize(("transport", "limit"), [("udp", 2048), ("tcp", 8192), ("tcp?max=480", 480)])
def test_a_long_record_is_cut_and_says_by_how_much(rsyslog: Rsyslog, transport: str, limit: int) -> None:
    kind, _, options = transport.partition("?")
    name = NAMES[kind](rsyslog) + ("?" + options if options else "")
    long = "é" * 9000
    send(name, batch_of([opened(5, long), opened(6, "/x")]))
    first, second = rsyslog.await_count(2)
    cut = re.search(r" <(\d+) bytes were cut>$", first["message"])
    assert cut is not None
    kept, whole = first["message"][: cut.start()], text_of(5, long)
    assert whole.startswith(kept)
    assert len(kept.encode()) + int(cut[1]) == len(whole.encode())
    assert limit - 400 < len(kept.encode()) + len(first["structured"].encode()) < limit
    assert structured(first).keys() == {"dprobes@32473"}  # the fields are in the text, which can be cut
    if limit > 480:
        assert second["message"] == text_of(6, "/x")
        assert structured(second)["fields@32473"]["path"] == "/x"


@pytest.mark.parametrize(
    ("transport", "problem"),
    [
        ("unix", "connection refused"),
        ("tcp", "the server has closed the connection"),
        ("tls", "the server has closed the connection"),
    ],
)
def test_a_server_that_restarts_gets_the_rest_and_nothing_twice(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, transport: str, problem: str
) -> None:
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY", 0.05)
    monkeypatch.setattr("dprobes.sinks.sink_backlog._RETRY_MAX", 0.05)
    rsyslog: Rsyslog = request.getfixturevalue("tls_rsyslog" if transport == "tls" else "rsyslog")
    where = str(rsyslog.socket) if transport == "unix" else f"{transport}://localhost:{rsyslog.tcp_port}"
    name = f"syslog:{'unix://' if transport == 'unix' else ''}{where}"
    if transport == "tls":
        name += f"?ca={request.getfixturevalue('certificates').authority}"
    problems: list[str] = []
    target = LogTarget(name, lambda: parse_target(name).open(SinkOptions()), on_problem=problems.append)
    target.create([SOURCE])
    sent = 0

    def put(count: int) -> None:
        nonlocal sent
        target.put(batch_of([opened(sent + n, "/x") for n in range(count)]))
        sent += count

    put(2000)
    await_true(lambda: target.status().written == 2000, "2000 records")
    rsyslog.await_count(2000)
    rsyslog.end(kill=True)
    put(2000)
    await_true(lambda: target.status().problem is not None, "a problem")
    rsyslog.start()
    put(2000)
    status = target.close()
    assert status.written + status.lost == sent
    rsyslog.await_count(status.written)  # rsyslogd does not read what its system still has when it is ended
    rsyslog.end()
    numbers = [int(structured(message)["fields@32473"]["fd"]) for message in rsyslog.received()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == status.written
    assert numbers[-1] == sent - 1
    assert problems[0].startswith(f"syslog at '{where}': {problem}")
