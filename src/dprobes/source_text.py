"""
Source text, spans in it, and diagnostics about them.

A ``Span`` is small; lines and columns are computed only when something is printed. This module is independent of the
language of the text.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.escapes import escaped, replaced

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Diagnostic", "Expansion", "Note", "Severity", "SourceFile", "Span"]

_LINE_LIMIT = 160
_BEFORE_CARET = 60
"""Limits in characters: of the displayed part of a source line, and of its part before the caret."""

_MESSAGE_LIMIT = 600


@dataclass(frozen=True, eq=False)
class SourceFile:
    """
    The text of one file, with its name in messages.

    ``line_shift`` is added to line numbers: a ``#line`` directive renumbers the lines after it. ``wording`` converts a
    message about the file to the terms of its language, if a stage uses those of another one.
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
        """Return the 1-based line and column of a character ``offset``; the column is in characters."""
        line = bisect_right(self._line_starts, offset)
        return line + self.line_shift, offset - self._line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """Return the text of the line with the number ``line`` in messages, without its line end."""
        line -= self.line_shift
        start = self._line_starts[line - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")

    def line_start(self, line: int) -> int:
        """Return the offset of the first character of a line; lines past the end start at the end."""
        line -= self.line_shift
        return self._line_starts[line - 1] if line <= len(self._line_starts) else len(self.text)


class Expansion(NamedTuple):
    """
    The origin of text in the macro ``name``.

    ``body`` is the span in its definition, None for a macro without a definition in a file.
    """

    name: str
    body: Span | None


@dataclass(frozen=True, slots=True)
class Span:
    """
    The characters from ``start`` (inclusive) to ``end`` (exclusive) of a file.

    For text from a macro, the span is the use of the macro, and ``expansion`` refers to the definition.
    """

    file: SourceFile
    start: int
    end: int
    expansion: Expansion | None = None

    def to(self, other: Span) -> Span:
        """
        Return the span from the start of this one to the end of ``other``.

        Return this span if ``other`` is in another file, or ends before this one starts.
        """
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
    """The severity of a diagnostic; only an error prevents the insertion of a program."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Note(NamedTuple):
    """A secondary message of a diagnostic, with its own span, or None."""

    message: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A diagnostic: the problem (``message``), its place (``span``), reasons (``notes``) and a proposal (``hint``)."""

    severity: Severity
    message: str
    span: Span | None = None
    notes: tuple[Note, ...] = ()
    hint: str | None = None

    def worded(self) -> Diagnostic:
        """Return the diagnostic with its message, notes and hint in the terms of its file's language."""
        wording = self.span.file.wording if self.span is not None else None
        if wording is None:
            return self
        notes = tuple(Note(wording(note.message), note.span) for note in self.notes)
        hint = None if self.hint is None else wording(self.hint)
        return Diagnostic(self.severity, wording(self.message), self.span, notes, hint)

    def render(self) -> str:
        """Return the diagnostic as displayed, with its source line and caret, without a final line end."""
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
    # The caret line repeats the tabs of the source line, so that it is aligned at any tab width.
    padding = "".join("\t" if c == "\t" else " " for c in shown[:caret])
    return f"{escaped(str(span))}: {label}: {message}\n    {shown}\n    {padding}^{'~' * (length - 1)}"


_ELLIPSIS = "..."


def _clip(message: str) -> str:
    # A message quotes text of the user, which may be long and contain any character.
    if len(message) > _MESSAGE_LIMIT:
        message = message[: _MESSAGE_LIMIT // 2] + _ELLIPSIS + message[-_MESSAGE_LIMIT // 4 :]
    return escaped(message)
