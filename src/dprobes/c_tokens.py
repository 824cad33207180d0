"""
The tokens of a source text, scanned one at a time as the parser requests them.

A regular expression defines the tokens of a language. Names of places in modules are not tokens of C: where one is
allowed, the parser requests a word by a separate pattern.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import Span

__all__ = ["ParseError", "TextTokens", "Token", "TokenCursor", "TokenKind"]


class TokenKind(Enum):
    """The kind of a token; the enum values are the names of groups in a language's regular expression."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    CHARACTER = "character"
    TABLE = "table"
    VARIABLE = "variable"
    PARAMETER = "parameter"
    PUNCTUATION = "punctuation"
    PLACE = "place"
    END = "end"


class Token(NamedTuple):
    """
    A token: its text as written, and its character offsets in the source text.

    The text of END is the name of the end in messages.
    """

    kind: TokenKind
    text: str
    start: int
    end: int

    @property
    def described(self) -> str:
        """The token in a message."""
        return self.text if self.kind is TokenKind.END else f"'{self.text}'"


_OTHER_QUOTES = re.compile(
    r"""['\u2018](?P<single>[^'\u2019"\n]*)['\u2019]|[\u201c\u201d](?P<text>[^\u201c\u201d"\n]*)[\u201c\u201d]"""
)
"""A string in single or typographic quotes."""
_BLANK = re.compile(r"\s*")
_KINDS = {kind.value: kind for kind in TokenKind}


class TextTokens:
    """
    The tokens of a source text.

    ``pattern`` has a group for each kind of token. ``span_of`` returns the span in the user's files for two offsets in
    ``text``, and ``end`` is the name of the end of the text in messages. ``diagnostics`` receives errors about
    characters that begin no token, which are skipped.
    """

    def __init__(
        self,
        text: str,
        pattern: re.Pattern[str],
        span_of: Callable[[int, int], Span],
        diagnostics: Diagnostics,
        end: str,
    ) -> None:
        self.text = text
        self._pattern = pattern
        self._span_of = span_of
        self._diagnostics = diagnostics
        self._end = Token(TokenKind.END, end, len(text), len(text))
        self._position = 0
        self._ahead: list[Token] = []

    def peek(self, distance: int = 0) -> Token:
        """Return the next token, or the one ``distance`` tokens after it, without consuming it."""
        while len(self._ahead) <= distance:
            self._ahead.append(self._scan())
        return self._ahead[distance]

    def take(self) -> Token:
        """Consume and return the next token; at the end every call returns END."""
        token = self.peek()
        if token.kind is not TokenKind.END:
            self._ahead.pop(0)
        return token

    def take_match(self, pattern: re.Pattern[str]) -> Token | None:
        """
        Consume the match of a pattern at the start of the next token, and return it as one PLACE token.

        Return None, and consume nothing, if the pattern does not match.
        """
        match = pattern.match(self.text, self.peek().start)
        return None if match is None else self.take_to(match.end())

    def take_to(self, end: int) -> Token:
        """
        Consume the text from the start of the next token to the offset ``end``, exclusive.

        Return it as one token of the kind PLACE.
        """
        start = self.peek().start
        self._ahead.clear()
        self._position = end
        return Token(TokenKind.PLACE, self.text[start:end], start, end)

    def span(self, first: Token, last: Token | None = None) -> Span:
        """
        Return the span in the user's files of the tokens from ``first`` to ``last``, inclusive.

        Without ``last``, return the span of ``first``.
        """
        return self._span_of(first.start, (last or first).end)

    def _scan(self) -> Token:
        text = self.text
        while True:
            blank = _BLANK.match(text, self._position)
            assert blank is not None
            self._position = blank.end()
            if self._position >= len(text):
                return self._end
            match = self._pattern.match(text, self._position)
            if match is not None:
                self._position = match.end()
                return Token(_KINDS[match.lastgroup or ""], match.group(), match.start(), match.end())
            if (quoted := _OTHER_QUOTES.match(text, self._position)) is not None:
                return self._string_in_other_quotes(quoted)
            self._report(text[self._position])
            self._position += 1

    def _string_in_other_quotes(self, match: re.Match[str]) -> Token:
        """
        Report a string in quotes of another kind, and return it as a string token.

        ``match`` is the match of the regular expression for a token at the string.
        """
        self._position = match.end()
        string = f'"{match["single"] or match["text"] or ""}"'
        span = self._span_of(match.start(), match.end())
        self._diagnostics.error(span, "write strings in double quotes", hint=f"write {string}")
        return Token(TokenKind.STRING, string, match.start(), match.end())

    def _report(self, character: str) -> None:
        span = self._span_of(self._position, self._position + 1)
        if character in "\"'":
            self._diagnostics.error(span, f"a {character} without a second one on the same line")
            end = self.text.find("\n", self._position)
            self._position = end if end >= 0 else len(self.text)
        else:
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            hint = "a comment begins with //" if character == "#" else None
            self._diagnostics.error(span, f"unexpected character {shown}", hint=hint)


