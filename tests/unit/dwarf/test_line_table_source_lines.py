"""Lines of the source lead to the instructions that gdb finds for them, and instructions to their lines."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.dwarf.line_table import addresses_of_lines, line_programs
from dprobes.errors import TargetError
from unit.dwarf.linesections import SOURCE, SourceLine, UnitLines, compiled, sections_of

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.dwarf.line_table import LineSections

LINES = range(1, SOURCE.count("\n") + 1)


def addresses_of_line(sections: LineSections, path: str, line: int) -> list[int]:
    return addresses_of_lines(sections, path, line, line)[line]


def gdb_places(program: Path) -> dict[int, set[int]]:
    """Return where gdb puts breakpoints for lines of which it moves none elsewhere."""
    commands = [part for line in LINES for part in ("-ex", f"break lines.c:{line}")]
    output = subprocess.run(
        ["gdb", "-batch", *commands, "-ex", "info breakpoints", program], capture_output=True, text=True, check=True
    ).stdout
    places: dict[int, set[int]] = {}
    for address, line in re.findall(r"0x0*([0-9a-f]+) in \w+ at \S+:(\d+)$", output, re.MULTILINE):
        places.setdefault(int(line), set()).add(int(address, 16))
    return places


@pytest.mark.parametrize("options", ["-O0", "-O1", "-O2", "-O3"])
def test_the_places_of_gdb_are_among_those_of_a_line(tmp_path: Path, options: str) -> None:
    program = compiled(tmp_path, options)
    _, sections = sections_of(program)
    compared = 0
    # gdb goes behind the prologue for the line of a function's beginning.
    for line, addresses in gdb_places(program).items():
        if line in (3, 4, 7, 8) and options == "-O0":
            continue
        assert addresses <= set(addresses_of_line(sections, "lines.c", line))
        compared += 1
    assert compared >= 6


def test_a_loop_begins_its_line_where_it_is_entered_and_where_it_is_tested(tmp_path: Path) -> None:
    _, sections = sections_of(compiled(tmp_path, "-O0"))
    assert len(addresses_of_line(sections, "lines.c", 9)) == 2
    assert len(addresses_of_line(sections, "lines.c", 12)) == 1


@pytest.mark.parametrize("options", ["-O0", "-O1", "-O2", "-O3"])
def test_each_instruction_is_one_of_one_line_of_several(tmp_path: Path, options: str) -> None:
    program = compiled(tmp_path, options)
    _, sections = sections_of(program)
    found = addresses_of_lines(sections, "lines.c", 8, 17)
    assert list(found) == sorted(found)
    assert {9, 10, 16} <= set(found) <= set(range(8, 18))
    addresses = [address for each in found.values() for address in each]
    assert len(addresses) == len(set(addresses)) >= 5
    rows = {(row.line, row.address) for table in line_programs(sections) for row in table.rows()}
    assert {(line, address) for line, places in found.items() for address in places} <= rows


def test_the_line_of_an_instruction_is_that_of_addr2line(tmp_path: Path) -> None:
    program = compiled(tmp_path, "-O2", "-gdwarf-5")
    _, sections = sections_of(program)
    compared = 0
    for table in line_programs(sections):
        lines = UnitLines(table)
        for address in {row.address for row in table.rows() if not row.ends}:
            output = subprocess.run(
                ["addr2line", "-e", program, hex(address)], capture_output=True, text=True, check=True
            )
            path, number = re.sub(r" \(discriminator \d+\)", "", output.stdout).strip().rsplit(":", 1)
            found = lines.line_at(address)
            assert found is not None
            assert (found.path.rpartition("/")[2], found.line) == (path.rpartition("/")[2], int(number))
            compared += 1
    assert compared >= 10


def test_what_is_no_code_has_no_line(tmp_path: Path) -> None:
    _, sections = sections_of(compiled(tmp_path, "-O0"))
    lines = UnitLines(next(iter(line_programs(sections))))
    assert lines.line_at(0) is None
    assert lines.line_at(1 << 40) is None
    assert lines.path(99) == "?"


def test_a_line_is_shown_with_the_name_of_its_file() -> None:
    assert str(SourceLine("/usr/src/lib/util.c", 12)) == "util.c:12"


def refusal(tmp_path: Path, path: str, line: int) -> tuple[str, str | None]:
    _, sections = sections_of(compiled(tmp_path, "-O0"))
    with pytest.raises(TargetError) as error:
        addresses_of_line(sections, path, line)
    return str(error.value), error.value.hint


def test_a_line_without_instructions_is_refused_with_its_neighbours(tmp_path: Path) -> None:
    assert refusal(tmp_path, "lines.c", 13) == (
        "line 13 of 'lines.c' has no instructions",
        "the nearest lines with instructions are 12 and 14",
    )


def test_lines_without_instructions_are_refused(tmp_path: Path) -> None:
    _, sections = sections_of(compiled(tmp_path, "-O0"))
    with pytest.raises(TargetError) as error:
        addresses_of_lines(sections, "lines.c", 30, 40)
    assert str(error.value) == "lines 30 to 40 of 'lines.c' have no instructions"
    assert error.value.hint == "the nearest lines with instructions are 17 and 18"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "other.c", 1) == ("no source file 'other.c' is known to the debug information", None)


def test_a_name_of_several_files_is_refused_with_their_paths(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "util.c").write_text(f"int {name}(int n) {{ return n + 1; }}\n")
    source = "int one(int); int two(int);\nint main(int argc, char **argv) { return one(argc) + two(argc); }\n"
    program = compiled(tmp_path, "one/util.c", "two/util.c", source=source)
    _, sections = sections_of(program)
    with pytest.raises(TargetError) as error:
        addresses_of_line(sections, "util.c", 1)
    assert str(error.value) == "2 source files are named 'util.c'"
    assert error.value.hint == "write more of its path: one/util.c, two/util.c"
    assert len(addresses_of_line(sections, "two/util.c", 1)) == 1
