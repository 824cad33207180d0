"""Files of a stub's machine: in pieces, to their ends, closed, and with the reasons why there are none."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb.stub_core import open_remote, read_remote
from dprobes.engines.gdb.stub_requests import Stub
from support.fake_stub import FakeStub

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = bytes(range(256)) * 40


def serving(most: int) -> Callable[[bytes], bytes]:
    """Return a stub with one file, ``/f``, that gives so many bytes at most at once."""

    def answer(payload: bytes) -> bytes:
        operation, _, rest = payload.removeprefix(b"vFile:").partition(b":")
        if not payload.startswith(b"vFile:"):
            return b""
        match operation:
            case b"open":
                return b"F5" if rest == b"2f66,0,0" else b"F-1,2"
            case b"pread":
                number, count, offset = (int(part, 16) for part in rest.split(b","))
                assert number == 5
                piece = DATA[offset : offset + min(count, most)]
                return b"F%x;" % len(piece) + piece
            case b"close":
                return b"F0"
        return b""

    return answer


@pytest.mark.parametrize("most", [1000, 0x1000])
def test_a_file_is_read_to_its_end(most: int) -> None:
    with FakeStub(serving(most)) as fake:
        stub = Stub(fake.transport)
        assert read_remote(stub, "/f") == DATA
        assert fake.asked[-1] == b"vFile:close:5"


def test_a_part_of_a_file() -> None:
    with FakeStub(serving(100)) as fake, open_remote(Stub(fake.transport), "/f") as file:
        assert file.read_at(250, 300) == DATA[250:550]
        assert file.read_at(len(DATA) - 10, 300) == DATA[-10:]
        assert file.read_at(len(DATA) + 10, 300) == b""


def test_a_file_that_there_is_not() -> None:
    with FakeStub(serving(100)) as fake, pytest.raises(FileNotFoundError):
        read_remote(Stub(fake.transport), "/g")


@pytest.mark.parametrize(("answer", "reason"), [(b"", errno.ENOSYS), (b"OK", errno.EPROTO), (b"F", errno.EPROTO)])
def test_a_stub_that_knows_no_files(answer: bytes, reason: int) -> None:
    with FakeStub(lambda _: answer) as fake:
        stub = Stub(fake.transport)
        for _ in range(2):
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is compared
                read_remote(stub, "/f")
            assert caught.value.errno == reason
        assert len(fake.asked) == (2 if answer else 1)
