"""
Source text and places in it.

A ``Span`` is three numbers' worth of data; lines and columns are computed only when something is printed.
This module knows nothing about the language that the text is written in.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["Expansion", "SourceFile", "Span"]


@dataclass(frozen=True, eq=False)
class SourceFile:
    """
    The text of one file under the name that messages use for it.

    ``line_shift`` is added to the numbers of its lines: a ``#line`` directive gives the lines behind it other numbers.
    """

    name: str
    text: str = field(repr=False)
    line_shift: int = 0

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        position = self.text.find("\n")
        while position >= 0:
            starts.append(position + 1)
            position = self.text.find("\n", position + 1)
        return starts

    def renamed(self, name: str, offset: int, line: int) -> SourceFile:
        """Return the same text under another name, in which the line at ``offset`` has the number ``line``."""
        return SourceFile(name, self.text, line - bisect_right(self._line_starts, offset))

    def line_and_column(self, offset: int) -> tuple[int, int]:
        """Return the 1-based line and column, in characters, of ``offset``."""
        line = bisect_right(self._line_starts, offset)
        return line + self.line_shift, offset - self._line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """Return the text of a line, by the number that messages give it, without its line end."""
        line -= self.line_shift
        start = self._line_starts[line - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")

    def line_start(self, line: int) -> int:
        """Return the offset of the first character of a line; lines past the end start at the end."""
        line -= self.line_shift
        return self._line_starts[line - 1] if line <= len(self._line_starts) else len(self.text)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Say that text came out of the macro ``name``; ``body`` is the place in its definition, if it has one."""

    name: str
    body: Span | None


@dataclass(frozen=True, slots=True)
class Span:
    """
    Name the characters ``start`` (included) to ``end`` (excluded) of a file.

    For text that a macro produced, the span is the place of use, and ``expansion`` leads to the definition.
    """

    file: SourceFile
    start: int
    end: int
    expansion: Expansion | None = None

    def to(self, other: Span) -> Span:
        """Return the span from the start of this one to the end of ``other``, if both lie in one file."""
        if other.file is not self.file or other.end < self.start:
            return self
        return Span(self.file, self.start, other.end, self.expansion)

    @property
    def line(self) -> int:
        """The 1-based line on which the span starts."""
        return self.file.line_and_column(self.start)[0]

    @property
    def text(self) -> str:
        """The characters of the span."""
        return self.file.text[self.start : self.end]

    def __str__(self) -> str:
        line, column = self.file.line_and_column(self.start)
        return f"{self.file.name}:{line}:{column}"
