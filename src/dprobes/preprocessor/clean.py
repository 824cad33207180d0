"""
Translation phases 1 to 3 of C11 5.1.1.2: line ends, continued lines and comments.

Each line of the source keeps its number in the result: newlines that must leave a line follow at its end. Apart from
directives, whose lines begin with ``#``, nothing is known of what the text says.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.preprocessor.problems import Problem
from dprobes.preprocessor.textmap import Preprocessed, TextBuilder
from dprobes.source import Span

if TYPE_CHECKING:
    from dprobes.source import SourceFile

__all__ = ["Cleaned", "clean"]

_NEEDS_JOINING = lazy_pattern(r"\A\ufeff|\\[ \t]*\n|\r")
_LINE_END = lazy_pattern(r"(?P<continued>\\[ \t]*\r?\n)|\r?\n|\r")
# A character constant is short, so that an apostrophe does not make every search run to the end of its line.
_EVENT = lazy_pattern(
    r"""(?P<line>//[^\n]*)
    |(?P<block>/\*)
    |(?P<literal>"(?:[^"\\\n]|\\[^\n])*+"|'(?:[^'\\\n]|\\[^\n]){1,64}')
    |(?P<open>"[^\n]*)""",
    re.VERBOSE,
)
_EVENT_OR_NEWLINE = lazy_pattern(_EVENT.pattern + r"|(?P<newline>\n)", re.VERBOSE)


class Cleaned(NamedTuple):
    """Hold a file after ``clean``, with the errors found on the way."""

    source: SourceFile
    text: Preprocessed
    problems: list[Problem]


def clean(source: SourceFile) -> Cleaned:
    """
    Return the text without comments, with continued lines joined.

    A block comment becomes a space and its newlines; those of a comment within a directive, and those of continued
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
    """Return the text with continued lines joined, every line end a newline, and no byte order mark."""
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
        elif text[plain - 1] == "\r":  # alone, it ends no line
            out.put(" ", Span(source, plain - 1, plain))
        else:
            out.put("\n" * (owed + 1), Span(source, plain - 1, plain))
            owed = 0
    out.copy(base, plain, len(text))
    return out.build()
