"""What the parts of a parser share: the next token, what is expected of it, and how to go on after an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from dprobes.clike.token import TextTokens, Token, TokenKind

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import Span

__all__ = ["ParseError", "TokenCursor"]

Tokens = TypeVar("Tokens", bound=TextTokens)


class ParseError(Exception):
    """Leave what is being parsed; the error has been reported."""


class TokenCursor(Generic[Tokens]):
    """Walk through the tokens of a text; what is nested deeper than ``depth_max`` is an error."""

    def __init__(self, tokens: Tokens, diagnostics: Diagnostics, depth_max: int) -> None:
        self.tokens = tokens
        self.diagnostics = diagnostics
        self.last = Token(TokenKind.END, "", 0, 0)
        """The token that was taken last."""
        self._depth = 0
        self._depth_max = depth_max

    def peek(self, distance: int = 0) -> Token:
        """Return the next token, or one behind it."""
        return self.tokens.peek(distance)

    def take(self) -> Token:
        """Take the next token."""
        self.last = self.tokens.take()
        return self.last

    def sees(self, *words: str, distance: int = 0) -> bool:
        """Return whether the next token, or one behind it, is one of these names or punctuation marks."""
        token = self.peek(distance)
        return token.kind in (TokenKind.NAME, TokenKind.PUNCTUATION) and token.text in words

    def accept(self, *words: str) -> Token | None:
        """Take the next token if it is one of these."""
        return self.take() if self.sees(*words) else None

    def expect(self, text: str, where: str) -> Token:
        """Take the next token, which has to be this one."""
        token = self.accept(text)
        if token is None:
            raise self.wrong(f"expected '{text}' {where}, found {self.peek().described}")
        return token

    def expect_name(self, what: str) -> Token:
        """Take a name."""
        if self.peek().kind is not TokenKind.NAME:
            raise self.wrong(f"expected {what}, found {self.peek().described}")
        return self.take()

    def wrong(self, message: str, span: Span | None = None, hint: str | None = None) -> ParseError:
        """Report an error, by default at the next token, and return what leaves what is being parsed."""
        self.diagnostics.error(span or self.tokens.span(self.peek()), message, hint=hint)
        return ParseError()

    def span_from(self, first: Token) -> Span:
        """Return the place of all that was taken from ``first`` on."""
        return self.tokens.span(first, self.last)

    def span_of(self, span: Span) -> Span:
        """Return the place of all that was taken from a place on."""
        return span.to(self.tokens.span(self.last))

    def __enter__(self) -> None:
        """Go a level deeper; what is too deep is an error."""
        if self._depth >= self._depth_max:
            raise self.wrong(f"this is nested more than {self._depth_max} levels deep")
        self._depth += 1

    def check_depth(self, levels: int) -> None:
        """Report what is so many levels deep in itself, if that is too deep here."""
        if self._depth + levels > self._depth_max:
            raise self.wrong(f"this is nested more than {self._depth_max} levels deep")

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1

    def skip_statement(self) -> None:
        """Go on behind the ``;`` that ends a statement in error, or before the ``}`` of the block that it is in."""
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
        """Go on behind the ``;`` or the block that ends a part of the text in error."""
        before = self.peek().start
        self.skip_statement()
        if self.sees("}") and self.peek().start == before:
            self.take()  # one that closes nothing
