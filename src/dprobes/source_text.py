"""
Source text, places in it, and what is said of them.

A ``Span`` is three numbers' worth of data; lines and columns are computed only when something is printed.
This module knows nothing about the language that the text is written in.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.escapes import escaped, replaced

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Diagnostic", "Expansion", "Note", "Severity", "SourceFile", "Span"]

_LINE_LIMIT = 160
_BEFORE_CARET = 60
"""A longer source line is shown in part: so many characters, of which so many are before the caret."""

_MESSAGE_LIMIT = 600


@dataclass(frozen=True, eq=False)
class SourceFile:
    """
    The text of one file under the name that messages use for it.

    ``line_shift`` is added to the numbers of its lines: a ``#line`` directive gives the lines behind it other numbers.
    ``wording`` returns a message about it in the words of its language, where stages speak another one.
    """

    name: str
    text: str = field(repr=False)
    line_shift: int = 0
    wording: Callable[[str], str] | None = field(default=None, repr=False)

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
        return SourceFile(name, self.text, line - bisect_right(self._line_starts, offset), self.wording)

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


class Severity(Enum):
    """Rank a diagnostic; only an error stops the program from being inserted."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Note:
    """Add a fact to a diagnostic, with the place it speaks of if there is one."""

    message: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Say what is wrong (``message``), where (``span``), why (``notes``) and what to do (``hint``)."""

    severity: Severity
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    hint: str | None = None

    def worded(self) -> Diagnostic:
        """Return the same in the words of the text that it is about."""
        wording = self.span.file.wording if self.span is not None else None
        if wording is None:
            return self
        notes = tuple(Note(wording(note.message), note.span) for note in self.notes)
        hint = None if self.hint is None else wording(self.hint)
        return Diagnostic(self.severity, wording(self.message), self.span, notes, hint)

    def render(self) -> str:
        """Return the text for people, without a final line end."""
        parts = [_render_place(self.severity.value, self.message, self.span)]
        expansion = self.span.expansion if self.span is not None else None
        while expansion is not None:
            parts.append(_render_place("note", f"in the expansion of macro '{expansion.name}'", expansion.body))
            expansion = expansion.body.expansion if expansion.body is not None else None
        parts += [_render_place("note", note.message, note.span) for note in self.notes]
        if self.hint is not None:
            parts.append(f"hint: {_clip(self.hint)}")
        return "\n".join(parts)


def _render_place(label: str, message: str, span: Span | None) -> str:
    message = _clip(message)
    if span is None:
        return f"{label}: {message}"
    line, column = span.file.line_and_column(span.start)
    text = span.file.line_text(line)
    first = max(0, column - 1 - _BEFORE_CARET) if len(text) > _LINE_LIMIT else 0
    shown = replaced(text[first : first + _LINE_LIMIT])
    caret = column - 1 - first
    length = max(1, min(span.end - span.start, len(shown) - caret))
    if first + _LINE_LIMIT < len(text):
        shown += _ELLIPSIS
    if first:
        shown, caret = _ELLIPSIS + shown, caret + len(_ELLIPSIS)
    # The caret line repeats the tabs of the source line, so that it stands right whatever the tab width is.
    padding = "".join("\t" if c == "\t" else " " for c in shown[:caret])
    return f"{escaped(str(span))}: {label}: {message}\n    {shown}\n    {padding}^{'~' * (length - 1)}"


_ELLIPSIS = "..."


def _clip(message: str) -> str:
    # A message quotes the user's words, which may be of any length and hold anything.
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT // 2] + _ELLIPSIS + message[-_MESSAGE_LIMIT // 4 :]
    return escaped(message)
