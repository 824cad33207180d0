"""
C preprocessing of probe programs, with the origin of every character of the result.

Text without directives takes a fast path that only removes comments and joins continued lines; the macro machinery
(``_pcpp``) and the external preprocessor (``_cpp_external``) work on top of it. This module knows the lexical rules
of C comments, strings and lines, but nothing about RPN or any other language of the result.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Diagnostic, Diagnostics, Note, Severity
from dprobes.errors import SourceError
from dprobes.source import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["FILE_LIMIT", "TEXT_LIMIT", "Piece", "Preprocessed", "preprocess", "read_source"]

FILE_LIMIT = 16 << 20
"""The size in bytes beyond which a file is refused."""

TEXT_LIMIT = 2 << 20
"""The number of characters beyond which text with directives or macros is refused."""

_MIB = 1 << 20
_NEEDS_MACROS = re.compile(r"^[ \t\f\v]*#|\b__[A-Za-z_]", re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# What ends a run of plain characters: a comment, string, character constant, continuation or carriage return.
_EVENT = re.compile(r"""//|/\*|"(?:[^"\\\r\n]|\\[^\r\n])*+"|"|'(?:[^'\\\n]|\\[^\n]){1,64}'|\\[ \t]*\r?\n|\r""")
_EVENT_OR_NEWLINE = re.compile(_EVENT.pattern + r"|\n")
_LINE_COMMENT = re.compile(r"//(?:[^\\\n]|\\[ \t]*\r?\n|\\)*+")
# The characters of a string up to its end, to the end of the line, or to a continuation.
_STRING_BODY = re.compile(r"""(?:[^"\\\r\n]|\\(?![ \t]*\r?\n)[^\n]|\r(?!\n))*+""")
_CONTINUATION = re.compile(r"\\[ \t]*\r?\n")


@dataclass(frozen=True, slots=True)
class Piece:
    """
    Say where a run of preprocessed characters came from.

    For the output of a macro, ``span`` is the place of use and ``span.expansion`` leads to the definition.
    """

    start: int
    end: int
    span: Span


class Run(NamedTuple):
    """Hold a piece compactly: copied characters have no ``span``, they are ``file.text[source:]``."""

    start: int
    file: SourceFile
    source: int
    span: Span | None


class Problem(NamedTuple):
    """Hold an error of ``clean`` until it is known that its line is not skipped by an ``#if``."""

    offset: int
    span: Span
    message: str


