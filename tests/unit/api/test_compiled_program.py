"""Compiled programs, as users of the Python API have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dprobes
from dprobes import ProgramBuilder, SourceError, compile_file, compile_source, load_ppdf
from dprobes.target.module_lookup import find_module

if TYPE_CHECKING:
    from pathlib import Path

TWO_GROUPS = """
name = "libc.so.6"
groupdef = memory files
#ifndef LIMIT
#define LIMIT 1
#endif
offset = malloc; group = memory; minor = 1; maxhits = LIMIT
    push r, arg0; log 1; exit
offset = open; group = files; minor = 2
    exit
"""


def libc() -> Path:
    path = find_module("libc.so.6")
    assert path is not None
    return path


def test_a_file_is_compiled_with_macros_and_includes(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "limits.h").write_text("#define MINOR 9\n")
    file = tmp_path / "a.rpn"
    file.write_text('#include <limits.h>\nname = "libc.so.6"\noffset = malloc\nminor = MINOR\nmaxhits = LIMIT\nexit\n')
    program = compile_file(file, defines={"LIMIT": 17}, includes=[tmp_path / "lib"])
    (definition,) = program.program.definitions
    assert (definition.minor, definition.maxhits) == (9, 17)
    assert program.name == "libc.so.6"
    assert not program.needs_write
    assert "maxhits = 0x11" in program.text


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(SourceError) as caught:
        compile_source('name = "libc.so.6"\noffset = mallok\npush r, nonsense\njmp nowhere\n', name="my.rpn")
    messages = [d.message for d in caught.value.diagnostics if d.severity is dprobes.Severity.ERROR]
    assert len(messages) >= 2
    assert "my.rpn:3:" in str(caught.value)


def test_writing_must_be_allowed() -> None:
    text = 'name = "libc.so.6"\noffset = malloc\npush 1\npop r, arg0\nexit\n'
    with pytest.raises(SourceError, match="--allow-write"):
        compile_source(text)
    assert compile_source(text, allow_write=True).needs_write


def test_groups_are_selected() -> None:
    program = compile_source(TWO_GROUPS)
    assert [d.minor for d in program.select(groups=["files"]).program.definitions] == [2]
    assert program.select() is program
    with pytest.raises(SourceError, match="the program has no group 'memry'"):
        program.select(groups=["memry"])


def test_a_program_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.ppdf"
    compile_source(TWO_GROUPS).save(path)
    loaded = load_ppdf(path)
    assert loaded.program == compile_source(TWO_GROUPS).program
    assert loaded.ppdf is not None
    assert [build.path for build in loaded.ppdf.builds] == [str(libc())]
    assert loaded.to_bytes() == path.read_bytes()


def test_a_part_of_a_saved_program_is_saved(tmp_path: Path) -> None:
    compile_source(TWO_GROUPS).save(tmp_path / "a.ppdf")
    load_ppdf(tmp_path / "a.ppdf").select(groups=["files"]).save(tmp_path / "b.ppdf")
    part = load_ppdf(tmp_path / "b.ppdf")
    assert [d.minor for d in part.program.definitions] == [2]
    assert part.ppdf is not None
    assert {place.definition for place in part.ppdf.builds[0].places} == {0}
    assert {place.where for place in part.ppdf.builds[0].places} == {"open"}


def test_a_program_is_compiled_for_given_files() -> None:
    program = compile_source(TWO_GROUPS, modules=[libc()])
    assert program.ppdf is not None
    assert len(program.ppdf.builds) == 1
    with pytest.raises(dprobes.FormatError, match="for the builds that it was made for only"):
        program.to_bytes(modules=[libc()])


def test_a_builder_is_compiled_and_saved(tmp_path: Path) -> None:
    builder = ProgramBuilder("libc.so.6", major=3)
    builder.probe("malloc", minor=1).exit()
    builder.compile().save(tmp_path / "a.ppdf")
    assert load_ppdf(tmp_path / "a.ppdf").program == builder.build()


def test_what_is_no_compiled_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ppdf").write_text("hello")
    with pytest.raises(dprobes.FormatError, match=r"a\.ppdf"):
        load_ppdf(tmp_path / "a.ppdf")
    nowhere = compile_source('name = "no-such-module.so"\noffset = 16\nexit\n')
    with pytest.raises(dprobes.TargetError, match=r"there is no module 'no-such-module\.so' on this machine"):
        nowhere.save(tmp_path / "b.ppdf")
