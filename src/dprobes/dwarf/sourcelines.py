"""Places by line of the source: the instructions that begin one, and the line that an instruction is of."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.dwarf.linetable import line_programs
from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.dwarf.linetable import LineProgram, LineRow, LineSections

__all__ = ["SourceLine", "UnitLines", "addresses_of_lines"]

_NEAR_LINES = 2
"""How many lines with code are named beside one that has none."""


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


def addresses_of_lines(sections: LineSections, path: str, first: int, last: int) -> dict[int, list[int]]:
    """
    Return the link addresses of the instructions that begin a statement of lines from ``first`` to ``last``, by line.

    ``path`` is the name of a source file, or the last parts of its path. A statement that goes on over several rows
    begins once; a loop's line begins where it is entered, tested and continued. Where the compiler has left no
    statement of a line, its instructions do for it: those that come behind others' instructions. An instruction that
    several lines begin at is one of a single line that is asked for, and of several lines one of the last of them.

    Raise ``TargetError`` if there is no such file, several, or none of its instructions is of those lines.
    """
    starts: dict[int, tuple[set[int], set[int]]] = {}  # statements, and the rest
    owners: dict[int, int] = {}
    paths: set[str] = set()
    lines: set[int] = set()
    for program in line_programs(sections):
        files = {number for number, each in enumerate(program.files) if _ends_with(each, path)}
        if not files:
            continue
        before: LineRow | None = None
        for row in program.rows():
            if row.file in files and not row.ends and row.line:
                paths.add(_normal(program.files[row.file]))
                lines.add(row.line)
                if first <= row.line <= last:
                    owners[row.address] = row.line
                    if before is None or (before.file, before.line) != (row.file, row.line):
                        statements, others = starts.setdefault(row.line, (set(), set()))
                        (statements if row.begins_statement else others).add(row.address)
            before = None if row.ends else row
    if not lines:
        raise TargetError(f"no source file '{path}' is known to the debug information")
    if len(paths) > 1:
        raise TargetError(
            f"{len(paths)} source files are named '{path}'",
            hint=f"write more of its path: {', '.join(sorted(paths))}",
        )
    if not starts:
        what = f"line {first} of '{path}' has" if first == last else f"lines {first} to {last} of '{path}' have"
        raise TargetError(f"{what} no instructions", hint=_near(lines, first))
    found = {line: sorted(statements or others) for line, (statements, others) in sorted(starts.items())}
    if first != last:
        found = {line: [each for each in addresses if owners[each] == line] for line, addresses in found.items()}
    return {line: addresses for line, addresses in found.items() if addresses}


def _in_force(rows: Iterable[LineRow]) -> Iterator[LineRow]:
    """Give the last row at each address: an earlier one there has no instruction."""
    before: LineRow | None = None
    for row in rows:
        if before is not None and (before.address != row.address or before.ends):
            yield before
        before = row
    if before is not None:
        yield before


def _ends_with(path: str, end: str) -> bool:
    """Return whether the last parts of a path are those of another one."""
    return path == end or path.endswith(f"/{end}")


def _normal(path: str) -> str:
    """Return a path without the parts that lead nowhere: units name the same header in several ways."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] not in ("", ".."):
            parts.pop()
        elif part != "." and (part or not parts):
            parts.append(part)
    return "/".join(parts)


def _near(lines: Iterable[int], line: int) -> str:
    nearest: Sequence[int] = sorted(sorted(lines, key=lambda each: abs(each - line))[:_NEAR_LINES])
    return f"the nearest lines with instructions are {' and '.join(map(str, nearest))}"
