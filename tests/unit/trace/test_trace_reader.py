"""Reading a file while it is written, taken back, and written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dprobes.trace.trace_reader
from dprobes.errors import FormatError
from dprobes.trace.trace_reader import TraceReader
from support.trace_files import header, program, records, seen

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = header() + program() + records(1, (0, b"first"))
TORN = records(1, (0, b"torn" * 20))
NEXT = records(1, (0, b"next" * 10)) + records(1, (0, b"last"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.dpt"
    path.write_bytes(WHOLE)
    return path


def names(found: Any) -> list[object]:
    return [record for _, _, record, _ in seen(found)]


@pytest.mark.parametrize("length", range(len(TORN)))
def test_what_a_writer_takes_back_between_two_looks_is_forgotten(path: Path, length: int) -> None:
    with TraceReader(path) as reader:
        path.write_bytes(WHOLE + TORN[:length])
        assert names(reader.read()) == [b"first"]
        path.write_bytes(WHOLE + NEXT)
        assert names(reader.read()) == [b"next" * 10, b"last"]


@pytest.mark.parametrize("length", range(1, len(TORN)))
def test_what_a_writer_takes_back_under_the_readers_hands_is_forgotten(
    path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(WHOLE + TORN[:length])
    monkeypatch.setattr(dprobes.trace.trace_reader, "_PIECE", 1)
    with TraceReader(path) as reader:
        next_piece = reader._next

        def changing() -> bytes:
            data = next_piece()
            if reader._file.tell() == len(WHOLE) + length:
                path.write_bytes(WHOLE + NEXT)
            return data

        monkeypatch.setattr(reader, "_next", changing)
        found = names(reader.read())
        assert found == [b"first", b"next" * 10, b"last"][: len(found)]
        assert [*found, *names(reader.read())] == [b"first", b"next" * 10, b"last"]


def test_damage_that_stays_is_an_error_each_time(path: Path) -> None:
    path.write_bytes(WHOLE + bytes(20))
    with TraceReader(path) as reader:
        for expected in ([b"first"], []):
            found: list[object] = []
            with pytest.raises(FormatError) as caught:
                found.extend(record for each in reader.read() for record in names([each]))
            assert found == expected
            assert caught.value.message == f"'{path}' is damaged (at byte {len(WHOLE)})"


def test_a_defect_in_a_sound_frame_is_not_passed_over(path: Path) -> None:
    path.write_bytes(WHOLE + records(7, (0, b"x")) + NEXT)
    with TraceReader(path) as reader, pytest.raises(FormatError, match="no program has the number 7"):
        names(reader.read())
