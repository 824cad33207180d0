"""Programs take their templates along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dprobes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "templates.lst").write_text("1 one.fmt\n2 two.fmt\n")
    (tmp_path / "one.fmt").write_text("major = 1\nminor = 1\n")
    (tmp_path / "two.fmt").write_text("nonsense")
    return tmp_path


CARRIED = {"templates.lst": b"1 one.fmt\n", "one.fmt": b"major = 1\nminor = 1\n"}


def a_program(major: int) -> dprobes.CompiledProgram:
    return dprobes.compile_source(f'name = "*"; major = {major}\nsampler = 10hz\n  exit\n')


def test_a_program_is_saved_with_its_templates(directory: Path, tmp_path: Path) -> None:
    program = a_program(1)
    with_templates = program.with_templates(directory)
    assert (program.templates, with_templates.templates) == ({}, CARRIED)
    with_templates.save(tmp_path / "p.ppdf")
    loaded = dprobes.load_ppdf(tmp_path / "p.ppdf")
    assert loaded.templates == CARRIED
    (directory / "one.fmt").write_text("major = 1\nminor = 2\n")
    again = loaded.with_templates(directory)
    assert again.templates["one.fmt"] == b"major = 1\nminor = 2\n"
    again.save(tmp_path / "q.ppdf")
    assert dprobes.load_ppdf(tmp_path / "q.ppdf").templates == again.templates


def test_wrong_templates_are_refused(directory: Path) -> None:
    with pytest.raises(dprobes.SourceError, match="unknown keyword 'nonsense'"):
        a_program(2).with_templates(directory)
    with pytest.raises(dprobes.FormatError, match=r"templates\.lst': no such file or directory"):
        a_program(1).with_templates(str(directory / "nowhere"))
    without = a_program(3).with_templates(directory)
    assert without.templates == {}
    assert without.diagnostics.render() == f"warning: '{directory}' has no templates for major 3"
