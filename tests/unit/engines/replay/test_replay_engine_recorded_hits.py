"""Recordings: what a line may say, and the errors of those that are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.replay.replay_engine import RecordedHit, read_recording
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path


def test_numbers_are_numbers_or_strings(tmp_path: Path) -> None:
    path = tmp_path / "hits"
    path.write_text(
        '{"offset": "0x10", "registers": {"rax": "0x1f", "rdi": 7}, "memory": {"4096": "00ff"}, "return": true}\n\n'
        '{"symbol": "main+4", "segments": {"0x2b": 5}, "read_only": {"0x1": ""}, "time": 9, "name": "x", "base": 1}\n'
    )
    assert list(read_recording(str(path))) == [
        RecordedHit(
            f"{path}:1",
            ("offset", 16),
            {"registers": {"rax": 31, "rdi": 7}, "memory": {4096: b"\0\xff"}, "return": True},
        ),
        RecordedHit(
            f"{path}:3",
            ("symbol", "main+4"),
            {"segments": {0x2B: 5}, "read_only": {1: b""}, "time": 9, "name": "x", "base": 1},
        ),
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "'hit': Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "'hit': expected an object, found [1]"),
        ("{}", "a hit has one of the fields probe, offset, address, symbol"),
        ('{"probe": 1, "offset": 2}', "a hit has one of the fields probe, offset, address, symbol"),
        ('{"probe": -1}', "'probe': expected a number of up to 64 bits, found -1"),
        ('{"probe": true}', "'probe': expected a number of up to 64 bits, found true"),
        ('{"probe": 1.0}', "'probe': expected a number of up to 64 bits, found 1.0"),
        ('{"probe": 18446744073709551616}', "'probe': expected a number of up to 64 bits, found 18446744073709551616"),
        ('{"probe": "x"}', """'probe': expected a number of up to 64 bits, found "x\""""),
        ('{"symbol": 1}', "'symbol': expected a string, found 1"),
        ('{"probe": 0, "return": 1}', "'return': expected true or false, found 1"),
        ('{"probe": 0, "registers": []}', "'registers': expected an object, found []"),
        ('{"probe": 0, "registers": {"rax": null}}', "'registers': expected a number of up to 64 bits, found null"),
        (
            '{"probe": 0, "memory": {"0": "0g"}}',
            """'memory': expected bytes in hex, found "0g\"""",
        ),
        ('{"probe": 0, "memory": {"0": 5}}', "'memory': expected a string, found 5"),
        (
            '{"probe": 0, "regs": {}}',
            (
                "a hit has no field 'regs'; fields are probe, offset, address, base, pid, tid, uid, cpu, task, time, "
                "symbol, name, return, registers, entry, segments, memory, read_only"
            ),
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "hits"
    path.write_text('{"probe": 0}\n' + line)
    with pytest.raises(EngineError) as caught:
        list(read_recording(str(path)))
    assert caught.value.message == f"{path}:2: {error}"


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "hits"
    path.write_bytes(b'{"symbol": "\xff"}')
    with pytest.raises(EngineError, match=r":1: 'hit': 'utf-8' codec can't decode byte 0xff"):
        list(read_recording(str(path)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(EngineError, match=rf"^the recording '{path}' cannot be read: no such file or directory$"):
        list(read_recording(str(path)))
