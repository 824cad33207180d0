"""The file of what nobody has looked at."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.read.record_stream import Overflow

if TYPE_CHECKING:
    import pytest


def test_bytes_come_out_in_their_order_however_they_are_cut() -> None:
    overflow = Overflow(100)
    assert overflow.write(b"first")
    assert overflow.write(b"second")
    assert overflow.read(3) == b"fir"
    assert overflow.read(8) == b"stsecond"
    assert overflow.write(b"third")
    assert overflow.read(5) == b"third"
    overflow.close()


def test_what_is_beyond_the_limit_is_not_taken_until_all_is_read() -> None:
    overflow = Overflow(10)
    assert overflow.write(b"12345678")
    assert not overflow.write(b"abc")
    assert overflow.read(8) == b"12345678"
    assert overflow.write(b"abc")
    assert overflow.read(3) == b"abc"
    overflow.close()


def test_without_a_place_for_files_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    assert not Overflow(100).write(b"data")
