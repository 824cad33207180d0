"""
The text of a template file to statements of tokens; a statement ends with its line.

A comment is a blank. Nothing is known here of what the words mean.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazypattern import lazy_pattern
from dprobes.rpn.lexer import Statement, TokenKind, WordToken
from dprobes.source import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["Statement", "TokenKind", "WordToken", "statements", "without_comments"]

_TOKEN = lazy_pattern(
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

_COMMENT = lazy_pattern(r"/\*(?P<body>(?:[^*]|\*(?!/))*+)(?P<end>\*/)?|//[^\n]*")
_NOT_NEWLINE = lazy_pattern(r"[^\n]")

_KINDS = {kind.value: kind for kind in TokenKind}


def statements(source: SourceFile, diagnostics: Diagnostics) -> Iterator[Statement]:
    """Iterate over the statements of a file; empty ones are left out, and so is one with what is no token."""
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
                if not is_bad:  # one error a line is enough
                    _report(source, match, diagnostics)
                is_bad = True
                if group == "open_comment":
                    return
    if statement and not is_bad:
        yield statement


def without_comments(source: SourceFile, diagnostics: Diagnostics) -> str:
    """Return the text of a file without strings, with blanks in the place of its comments."""

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
