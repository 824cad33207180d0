"""
Preprocessed text, and the map from its characters to the source.

The pieces of a text cover it without gaps, in order. The module records their origins only, without any rule of C.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from dprobes.source_text import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.diagnostics import Diagnostics, Note

__all__ = ["Cleaned", "DirectiveError", "Piece", "Preprocessed", "StopError", "TextBuilder", "clean"]


class Problem(NamedTuple):
    """An error from ``clean``, reported only if its line is not skipped by an ``#if``."""

    offset: int
    span: Span
    message: str


class PreprocessError(Exception):
    """An error in preprocessing that is not yet reported, with the parts of its diagnostic."""

    def __init__(
        self, message: str, span: Span | None = None, *, notes: tuple[Note, ...] = (), hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.span = span
        self.notes = notes
        self.hint = hint

    def report(self, diagnostics: Diagnostics, otherwise: Span | None = None) -> None:
        """Add the error to ``diagnostics``, at ``otherwise`` if it has no place of its own."""
        diagnostics.error(self.span or otherwise, str(self), notes=self.notes, hint=self.hint)


class DirectiveError(PreprocessError):
    """An error in a directive; the lines after it are still read."""


class StopError(PreprocessError):
    """An error that ends preprocessing, such as an exceeded limit."""


class Piece(NamedTuple):
    """
    The origin of the characters from ``start`` on.

    It is ``file.text[source:]``, or ``span`` for all of the characters if that is not None.
    """

    start: int
    file: SourceFile
    source: int
    span: Span | None


class Preprocessed:
    """
    A preprocessed text with the origins of its characters.

    All pieces of a text that has a ``presented_as`` come from one file, which messages show under that name.
    """

    __slots__ = ("_pieces", "_presented_as", "_starts", "text")

    def __init__(self, text: str, pieces: Sequence[Piece], presented_as: SourceFile | None = None) -> None:
        self.text = text
        self._pieces = pieces
        self._presented_as = presented_as
        self._starts: list[int] | None = None  # made at the first request for a place: most programs have no errors

    @classmethod
    def copy_of(cls, source: SourceFile, end: int | None = None) -> Preprocessed:
        """Return the text of ``source`` up to ``end`` unchanged."""
        return cls(source.text[:end], [Piece(0, source, 0, None)])

    def presented_as(self, file: SourceFile) -> Preprocessed:
        """Return the same text with places in ``file``, another view of the only file from which it comes."""
        text = Preprocessed(self.text, self._pieces, file)
        text._starts = self._starts
        return text

    def pieces(self, start: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """Iterate over the pieces that overlap the range, each with the part of the range that it covers."""
        index = self._index(start)
        while start < end:
            stop = min(end, self._end(index))
            yield self._piece(index), start, stop
            start = stop
            index += 1

    def span(self, start: int, end: int) -> Span:
        """Return the origin of the characters from ``start`` to ``end``, exclusive, of the text."""
        first = last = 0
        if len(self._pieces) > 1:
            first, last = self._index(start), self._index(max(start, end - 1))
        if first == last:
            return self._clip(first, start, end)
        return _join(self._clip(first, start, self._end(first)), self._clip(last, self._pieces[last].start, end))

    def _index(self, offset: int) -> int:
        if self._starts is None:
            self._starts = [piece.start for piece in self._pieces]
        return max(0, bisect_right(self._starts, offset) - 1)

    def _end(self, index: int) -> int:
        return self._pieces[index + 1].start if index + 1 < len(self._pieces) else len(self.text)

    def _piece(self, index: int) -> Piece:
        piece, file = self._pieces[index], self._presented_as
        if file is None:
            return piece
        span = None if piece.span is None else Span(file, piece.span.start, piece.span.end)
        return Piece(piece.start, file, piece.source, span)

    def _clip(self, index: int, start: int, end: int) -> Span:
        piece = self._piece(index)
        if piece.span is not None:
            return piece.span
        shift = piece.source - piece.start
        return Span(piece.file, start + shift, end + shift)


class TextBuilder:
    """A builder of a preprocessed text, from start to end; ``source`` is the origin of an empty text."""

    def __init__(self, source: SourceFile) -> None:
        self.size = 0
        self._source = source
        self._parts: list[str] = []
        self._pieces: list[Piece] = []

    def copy(self, text: Preprocessed, start: int, end: int) -> None:
        """Append a range of another text, with its origins."""
        for piece, first, last in text.pieces(start, end):
            self._add(text.text[first:last], piece.file, piece.source + first - piece.start, piece.span)

    def put(self, text: str, span: Span) -> None:
        """Append ``text``, whose origin is ``span``."""
        if text:
            copied = span.expansion is None and span.end - span.start == len(text) and span.text == text
            self._add(text, span.file, span.start, None if copied else span)

    def last_line(self) -> str:
        """Return the text after the last newline."""
        parts: list[str] = []
        for part in reversed(self._parts):
            _, newline, rest = part.rpartition("\n")
            parts.append(rest)
            if newline:
                break
        return "".join(reversed(parts))

    def build(self) -> Preprocessed:
        """Return the appended text with its origins in source files."""
        pieces = self._pieces or [Piece(0, self._source, len(self._source.text), None)]
        return Preprocessed("".join(self._parts), pieces)

    def _add(self, text: str, file: SourceFile, source: int, span: Span | None) -> None:
        last = self._pieces[-1] if self._pieces and span is None else None
        continues = (
            last is not None
            and last.span is None
            and last.file is file
            and last.source - last.start == source - self.size
        )
        if not continues:
            self._pieces.append(Piece(self.size, file, source, span))
        self._parts.append(text)
        self.size += len(text)


def _join(first: Span, last: Span) -> Span:
    """Return the span that covers both; if both are in one macro call, also both places in the macro's body."""
    outer: list[tuple[Span, Expansion]] = []
    while (
        first.expansion is not None
        and last.expansion is not None
        and first.expansion.name == last.expansion.name
        and (first.file, first.start, first.end) == (last.file, last.start, last.end)
        and first.expansion.body is not None
        and last.expansion.body is not None
    ):
        outer.append((first, first.expansion))
        first, last = first.expansion.body, last.expansion.body
    joined = first.to(last)
    for use, expansion in reversed(outer):
        joined = Span(use.file, use.start, use.end, Expansion(expansion.name, joined))
    return joined


# Each line of the source keeps its number: newlines that are removed from a line follow at its end.

_NEEDS_JOINING = re.compile(r"\A\ufeff|\\[ \t]*\n|\r")
_LINE_END = re.compile(r"(?P<continued>\\[ \t]*\r?\n)|\r?\n|\r")
# The length of a character constant is limited, so that an apostrophe does not make searches run to the end of a line.
_EVENT = re.compile(
    r"""(?P<line>//[^\n]*)
    |(?P<block>/\*)
    |(?P<literal>"(?:[^"\\\n]|\\[^\n])*+"|'(?:[^'\\\n]|\\[^\n]){1,64}')
    |(?P<open>"[^\n]*)""",
    re.VERBOSE,
)
_EVENT_OR_NEWLINE = re.compile(_EVENT.pattern + r"|(?P<newline>\n)", re.VERBOSE)


class Cleaned(NamedTuple):
    """A file after ``clean``, with the errors found in it."""

    source: SourceFile
    text: Preprocessed
    problems: list[Problem]


def clean(source: SourceFile) -> Cleaned:
    """
    Return the text of a source file without comments, with continued lines joined.

    A block comment becomes a space and its newlines. The newlines of a comment within a directive, and of continued
    lines, follow at the end of the joined line.
    """
    base = _join_lines(source)
    text = base.text
    out = TextBuilder(source)
    problems: list[Problem] = []
    owed = 0  # newlines taken out of the current line, which is then a directive
    plain = position = 0
    while (event := (_EVENT_OR_NEWLINE if owed else _EVENT).search(text, position)) is not None:
        at, position = event.span()
        kind = event.lastgroup
        if kind == "literal":
            continue
        if kind == "open":
            message = "unterminated string"
            if text[at - 1 : at] == "\\":
                message = "unterminated string: a quotation mark in single quotes of the shell needs no '\\' before it"
            problems.append(Problem(out.size + at - plain, base.span(at, at + 1), message))
            continue
        out.copy(base, plain, at)
        if kind == "newline":
            out.put("\n" * (owed + 1), base.span(at, position))
            owed = 0
        elif kind == "block":
            position = text.find("*/", position) + 2
            if position == 1:
                problems.append(Problem(out.size, base.span(at, at + 2), "unterminated comment"))
                position = len(text)
            newlines = text.count("\n", at, position)
            if newlines and (owed or out.last_line().lstrip(" \t\f\v").startswith("#")):
                owed += newlines
                newlines = 0
            out.put(" " + "\n" * newlines, base.span(at, position))
        plain = position
    if plain == 0:
        return Cleaned(source, base, problems)
    out.copy(base, plain, len(text))
    return Cleaned(source, out.build(), problems)


def _join_lines(source: SourceFile) -> Preprocessed:
    """Return the text with continued lines joined, with every line end as a newline, and without a byte order mark."""
    base = Preprocessed.copy_of(source)
    text = base.text
    if _NEEDS_JOINING.search(text) is None:
        return base
    out = TextBuilder(source)
    owed = 0
    plain = int(text.startswith("\ufeff"))
    for end in _LINE_END.finditer(text, plain):
        if end.group() == "\n" and not owed:
            continue
        out.copy(base, plain, end.start())
        plain = end.end()
        if end.lastgroup == "continued":
            owed += 1
        elif text[plain - 1] == "\r":  # a lone carriage return ends no line
            out.put(" ", Span(source, plain - 1, plain))
        else:
            out.put("\n" * (owed + 1), Span(source, plain - 1, plain))
            owed = 0
    out.copy(base, plain, len(text))
    return out.build()
