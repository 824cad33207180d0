"""Line tables are read as pyelftools reads them; what is damaged is said to be."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.line_table import LineProgram, LineSections, line_programs
from dprobes.errors import TargetError
from unit.dwarf.linesections import compiled, sections_of

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = [("-O0", "-gdwarf-4"), ("-O2", "-gdwarf-5"), ("-O2", "-gdwarf-3")]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_rows_are_those_of_another_reader(tmp_path: Path, options: tuple[str, ...]) -> None:
    dwarf, sections = sections_of(compiled(tmp_path, *options))
    offsets = [program.offset for program in line_programs(sections)]
    assert offsets
    for unit in dwarf.iter_CUs():
        attributes = unit.get_top_DIE().attributes
        if "DW_AT_stmt_list" not in attributes:
            continue
        offset = attributes["DW_AT_stmt_list"].value
        assert offset in offsets
        program = dwarf.line_program_for_CU(unit)
        assert program is not None
        states = [entry.state for entry in program.get_entries() if entry.state is not None]
        expected = [(s.address, s.file, s.line, s.column, s.is_stmt or s.end_sequence, s.end_sequence) for s in states]
        rows = LineProgram(sections, offset).rows()
        assert [(r.address, r.file, r.line, r.column, r.begins_statement or r.ends, r.ends) for r in rows] == expected
        assert len(expected) >= 10


def test_the_64_bit_format_says_the_same(tmp_path: Path) -> None:
    rows = []
    for options in ((), ("-gdwarf64",)):
        _, sections = sections_of(compiled(tmp_path, "-O2", "-gdwarf-5", *options))
        rows.append([row for program in line_programs(sections) for row in program.rows()])
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 10


def test_files_have_their_directories(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/twice.h").write_text("static inline int twice(int n) { return n * 2; }\n")
    source = '#include "include/twice.h"\nint main(int argc, char **argv) { return twice(argc); }\n'
    for version in ("-gdwarf-4", "-gdwarf-5"):
        _, sections = sections_of(compiled(tmp_path, version, source=source))
        (program,) = (each for each in line_programs(sections) if any("twice.h" in path for path in each.files))
        used = {program.files[row.file] for row in program.rows()}
        assert any(path.endswith("include/twice.h") for path in used)
        assert any(path.rpartition("/")[2] == "lines.c" for path in used)


def test_damaged_tables_end_in_an_error(tmp_path: Path) -> None:
    _, sections = sections_of(compiled(tmp_path, "-O2"))
    random = Random(15)
    damaged = 0
    for _ in range(600):
        data = bytearray(sections.lines)
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(len(data))] = random.choice((0, 0x7F, 0x80, 0xFF, random.randrange(256)))
        strings = sections.line_strings[: random.choice((len(sections.line_strings), 3))]
        mutated = LineSections(bytes(data), sections.strings, strings)
        try:
            for program in line_programs(mutated):
                list(program.rows())
        except TargetError:
            damaged += 1
    assert damaged >= 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("08000000", "it goes on to 0xc, the section only to 0x4"),
        ("f0ffffff", "its length is 0xfffffff0"),
        ("020000000900", "it has version 9"),
        ("0200", "it ends too early"),
        ("060000000400ffff0000", "its header is longer than it is"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(data: str, message: str) -> None:
    with pytest.raises(TargetError) as error:
        list(line_programs(LineSections(bytes.fromhex(data))))
    assert str(error.value) == f"the line table at 0x0 of .debug_line is damaged: {message}"
