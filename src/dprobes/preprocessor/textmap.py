"""
Preprocessed text, and the map from its characters to the source.

The pieces of a text cover it without gaps, in order. Where they came from is all that is known here; no rule of C.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.source import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Piece", "Preprocessed", "TextBuilder"]


class Piece(NamedTuple):
    """
    Say where the characters from ``start`` to the next piece came from.

    Copied characters have no ``span``: they are ``file.text[source:]``. Others, such as the output of a macro, all
    come from ``span``.
    """

    start: int
    file: SourceFile
    source: int
    span: Span | None


class Preprocessed:
    """
    Hold preprocessed text and answer where its characters came from.

    All pieces of a text that has a ``presented_as`` come from one file, and messages show that one in its place.
    """

    __slots__ = ("_pieces", "_presented_as", "_starts", "text")

    def __init__(self, text: str, pieces: Sequence[Piece], presented_as: SourceFile | None = None) -> None:
        self.text = text
        self._pieces = pieces
        self._presented_as = presented_as
        self._starts: list[int] | None = None  # made when a place is asked for: most programs have no errors

    @classmethod
    def copy_of(cls, source: SourceFile, end: int | None = None) -> Preprocessed:
        """Return the text of ``source`` up to ``end`` as it is."""
        return cls(source.text[:end], [Piece(0, source, 0, None)])

    def presented_as(self, file: SourceFile) -> Preprocessed:
        """Return the same text, whose places are in ``file``: another view of the file that all of it comes from."""
        text = Preprocessed(self.text, self._pieces, file)
        text._starts = self._starts
        return text

    def pieces(self, start: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield each piece that overlaps the range, with the part of the range that it covers."""
        index = self._index(start)
        while start < end:
            stop = min(end, self._end(index))
            yield self._piece(index), start, stop
            start = stop
            index += 1

    def span(self, start: int, end: int) -> Span:
        """Return the place from which the characters ``start`` to ``end`` of the text came."""
        first = self._index(start)
        last = self._index(max(start, end - 1))
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
    """Put a preprocessed text together from its start to its end; ``source`` is where an empty text comes from."""

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
        """Append ``text``, which came from ``span``."""
        if text:
            copied = span.expansion is None and span.end - span.start == len(text) and span.text == text
            self._add(text, span.file, span.start, None if copied else span)

    def last_line(self) -> str:
        """Return what follows the last newline."""
        parts: list[str] = []
        for part in reversed(self._parts):
            _, newline, rest = part.rpartition("\n")
            parts.append(rest)
            if newline:
                break
        return "".join(reversed(parts))

    def build(self) -> Preprocessed:
        """Return the text."""
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
    """Return the span that covers both; within one use of a macro, cover both places of its body."""
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
