"""
The template directory file: a map from major codes to template files, and the lexer of template files.

A line is ``major file``; a file name contains no directory, so that it is portable. C comments are allowed.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from dprobes.diagnostics import Note
from dprobes.rpn.rpn_expressions import ExpressionError, Statement, TokenKind, WordToken, parse_number
from dprobes.source_text import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import SourceFile

__all__ = [
    "DIRECTORY_FILE",
    "MAJOR_MAX",
    "Entry",
    "Statement",
    "TokenKind",
    "WordToken",
    "directory_text",
    "parse_directory",
    "statements",
]

# Lexer of template files: from text to statements of tokens; a statement ends with its line. A comment is a blank.
# Keywords are not interpreted.

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f\v]+|//[^\n]*)
      | (?P<comment>/\*(?:[^*]|\*(?!/))*+\*/)
      | (?P<end>\n)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[0-9][A-Za-z0-9_]*)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*+")
      | (?P<punctuation>=)
      | (?P<open_comment>/\*)
      | (?P<open_string>"[^\n]*)
      | (?P<bad>[^\n])""",
    re.VERBOSE,
)

_COMMENT = re.compile(r"/\*(?P<body>(?:[^*]|\*(?!/))*+)(?P<end>\*/)?|//[^\n]*")
_NOT_NEWLINE = re.compile(r"[^\n]")

_KINDS = {kind.value: kind for kind in TokenKind}


def statements(source: SourceFile, diagnostics: Diagnostics) -> Iterator[Statement]:
    """Iterate over the statements of a file, without empty ones, and without those with an invalid token."""
    statement: Statement = []
    is_bad = False
    for match in _TOKEN.finditer(source.text):
        group, text = match.lastgroup, match.group()
        match group:
            case "blank":
                continue
            case "comment" if "\n" not in text:
                continue
            case "end" | "comment":
                if statement and not is_bad:
                    yield statement
                statement, is_bad = [], False
            case "name" | "number" | "string" | "punctuation":
                statement.append(WordToken(_KINDS[group], text, match.start(), match.end()))
            case _:
                if not is_bad:  # one error per line is enough
                    _report(source, match, diagnostics)
                is_bad = True
                if group == "open_comment":
                    return
    if statement and not is_bad:
        yield statement


def without_comments(source: SourceFile, diagnostics: Diagnostics) -> str:
    """Return the text of a file that has no strings, with its comments replaced by blanks."""

    def blank(match: re.Match[str]) -> str:
        if match["body"] is not None and match["end"] is None:
            diagnostics.error(Span(source, match.start(), match.start() + 2), "unterminated comment")
        return _NOT_NEWLINE.sub(" ", match.group())

    return _COMMENT.sub(blank, source.text)


def _report(source: SourceFile, match: re.Match[str], diagnostics: Diagnostics) -> None:
    start, character = match.start(), match.group()[0]
    match match.lastgroup:
        case "open_comment":
            diagnostics.error(Span(source, start, start + 2), "unterminated comment")
        case "open_string":
            diagnostics.error(Span(source, start, start + 1), "unterminated string")
        case _:
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            diagnostics.error(Span(source, start, start + 1), f"unexpected character {shown}")


DIRECTORY_FILE = "templates.lst"

MAJOR_MAX = 0xFFFF
"""The maximum major or minor code, as in programs."""

NAME_MAX = 255
ENTRIES_MAX = 0x10000

_WORD = re.compile(r"\n|[^ \t\r\f\v\n]+")


class Entry(NamedTuple):
    """One line of the directory: the file's name, and its span."""

    file: str
    span: Span


def parse_directory(source: SourceFile, diagnostics: Diagnostics) -> dict[int, Entry]:
    """Return the files by their major codes; errors go to ``diagnostics``."""
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
            hint = f"put the file beside '{DIRECTORY_FILE}'"
            diagnostics.error(name_span, f"expected the name of a file without directories, found '{name}'", hint=hint)
        elif major in entries:
            note = Note("the first one is here", first[major])
            diagnostics.warning(major_span, f"major {major} is there already; the first file is taken", notes=(note,))
        else:
            entries[major], first[major] = Entry(name, name_span), major_span
    return entries


def _lines(text: str) -> Iterator[list[re.Match[str]]]:
    """Iterate over the lines that are not empty, each as a list of matches of its words."""
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
    """
    Return True if a name is that of a file in the directory itself: without slashes, blanks and control characters.

    The directory file and a name of more than ``NAME_MAX`` bytes are not accepted.
    """
    return (
        "/" not in name and "\\" not in name and name not in (".", "..", DIRECTORY_FILE)
        and name.isprintable() and not any(c.isspace() for c in name) and len(os.fsencode(name)) <= NAME_MAX
    )  # fmt: skip


def directory_text(files: Iterable[tuple[int, str]]) -> bytes:
    """Return the contents of a directory file that lists pairs of major code and file name."""
    return "".join(f"{major} {file}\n" for major, file in files).encode()
