"""
Where the parts of a program were written: the lines that messages may show, and spans in them.

Only lines to which something refers are carried; the others are empty in the file that is made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.ppdf.fieldcodec import NO_TEXT, NONE, Strings, Writer
from dprobes.source import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.ppdf.fieldcodec import Reader

__all__ = ["SPAN_SIZE", "Spans", "read_sources"]

LINE_MAX = 1 << 22
"""The sum of all files' numbers of lines; a higher one would only fill memory."""

DEPTH_MAX = 64
"""How many macros may lead to each other from one span."""

SPAN_SIZE = 24
_FILE_SIZE, _LINE_SIZE = 8, 8

_Row = tuple[int, int, int, int, int, int]


class Spans:
    """Number spans, each once; ``write`` writes them with the lines that they need."""

    def __init__(self, strings: Strings) -> None:
        self._strings = strings
        self._files: dict[SourceFile, int] = {}
        self._lines: list[dict[int, str]] = []
        self._rows: dict[_Row, int] = {}

    def number(self, span: Span | None, depth: int = 0) -> int:
        """Return the number of a span, or NONE."""
        if span is None or depth >= DEPTH_MAX:
            return NONE
        line, column = span.file.line_and_column(span.start)
        text = NO_TEXT.sub(" ", span.file.line_text(line))
        column = min(column, len(text) + 1)
        length = max(0, min(span.end - span.start, len(text) + 1 - column))
        file = self._files.setdefault(span.file, len(self._files))
        if file == len(self._lines):
            self._lines.append({})
        self._lines[file][line] = text
        name = body = NONE
        if span.expansion is not None:
            name = self._strings.number(span.expansion.name)
            body = self.number(span.expansion.body, depth + 1)
        return self._rows.setdefault((file, line, column, length, name, body), len(self._rows))

    def write(self, out: Writer) -> None:
        """Write files, lines and spans."""
        out.u32(len(self._files))
        for file, lines in zip(self._files, self._lines, strict=True):
            out.string(file.name)
            out.u32(len(lines))
            for line, text in sorted(lines.items()):
                out.u32(line)
                out.string(text)
        out.u32(len(self._rows))
        for row in self._rows:
            for value in row:
                out.u32(value)


@dataclass(frozen=True, slots=True)
class _File:
    source: SourceFile
    lines: Mapping[int, str]
    starts: Mapping[int, int]


def read_sources(reader: Reader) -> Sequence[Span]:
    """Return the spans by their numbers."""
    files: list[_File] = []
    lines_left = LINE_MAX
    for _ in range(reader.count(_FILE_SIZE, "source files")):
        file = _read_file(reader, lines_left)
        lines_left -= max(file.lines, default=0)
        files.append(file)
    spans: list[Span] = []
    depths: list[int] = []
    for _ in range(reader.count(SPAN_SIZE, "spans")):
        file = files[reader.below(len(files), "the number of a source file")]
        at = reader.offset
        line, column, length = (reader.u32(what) for what in ("a line", "a column", "a length"))
        if line not in file.lines:
            reader.fail(f"line {line} of '{file.source.name}' is not there", at)
        room = len(file.lines[line]) + 1
        if not 1 <= column <= room or length > room - column:
            reader.fail(f"expected columns from 1 to {room}, found {length} characters from column {column} on", at)
        name = reader.string_or_none("a macro")
        body = reader.below_or_none(len(spans), "the number of a span for a macro")
        depth = 0 if body is None else depths[body] + 1
        if depth >= DEPTH_MAX or (name is None and body is not None):
            reader.fail("the definitions of macros lead nowhere", at)
        expansion = None if name is None else Expansion(name, None if body is None else spans[body])
        start = file.starts[line] + column - 1
        spans.append(Span(file.source, start, start + length, expansion))
        depths.append(depth)
    reader.end()
    return spans


def _read_file(reader: Reader, lines_left: int) -> _File:
    name = reader.string("the name of a source file")
    lines: dict[int, str] = {}
    previous = 0
    for _ in range(reader.count(_LINE_SIZE, "lines")):
        at = reader.offset
        line = reader.u32("the number of a line")
        if not previous < line <= lines_left:
            reader.fail(f"expected the number of a line from {previous + 1} to {lines_left}, found {line}", at)
        lines[line] = reader.string("a line")
        previous = line
    parts: list[str] = []
    starts: dict[int, int] = {}
    position, previous = 0, 0
    for line, text in lines.items():
        parts += ["\n" * (line - previous - 1), text, "\n"]
        starts[line] = position + line - previous - 1
        position = starts[line] + len(text) + 1
        previous = line
    return _File(SourceFile(name, "".join(parts)), lines, starts)
