"""Recorded conversations of real stubs: what they said is understood as it was then, however it arrives in pieces."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from dprobes.engines.gdb.remote_protocol import MessageKind, PacketReader, packet
from dprobes.engines.gdb.stub_doctor import examine_stub

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.json"))


class Replayer:
    """Answer packets as a recording says, in pieces of ``size`` bytes; collect what was asked otherwise."""

    def __init__(self, path: Path, packets: list[tuple[str, str]], size: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._left = list(packets)
        self._size = size
        self.strange: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        reader = PacketReader()
        with self._listener, connection:
            while data := connection.recv(1 << 16):
                for message in reader.feed(data):
                    if message.kind is MessageKind.PACKET:
                        self._answer(connection, message.payload.decode("latin-1"))

    def _answer(self, connection: socket.socket, asked: str) -> None:
        expected, answer = self._left.pop(0) if self._left else ("nothing", "")
        if asked != expected:
            self.strange.append(f"{asked} in place of {expected}")
        data = b"+" + packet(answer.encode("latin-1"))
        for start in range(0, len(data), self._size):
            connection.sendall(data[start : start + self._size])


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_what_stubs_said(recording: Path, size: int, tmp_path: Path) -> None:
    said = json.loads(recording.read_text())
    replayer = Replayer(tmp_path / "stub", said["packets"], size)
    findings = examine_stub(str(tmp_path / "stub"))
    assert replayer.strange == []
    assert [[each.what, each.works, each.detail] for each in findings[1:]] == said["findings"]


def test_there_are_recordings() -> None:
    assert [path.stem for path in RECORDINGS] == ["gdbserver-i386", "qemu-ppc", "qemu-s390x"]
