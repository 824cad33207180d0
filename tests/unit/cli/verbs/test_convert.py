"""The verb ``convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SCRIPT = "uprobe:/bin/sh:f /pid > $1/ { @[comm] = count(); }\n"
PROGRAM = "/bin/sh:f when (pid > ARG1) {\n    @[comm] = count();\n}\n"


def test_a_script_is_printed_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.bt"
    script.write_text(SCRIPT)
    assert run(["convert", str(script)]) == 0
    head = f"// Converted from {script} of bpftrace\n//   dprobes run FILE.dpc -D ARG1=VALUE\n"
    assert capsys.readouterr() == (head + PROGRAM, "")


def test_a_text_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "s.dpc"
    assert run(["convert", "-e", SCRIPT, "-o", str(program)]) == 0
    head = "// Converted from a script of bpftrace\n//   dprobes run s.dpc -D ARG1=VALUE\n"
    assert program.read_text() == head + PROGRAM
    assert capsys.readouterr() == ("", "")
    missing = tmp_path / "no" / "s.dpc"
    assert run(["convert", "-e", SCRIPT, "-o", str(missing)]) == 1
    assert capsys.readouterr().err == f"dprobes: error: cannot write '{missing}': no such file or directory\n"


def test_what_has_no_like_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "s.dpc"
    assert run(["convert", "-e", "iter:task { }", "-o", str(program)]) == 2
    assert not program.exists()
    assert capsys.readouterr().err == (
        "-e:1:1: error: 'iter:task' has no equivalent in DProbes C: iterators are not probepoints\n"
        "    iter:task { }\n    ^~~~~~~~~\n"
    )


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert"]) == 2
    assert "name the file of a script, or give its text with -e TEXT" in capsys.readouterr().err
    assert run(["convert", "/nowhere.bt"]) == 1
    assert capsys.readouterr().err == "dprobes: error: cannot read '/nowhere.bt': no such file or directory\n"
    (tmp_path / "b.bt").write_bytes(b"kprobe:f \xff")
    assert run(["convert", str(tmp_path / "b.bt")]) == 1
    assert capsys.readouterr().err == f"dprobes: error: '{tmp_path / 'b.bt'}' is not text: byte 9 is not UTF-8\n"
