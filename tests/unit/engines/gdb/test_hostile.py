"""Stubs that break the protocol, lie, are slow or endless: each ends in a reason, soon, and nothing else is raised."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dprobes.engines.gdb import stub_requests as stub_module
from dprobes.engines.gdb.remote_protocol import MessageKind, PacketReader, packet
from dprobes.engines.gdb.stub_doctor import examine_stub
from dprobes.engines.gdb.stub_registers import parse_description
from dprobes.engines.gdb.stub_requests import Stub
from dprobes.engines.gdb.stub_transports import adopted_transport
from dprobes.errors import EngineError
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOON = 40.0


class HostileStub:
    """Accept one connection at a path, and send what ``answer`` returns for each payload, as it is."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes | None]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        reader = PacketReader()
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                for message in reader.feed(data):
                    if message.kind is MessageKind.PACKET:
                        answer = self._answer(message.payload)
                        if answer is None:
                            return
                        connection.sendall(answer)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_module, "_PATIENCE", 3.0)
    monkeypatch.setattr(Stub.__init__, "__defaults__", (3.0,))


def obeying(special: dict[bytes, bytes]) -> Callable[[bytes], bytes | None]:
    """Return the answers of a stub that is as it should be, but for some packets by how they begin."""
    answers = {
        b"qSupported": packet(b"PacketSize=1000;qXfer:features:read+;qXfer:auxv:read+"),
        b"Hg": packet(b"OK"),
        b"?": packet(b"T05thread:1;"),
        b"qXfer:features:read:target.xml": packet(b"l<target><architecture>i386</architecture></target>"),
        b"vCont?": packet(b"vCont;c;C;s;S"),
        b"g": packet(b"00" * 64),
        b"m": packet(b"00"),
        b"D": packet(b"OK"),
    }

    def answer(payload: bytes) -> bytes | None:
        for start, sent in (special | answers).items():
            if payload.startswith(start):
                return b"+" + special.get(start, sent)
        return b"+" + packet(b"")

    return answer


def examined(path: Path, answer: Callable[[bytes], bytes | None]) -> list[str]:
    """Return why a stub does not work, as ``doctor`` says; it has to say so soon."""
    stub = HostileStub(path, answer)
    began = time.monotonic()
    try:
        findings = examine_stub(str(path))
    finally:
        stub.close()
    assert time.monotonic() < began + SOON
    return [finding.detail for finding in findings if not finding.works and finding.essential]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda _: None, "the stub {path} has closed the connection"),
        (lambda _: b"", "the stub {path} does not answer 'qSupported"),
        (lambda _: b"+" + 6 * b"$OK#00", "the stub sent a packet that is damaged: its checksum"),
        (lambda _: b"+$" + b"a" * (5 << 20), "the stub sent a packet without an end"),
        (lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n", "the stub {path} does not answer 'qSupported"),
        (lambda _: b"-", "the stub has refused the packet"),
    ],
    ids=["closes", "silent", "damaged", "endless", "another protocol", "refuses"],
)
def test_what_is_no_stub(answer: Callable[[bytes], bytes | None], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "stub"
    (found,) = examined(path, answer)
    assert found.startswith(problem.format(path=path))


@pytest.mark.parametrize(
    ("special", "problem"),
    [
        ({b"?": packet(b"W00")}, "it has ended"),
        ({b"?": packet(b"nonsense")}, "the stub's answer is not a reason for a stop: b'nonsense'"),
        ({b"?": packet(b"T05thread:p1.zz;")}, "the stub named a thread 'p1.zz'"),
        ({b"g": packet(b"0g")}, "the stub {path} answers 'g' with b'0g'"),
        ({b"g": packet(b"000")}, "the stub {path} answers 'g' with b'000'"),
        ({b"m": packet(b"00" * 900)}, "the stub {path} answers 'm' with"),
        ({b"m": packet(b"E01")}, "not the 1 bytes at 0x0"),
        ({b"qXfer:features": packet(b"m")}, "the stub {path} does not finish 'features'"),
        ({b"qXfer:features": packet(b"l<target>")}, "the stub's description 'target.xml' is not XML: "),
        (
            {b"qXfer:features": packet(b'l<target><xi:include href="target.xml"/></target>')},
            "the stub's description includes itself",
        ),
        (
            {b"qXfer:features": packet(b'l<target><reg name="a" bitsize="99999999"/></target>')},
            "the stub's description has a register 'a' with bitsize '99999999'",
        ),
        (
            {
                b"qXfer:features": packet(
                    b'l<target><architecture>i386</architecture><reg name="a" bitsize="8"/></target>'
                )
            },
            "the stub {path} describes no register 'eip'",
        ),
        ({b"vCont?": 6 * b"$vCont;c#zz"}, "the stub sent a packet that is damaged: its checksum"),
    ],
)
def test_lies(special: dict[bytes, bytes], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "stub"
    found = examined(path, obeying(special))
    assert [each for each in found if each.startswith(problem.format(path=path))]


def test_one_that_obeys(tmp_path: Path) -> None:
    assert examined(tmp_path / "stub", obeying({})) == []


def test_one_that_sends_byte_by_byte(tmp_path: Path) -> None:
    """The answer comes in time, if slowly."""
    ours, theirs = socket.socketpair()
    stub = Stub(adopted_transport(ours.detach()), 5)

    def serve() -> None:
        theirs.recv(100)
        for byte in packet(b"hello"):
            time.sleep(0.01)
            theirs.sendall(bytes([byte]))

    threading.Thread(target=serve, daemon=True).start()
    with theirs:
        assert stub.ask("x") == b"hello"
    stub.close()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
@settings(max_examples=rounds(60), deadline=None)
def test_whatever_is_answered_only_errors_of_ours_are_raised(answers: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    stub = Stub(adopted_transport(ours.detach()), 0.05)
    theirs.sendall(b"".join(packet(answer) for answer in answers))
    asked = (
        stub.reason,
        lambda: stub.read_registers(None),
        lambda: stub.read(0x1000, 16),
        stub.threads,
        stub.current_thread,
        lambda: parse_description(lambda name: answers[len(name) % len(answers)]),
        stub.has_steps,
        lambda: stub.insert(stub_module.BreakpointKind.SOFTWARE, 1, 1),
        lambda: stub.wait(0.01),
    )
    with theirs:
        for ask in asked:
            with contextlib.suppress(EngineError):
                ask()
    stub.close()


def test_acknowledgements_without_an_end_are_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "stub"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"+" * 4096)

        threading.Thread(target=serve, daemon=True).start()
        (found,) = [each.detail for each in examine_stub(str(path)) if not each.works and each.essential]
    assert found.startswith(f"the stub {path} does not stop to send")


def test_acknowledgements_behind_a_question_are_no_answer_either(tmp_path: Path) -> None:
    path = tmp_path / "stub"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                while True:
                    connection.sendall(b"+" * 4096)

        threading.Thread(target=serve, daemon=True).start()
        (found,) = [each.detail for each in examine_stub(str(path)) if not each.works and each.essential]
    assert found.startswith(f"the stub {path} does not answer 'qSupported")