class Preprocessed:
    """Hold preprocessed text and answer where its characters came from."""

    __slots__ = ("_runs", "_starts", "text")

    def __init__(self, text: str, runs: Sequence[Run]) -> None:
        self.text = text
        self._runs = runs
        self._starts: list[int] | None = None

    @property
    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order; they cover the whole text."""
        for index, run in enumerate(self._runs):
            end = self._end(index)
            if end > run.start:
                yield Piece(run.start, end, self._clip(index, run.start, end))

    def runs(self, start: int, end: int) -> Iterator[tuple[Run, int, int]]:
        """Yield each run that overlaps the range, with the part of the range that it covers."""
        index = self._index(start)
        while start < end:
            stop = min(end, self._end(index))
            yield self._runs[index], start, stop
            start = stop
            index += 1

    def span(self, start: int, end: int) -> Span:
        """Return the place from which the characters ``start`` to ``end`` of the text came."""
        first = self._index(start)
        last = self._index(max(start, end - 1))
        if first == last:
            return self._clip(first, start, end)
        return _join(self._clip(first, start, self._end(first)), self._clip(last, self._runs[last].start, end))

    def _index(self, offset: int) -> int:
        if self._starts is None:
            self._starts = [run.start for run in self._runs]
        return max(0, bisect_right(self._starts, offset) - 1)

    def _end(self, index: int) -> int:
        return self._runs[index + 1].start if index + 1 < len(self._runs) else len(self.text)

    def _clip(self, index: int, start: int, end: int) -> Span:
        run = self._runs[index]
        if run.span is not None:
            return run.span
        shift = run.source - run.start
        return Span(run.file, start + shift, end + shift)


def preprocess(
    source: SourceFile,
    diagnostics: Diagnostics,
    *,
    defines: Sequence[tuple[str, str]] = (),
    include_dirs: Sequence[Path] = (),
    external: str | None = None,
) -> Preprocessed:
    """
    Return the text of ``source`` after C preprocessing; errors go to ``diagnostics`` and the text is then incomplete.

    Every newline of the result ends a statement. ``external`` is the command of another preprocessor, as in
    ``gcc -E``, that runs instead of the built-in one.
    """
    valid = []
    for name, value in defines:
        if _IDENTIFIER.fullmatch(name):
            valid.append((name, value))
        else:
            hint = "write it as '-D NAME=VALUE'"
            diagnostics.error(None, f"'{name}' cannot be the name of a macro", hint=hint)
    if external is not None:
        from dprobes.rpn._cpp_external import run_external

        return run_external(external, source, diagnostics, valid, include_dirs)
    result, problems = clean(source)
    if not valid and not _NEEDS_MACROS.search(result.text):
        for problem in problems:
            diagnostics.error(problem.span, problem.message)
        return result
    if len(source.text) > TEXT_LIMIT:
        refuse_long_text(source, diagnostics)
        return Preprocessed("", [Run(0, source, 0, None)])
    from dprobes.rpn._pcpp import run_pcpp  # imports pcpp, which takes 30 ms

    return run_pcpp(source, diagnostics, valid, include_dirs)


def read_source(path: Path) -> SourceFile:
    """Return the file as text; raise ``SourceError`` if it cannot be read, is not UTF-8, or is too large."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unreadable(f"cannot read '{path}': {reason[:1].lower()}{reason[1:]}") from error
    if len(data) > FILE_LIMIT:
        raise _unreadable(f"'{path}' is larger than {FILE_LIMIT // _MIB} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(f"'{path}' is not a text file", f"invalid UTF-8 at byte {error.start}") from error
    if (nul := text.find("\0")) >= 0:
        raise _unreadable(f"'{path}' is not a text file", f"NUL at byte {len(text[:nul].encode())}")
    return SourceFile(str(path), text)


def refuse_long_text(source: SourceFile, diagnostics: Diagnostics, span: Span | None = None) -> None:
    """Report that there is more text than the built-in preprocessor takes."""
    diagnostics.error(
        span,
        f"'{source.name}' has more than {TEXT_LIMIT // _MIB} MiB of text, too much for the built-in preprocessor",
        hint="remove directives, macros and names that begin with '__', or use '--cpp \"gcc -E\"'",
    )


def clean(source: SourceFile) -> tuple[Preprocessed, list[Problem]]:
    """
    Return the text without comments, with continued lines joined, and the errors found on the way.

    A block comment becomes a space and its newlines; those of a comment within a directive, and those of continued
    lines, follow at the end of the joined line. So each line keeps its number.
    """
    return _Cleaner(source).run()


class _Cleaner:
    """Do the work of ``clean``."""

    def __init__(self, source: SourceFile) -> None:
        self.file = source
        self.parts: list[str] = []
        self.runs: list[Run] = []
        self.problems: list[Problem] = []
        self.size = 0
        self.owed = 0  # newlines taken out of the current line
        self.head = ""  # the current line of output from its first character that is not blank

    def run(self) -> tuple[Preprocessed, list[Problem]]:
        text = self.file.text
        plain = position = 1 if text.startswith("\ufeff") else 0
        while True:
            event = (_EVENT_OR_NEWLINE if self.owed else _EVENT).search(text, position)
            if event is None:
                break
            at, position = event.span()
            kind = text[at]
            if kind == "'" or (kind == '"' and position > at + 1):  # complete on its line
                continue
            if kind == '"':
                position = self._string(at, plain)
                plain = max(plain, self.copied)
                continue
            self._copy(plain, at)
            if kind == "\n":
                self._copy(at, position)
                self._put("\n" * self.owed, at, position)
                self.owed = 0
            elif kind == "/":
                position = self._comment(at)
            elif kind == "\\":
                self.owed += 1
            elif not text.startswith("\n", position):  # a carriage return that ends no line
                self._put(" ", at, position)
            plain = position
        self._copy(plain, len(text))
        if not self.runs:
            self.runs.append(Run(0, self.file, plain, None))
        return Preprocessed("".join(self.parts), self.runs), self.problems

    copied = 0
    """How far ``_string`` has copied."""

    def _string(self, start: int, plain: int) -> int:
        text = self.file.text
        position = start + 1
        while True:
            matched = _STRING_BODY.match(text, position)
            assert matched is not None
            position = matched.end()
            if text.startswith('"', position):
                return position + 1
            continuation = _CONTINUATION.match(text, position)
            if continuation is None:
                where = self.size + max(0, start - plain)
                self.problems.append(Problem(where, Span(self.file, start, start + 1), "unterminated string"))
                return position
            self._copy(plain, position)
            self.owed += 1
            plain = self.copied = position = continuation.end()

    def _comment(self, start: int) -> int:
        text = self.file.text
        if text.startswith("//", start):
            matched = _LINE_COMMENT.match(text, start)
            assert matched is not None
            end = matched.end()
            if text[end - 1] == "\r":
                end -= 1
            self.owed += text.count("\n", start, end)
            return end
        end = text.find("*/", start + 2) + 2
        if end == 1:
            span = Span(self.file, start, start + 2)
            self.problems.append(Problem(self.size, span, "unterminated comment"))
            end = len(text)
        newlines = text.count("\n", start, end)
        if newlines and not self.head.startswith("#"):
            self._put(" " + "\n" * (newlines + self.owed), start, end)
            self.owed = 0
        else:
            self._put(" ", start, end)
            self.owed += newlines
        return end

    def _copy(self, start: int, end: int) -> None:
        if end > start:
            self._add(self.file.text[start:end], start, None)

    def _put(self, text: str, start: int, end: int) -> None:
        if text:
            self._add(text, start, Span(self.file, start, end))

    def _add(self, text: str, source: int, span: Span | None) -> None:
        self.parts.append(text)
        self.runs.append(Run(self.size, self.file, source, span))
        self.size += len(text)
        newline = text.rfind("\n")
        if newline >= 0 or not self.head:
            self.head = text[newline + 1 :].lstrip(" \t\f\v")


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


def _unreadable(message: str, note: str | None = None) -> SourceError:
    notes = (Note(note),) if note is not None else ()
    return SourceError([Diagnostic(Severity.ERROR, message, None, notes)])
