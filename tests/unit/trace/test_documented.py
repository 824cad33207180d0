"""``docs/reference/trace-file.md``: its example is a trace file, and its numbers are those of the code."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.cli.main import run
from dprobes.record.log_record import PROCESS_NAME_MAX, Item
from dprobes.trace.trace_frames import BODY_MAX, JSON_MAX, VERSION, FrameKind

if TYPE_CHECKING:
    import pytest

TEXT = (Path(__file__).parents[3] / "docs/reference/trace-file.md").read_text(encoding="utf-8")


def test_the_example_is_printed_as_the_document_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} )+) *(.{1,16})$", TEXT, re.MULTILINE)
    data = b""
    for offset, row, text in lines:
        assert int(offset, 16) == len(data)
        data += (added := bytes.fromhex(row))
        assert text == "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in added)
    path = tmp_path / "example.dpt"
    path.write_bytes(data)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert run(["log", str(path)]) == 0
    finally:
        monkeypatch.undo()
        time.tzset()
    (printed,) = re.findall(r"^\$ TZ=UTC dprobes log example.dpt\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == printed


def test_numbers_are_those_of_the_code() -> None:
    assert f"size of the body in bytes, at most {BODY_MAX}\n" in TEXT
    assert f"at\nmost {JSON_MAX} bytes" in TEXT
    assert f"of the format: {VERSION}." in TEXT
    assert re.findall(r"^\| (\d+) \| ([A-Z]+) \|", TEXT, re.MULTILINE) == [
        (str(int(kind)), kind.name) for kind in FrameKind
    ]
    flags = {int(flag, 16) for flag in re.findall(r"^(0x[0-9a-f]{4})  ", TEXT, re.MULTILINE)}
    assert flags == {int(item) for item in Item}
    assert f"up to {PROCESS_NAME_MAX} bytes and a NUL" in TEXT
