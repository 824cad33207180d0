"""
The template directory file: which file has the templates of a major code.

A line is ``major file``; a file's name has no directory in it, so that it can travel. C comments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.diagnostics import Note
from dprobes.formatters.templates.lexer import TokenKind, WordToken, without_comments
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.expressions import ExpressionError, parse_number
from dprobes.source import Span

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["DIRECTORY_FILE", "MAJOR_MAX", "Entry", "directory_text", "parse_directory"]

DIRECTORY_FILE = "templates.lst"

MAJOR_MAX = 0xFFFF
"""The highest major or minor code, as in programs."""

NAME_MAX = 255
ENTRIES_MAX = 0x10000

_WORD = lazy_pattern(r"\n|[^ \t\r\f\v\n]+")


class Entry(NamedTuple):
    """Hold one line of the directory: the file's name, and where it is written."""

    file: str
    span: Span


def parse_directory(source: SourceFile, diagnostics: Diagnostics) -> dict[int, Entry]:
    """Return the files by their major codes; what is wrong goes to ``diagnostics``."""
    entries: dict[int, Entry] = {}
    first: dict[int, Span] = {}
    for words in _lines(without_comments(source, diagnostics)):
        major_span = Span(source, *words[0].span())
        if len(words) == 1:
            diagnostics.error(major_span, "expected 'major file'", hint="1  kernel.fmt")
            continue
        if len(words) > 2:
            span = Span(source, words[2].start(), words[-1].end())
            diagnostics.error(span, "expected the end of the line after 'major file'")
            continue
        token = WordToken(TokenKind.NUMBER, words[0].group(), *words[0].span())
        try:
            major = parse_number(token)
        except ExpressionError as error:
            diagnostics.error(major_span, f"expected a major code, found '{token.text}'", hint=error.hint)
            continue
        if major > MAJOR_MAX:
            diagnostics.error(major_span, f"expected a major code from 0 to {MAJOR_MAX}, found {token.text}")
            continue
        name, name_span = words[1].group(), Span(source, *words[1].span())
        if not is_plain_name(name):
            hint = f"the file stands beside '{DIRECTORY_FILE}'"
            diagnostics.error(name_span, f"expected the name of a file without directories, found '{name}'", hint=hint)
        elif major in entries:
            note = Note("the first one is here", first[major])
            diagnostics.warning(major_span, f"major {major} is there already; the first file is taken", notes=(note,))
        else:
            entries[major], first[major] = Entry(name, name_span), major_span
    return entries


def _lines(text: str) -> Iterator[list[re.Match[str]]]:
    """Iterate over the words of each line that has any."""
    words: list[re.Match[str]] = []
    for match in _WORD.finditer(text):
        if match.group() != "\n":
            words.append(match)
        elif words:
            yield words
            words = []
    if words:
        yield words


def is_plain_name(name: str) -> bool:
    """Return whether a file of this name lies in the directory itself, and nowhere else."""
    return (
        "/" not in name and "\\" not in name and name not in (".", "..", DIRECTORY_FILE)
        and name.isprintable() and not any(c.isspace() for c in name) and len(name) <= NAME_MAX
    )  # fmt: skip


def directory_text(files: Iterable[tuple[int, str]]) -> bytes:
    """Return a directory file with certain lines."""
    return "".join(f"{major} {file}\n" for major, file in files).encode()
