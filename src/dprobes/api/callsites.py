"""Lines of Python code as places of a probe program: the span of the call that a statement comes from."""

from __future__ import annotations

import itertools
import linecache
import sys
from typing import TYPE_CHECKING

from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["CallPlaces"]


class CallPlaces:
    """Find the calls of our methods in the code of users; files are read once."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}

    def here(self, statement: str) -> Span:
        """
        Return the place of the call that has led into this package.

        Where its code is not to be had (an interactive session), ``statement`` stands in the place of its line.
        """
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads all files
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("dprobes.api."):
            frame = frame.f_back
        if frame is None:
            return Span(SourceFile("program", statement), 0, len(statement))
        return self._span(frame, statement)

    def _span(self, frame: FrameType, statement: str) -> Span:
        name = frame.f_code.co_filename
        if (file := self._files.get(name)) is None:
            file = SourceFile(name, "".join(linecache.getlines(name, frame.f_globals)))
            self._files[name] = file
        line, last, column, end = _position(frame)
        if not file.text or line > file.text.count("\n") + 1:
            file = SourceFile(name, "\n" * (line - 1) + statement)
            return Span(file, line - 1, line - 1 + len(statement))
        start, text = file.line_start(line), file.line_text(line)
        first = _characters(text, column)
        behind = _characters(text, end) if last == line else len(text)
        if first >= behind:
            first, behind = len(text) - len(text.lstrip()), len(text)
        return Span(file, start + first, start + behind)


def _position(frame: FrameType) -> tuple[int, int, int, int]:
    """Return first and last line of the call that a frame is in, and its columns in UTF-8 bytes."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, last, column, end = next(positions, (None, None, None, None))
    line = line or frame.f_lineno
    return line, last or line, column or 0, end or 0


def _characters(text: str, count: int) -> int:
    """Return how many characters the first bytes of a line are."""
    return len(text.encode()[:count].decode("utf-8", "ignore"))