Tokens = TypeVar("Tokens", bound=TextTokens)
_ItemT = TypeVar("_ItemT")


class ParseError(Exception):
    """The end of the parsing of the current construct; the error is already in the diagnostics."""


class TokenCursor(Generic[Tokens]):
    """A cursor on the tokens of a source text; nesting deeper than ``depth_max`` is an error."""

    def __init__(self, tokens: Tokens, diagnostics: Diagnostics, depth_max: int) -> None:
        self.tokens = tokens
        self.diagnostics = diagnostics
        self.last = Token(TokenKind.END, "", 0, 0)
        """The most recently consumed token."""
        self._depth = 0
        self._depth_max = depth_max

    def peek(self, distance: int = 0) -> Token:
        """Return the next token, or the one ``distance`` tokens after it."""
        return self.tokens.peek(distance)

    def take(self) -> Token:
        """Consume and return the next token."""
        self.last = self.tokens.take()
        return self.last

    def sees(self, *words: str, distance: int = 0) -> bool:
        """
        Return whether the next token, or the one ``distance`` tokens after it, is one of ``words``.

        Only names and punctuation marks are compared.
        """
        token = self.peek(distance)
        return token.kind in (TokenKind.NAME, TokenKind.PUNCTUATION) and token.text in words

    def accept(self, *words: str) -> Token | None:
        """Consume and return the next token if it is one of these words; otherwise return None."""
        return self.take() if self.sees(*words) else None

    def expect(self, text: str, where: str) -> Token:
        """
        Consume and return the next token; raise ``ParseError`` unless its text is ``text``.

        ``where`` completes the message.
        """
        token = self.accept(text)
        if token is None:
            raise self.wrong(f"expected '{text}' {where}, found {self.peek().described}")
        return token

    def listed(self, parse: Callable[[], _ItemT]) -> list[_ItemT]:
        """Return at least one item, each parsed by ``parse``; commas separate the items."""
        found = [parse()]
        while self.accept(","):
            found.append(parse())
        return found

    def expect_name(self, what: str) -> Token:
        """Consume and return a name; raise ``ParseError`` for any other token, with ``what`` as the expectation."""
        if self.peek().kind is not TokenKind.NAME:
            raise self.wrong(f"expected {what}, found {self.peek().described}")
        return self.take()

    def wrong(self, message: str, span: Span | None = None, hint: str | None = None) -> ParseError:
        """Report an error, at the next token if ``span`` is None, and return the ``ParseError`` to raise."""
        self.diagnostics.error(span or self.tokens.span(self.peek()), message, hint=hint)
        return ParseError()

    def span_from(self, first: Token) -> Span:
        """Return the span of the tokens from ``first`` to the most recently consumed one."""
        return self.tokens.span(first, self.last)

    def span_of(self, span: Span) -> Span:
        """Return the span from the start of ``span`` to the end of the most recently consumed token."""
        return span.to(self.tokens.span(self.last))

    def __enter__(self) -> None:
        """Enter a nested construct; raise ``ParseError`` if it is nested too deeply."""
        if self._depth >= self._depth_max:
            raise self.wrong(f"this is nested more than {self._depth_max} levels deep")
        self._depth += 1

    def check_depth(self, levels: int) -> None:
        """Raise ``ParseError`` if a construct with ``levels`` further levels of nesting would be too deep here."""
        if self._depth + levels > self._depth_max:
            raise self.wrong(f"this is nested more than {self._depth_max} levels deep")

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1

    def skip_statement(self) -> None:
        """
        Consume the tokens of a statement with an error.

        Stop after its ``;``, or before the ``}`` of the block that contains it.
        """
        depth = 0
        while (token := self.peek()).kind is not TokenKind.END:
            if token.kind is TokenKind.PUNCTUATION:
                if token.text == "}" and depth == 0:
                    return
                depth += (token.text == "{") - (token.text == "}")
                if depth == 0 and token.text in (";", "}"):
                    self.take()
                    return
            self.take()

    def skip_item(self) -> None:
        """Consume the tokens of a definition with an error, up to its ``;`` or the end of its block."""
        before = self.peek().start
        self.skip_statement()
        if self.sees("}") and self.peek().start == before:
            self.take()  # a brace without an opening one
