"""Line tables of programs that gcc makes, and of installed debug files, for the tests beside."""

from __future__ import annotations

import subprocess
from bisect import bisect_right
from typing import IO, TYPE_CHECKING, NamedTuple

from elftools.elf.elffile import ELFFile

from dprobes.dwarf.line_table import LineProgram, LineRow, LineSections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from elftools.dwarf.dwarfinfo import DWARFInfo

__all__ = ["SOURCE", "compiled", "sections_of"]

SOURCE = """\
#include <stdio.h>
static inline int add(int a, int b)
{
    return a * b + a;
}
int main(int argc, char **argv)
{
    int total = 0;
    for (int i = 0; i < argc + 3; i++) {
        total += add(i, argc);
        if (i & 1)
            total ^= 5;
        else
            total--;
    }
    printf("%d\\n", total);
    return 0;
}
"""


def compiled(directory: Path, *options: str, source: str = SOURCE, name: str = "lines.c") -> Path:
    """Return a program of a source, compiled with debug information."""
    (directory / name).write_text(source)
    program = directory / "program"
    subprocess.run(["gcc", "-g", *options, "-o", program, name], cwd=directory, check=True)
    return program


def sections_of(path: Path) -> tuple[DWARFInfo, LineSections]:
    """Return an independent reader of a file's debug information, and what our own reads."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dwarf = elf.get_dwarf_info()
        sections = (dwarf.debug_line_sec, dwarf.debug_str_sec, dwarf.debug_line_str_sec)
        lines, strings, line_strings = (b"" if each is None else _whole(each.stream) for each in sections)
        return dwarf, LineSections(lines, strings, line_strings, not elf.little_endian)


def _whole(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read()


class SourceLine(NamedTuple):
    """A line of a source file; ``path`` is as the compiler wrote it."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line}"


class UnitLines:
    """Which line each instruction of a unit is of."""

    def __init__(self, program: LineProgram) -> None:
        rows = sorted(_in_force(program.rows()), key=lambda row: row.address)
        self._files = program.files
        self._rows = rows
        self._addresses = [row.address for row in rows]

    def line_at(self, address: int) -> SourceLine | None:
        """Return the line that an instruction is of; None if it is of none."""
        row = self._row_at(address)
        return None if row is None else SourceLine(self.path(row.file), row.line)

    def path(self, file: int) -> str:
        """Return the path of a file by its number, ``?`` for a number that there is not."""
        return self._files[file] if 0 <= file < len(self._files) else "?"

    def _row_at(self, address: int) -> LineRow | None:
        place = bisect_right(self._addresses, address)
        row = self._rows[place - 1] if place else None
        return row if row is not None and not row.ends and row.line else None


def _in_force(rows: Iterable[LineRow]) -> Iterator[LineRow]:
    """Give the last row at each address: an earlier one there has no instruction."""
    before: LineRow | None = None
    for row in rows:
        if before is not None and (before.address != row.address or before.ends):
            yield before
        before = row
    if before is not None:
        yield before
