"""
Preprocessed text to tokens, one after the other, as the parser asks for them.

Names of places (``libc.so.6:SSL_*``) are no tokens of C: where one may stand, the parser asks for a *place word*
instead.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed
    from dprobes.source import Span

__all__ = ["Token", "TokenKind", "TokenStream"]


class TokenKind(enum.Enum):
    """Classify a token."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    CHARACTER = "character"
    TABLE = "table"
    PUNCTUATION = "punctuation"
    END = "end"


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a token: its text as written and its place in the preprocessed text."""

    kind: TokenKind
    text: str
    start: int
    end: int

    @property
    def described(self) -> str:
        """The token in a message."""
        return "the end of the program" if self.kind is TokenKind.END else f"'{self.text}'"


_BLANK = lazy_pattern(r"\s*")
_TOKEN = lazy_pattern(
    r"""(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[A-Za-z0-9_.])*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.[0-7A-Fa-f]*)')
      | (?P<table>@[A-Za-z_]?[A-Za-z0-9_]*)
      | (?P<punctuation><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|::
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)
_PLACE_WORD = lazy_pattern(r'(?:"[^"\n]*"|[^\s(){},;"])*')
_KINDS = {kind.value: kind for kind in TokenKind}


class TokenStream:
    """Give the tokens of a text; ``diagnostics`` is told of characters that begin none, which are left out."""

    def __init__(self, text: Preprocessed, diagnostics: Diagnostics) -> None:
        self._preprocessed = text
        self._diagnostics = diagnostics
        self._position = 0
        self._ahead: list[Token] = []

    def peek(self, distance: int = 0) -> Token:
        """Return the next token, or one behind it, without taking it."""
        while len(self._ahead) <= distance:
            self._ahead.append(self._scan())
        return self._ahead[distance]

    def take(self) -> Token:
        """Take the next token; at the end it is END, as often as one likes."""
        token = self.peek()
        if token.kind is not TokenKind.END:
            self._ahead.pop(0)
        return token

    def take_place_word(self) -> Token:
        """Take what stands up to a blank, a bracket, a comma or a semicolon as one word, which may be empty."""
        start = self.peek().start
        match = _PLACE_WORD.match(self._preprocessed.text, start)
        assert match is not None
        self._ahead.clear()
        self._position = match.end()
        return Token(TokenKind.NAME, match.group(), start, match.end())

    def span(self, first: Token, last: Token | None = None) -> Span:
        """Return the place in the user's files of the tokens from ``first`` to ``last``."""
        return self._preprocessed.span(first.start, (last or first).end)

    def written(self, start: int, end: int) -> str:
        """Return a piece of the text as written, with macros expanded, and blanks reduced to one."""
        return " ".join(self._preprocessed.text[start:end].split())

    def _scan(self) -> Token:
        text = self._preprocessed.text
        while True:
            blank = _BLANK.match(text, self._position)
            assert blank is not None
            self._position = blank.end()
            if self._position >= len(text):
                return Token(TokenKind.END, "", len(text), len(text))
            match = _TOKEN.match(text, self._position)
            if match is not None:
                self._position = match.end()
                return Token(_KINDS[match.lastgroup or ""], match.group(), match.start(), match.end())
            self._report(text[self._position])
            self._position += 1

    def _report(self, character: str) -> None:
        span = self._preprocessed.span(self._position, self._position + 1)
        if character in "\"'":
            self._diagnostics.error(span, f"a {character} without its partner on the same line")
            end = self._preprocessed.text.find("\n", self._position)
            self._position = end if end >= 0 else len(self._preprocessed.text)
        else:
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            self._diagnostics.error(span, f"unexpected character {shown}")
