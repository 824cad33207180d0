"""Line tables of programs that gcc makes, and of installed debug files, for the tests beside."""

from __future__ import annotations

import subprocess
from typing import IO, TYPE_CHECKING

from elftools.elf.elffile import ELFFile

from dprobes.dwarf.line_table import LineSections

if TYPE_CHECKING:
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
