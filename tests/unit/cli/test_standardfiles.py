"""The standard files of a process: whoever calls the command line keeps its own."""

from __future__ import annotations

import gc
import io
import sys
from typing import TYPE_CHECKING

from dprobes.cli.main import buffer_standard_files, run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def unbuffered(path: Path) -> io.TextIOWrapper:
    """Return a file as Python has it with PYTHONUNBUFFERED."""
    return io.TextIOWrapper(path.open("wb", buffering=0), "utf-8", write_through=True)


def test_the_caller_of_a_command_keeps_its_standard_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = unbuffered(tmp_path / "out")
    monkeypatch.setattr(sys, "stdout", file)
    assert run(["--version"]) == 0
    assert sys.stdout is file
    monkeypatch.undo()
    gc.collect()
    assert file.write("and more\n") == 9
    file.close()
    assert (tmp_path / "out").read_text().endswith("\nand more\n")


def test_a_process_of_ours_writes_through_a_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, text = unbuffered(tmp_path / "out"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", text)
    buffer_standard_files()
    assert isinstance(sys.stdout.buffer, io.BufferedWriter)
    assert sys.stderr is text
    print("a line")
    assert (tmp_path / "out").read_text() == "a line\n"
    sys.stdout.close()
