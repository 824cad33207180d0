"""
The tokens of C11 6.4 that matter to a preprocessor, and the way each took through macros.

A token never changes its place: the character range in the file, or in the definition, where it was written. It must
not know what macros are defined.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.source import Expansion, SourceFile, Span

if TYPE_CHECKING:
    from dprobes.preprocessor.textmap import Preprocessed

__all__ = ["BODY", "Token", "Use", "lex", "strip", "tokenize", "would_join"]

# A comment sign is a token because two tokens that are put together must not become one.
_LEXEME = lazy_pattern(
    r"""(?P<blank>[ \t\f\v]+|\n)
    |(?P<character>L?'(?:[^'\\\n]|\\.){1,64}')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*+"?)
    |(?P<other>//|/\*|\#\#|<<=|>>=|->|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|(?s:.))""",
    re.VERBOSE | re.ASCII,
)


class Use(NamedTuple):
    """Say out of which macro a token came, where that was used, and out of which macro that use came."""

    name: str
    place: Span
    outer: Use | None


BODY = Use("", Span(SourceFile("", ""), 0, 0), None)
"""Stands for the use of a macro in the tokens of its definition, which tells them from arguments."""


@dataclass(slots=True, eq=False)
class Token:
    """
    Hold a token.

    ``kind`` is the name of a group of the pattern above; ``hide`` names the macros that must not expand it again.
    """

    kind: str
    text: str
    place: Span
    use: Use | None = None
    hide: frozenset[str] = frozenset()

    def outermost(self) -> Span:
        """Return the place in the program text, outside of all macros."""
        place, use = self.place, self.use
        while use is not None:
            place, use = use.place, use.outer
        return place

    def span(self) -> Span:
        """Return the place of use, leading to the definitions."""
        span, use = self.place, self.use
        while use is not None:
            span = Span(use.place.file, use.place.start, use.place.end, Expansion(use.name, span))
            use = use.outer
        return span


def tokenize(text: Preprocessed, start: int, end: int) -> list[Token]:
    """Return the tokens, blanks included, of a range of a text without comments."""
    span = text.span
    return [
        Token(str(m.lastgroup), m.group(), span(m.start(), m.end())) for m in _LEXEME.finditer(text.text, start, end)
    ]


def lex(text: str) -> list[tuple[str, str]]:
    """Return kind and text of the tokens of ``text``."""
    return [(str(m.lastgroup), m.group()) for m in _LEXEME.finditer(text)]


def strip(tokens: list[Token]) -> list[Token]:
    """Return the tokens without the blanks at both ends."""
    start, end = 0, len(tokens)
    while start < end and tokens[start].kind == "blank":
        start += 1
    while start < end and tokens[end - 1].kind == "blank":
        end -= 1
    return tokens[start:end]


def would_join(first: Token, second: Token) -> bool:
    """Return whether two tokens that are not neighbours in the source would read as others when put together."""
    if "blank" in (first.kind, second.kind):
        return False
    if first.use is None and second.use is None and first.place.end == second.place.start:
        return False
    matched = _LEXEME.match(first.text + second.text)
    return matched is not None and matched.end() != len(first.text)
