"""
Expressions over numbers and symbols: operands of ``push``, header values, counts.

::

    expression  = operand { operator operand }         C's operators and precedences:  | ^ & << >> + - * / %
    operand     = [ "+" | "-" | "~" ] operand | number | 'c' | symbol | "symbol" | "(" expression ")"

A symbol may only be an operand of addition and subtraction, because its address is not known before the program runs.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.rpn.rpn_program import Expression
from dprobes.rpn.word_arithmetic import BINARY, MAX_VALUE, divided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dprobes.preprocessor import Preprocessed
    from dprobes.source_text import Span

__all__ = [
    "ExpressionError",
    "Lexer",
    "Statement",
    "TokenKind",
    "WordToken",
    "parse_expression",
    "parse_number",
    "parse_readable",
    "unquote",
]

# A statement ends with its line, or with ``;`` (not in the original: a macro expands to one line, and may contain
# several statements).


class TokenKind(Enum):
    """Kinds of tokens in statements of RPN source."""

    NAME = "name"
    NUMBER = "number"
    STRING = "string"
    CHARACTER = "character"
    PUNCTUATION = "punctuation"


class WordToken(NamedTuple):
    """A token: its text as written and its place in the preprocessed text."""

    kind: TokenKind
    text: str
    start: int
    end: int

    @property
    def word(self) -> str:
        """The text in lower case: the language ignores case."""
        return self.text.lower()

    def is_punctuation(self, text: str) -> bool:
        """Return whether the token is this punctuation mark."""
        return self.kind is TokenKind.PUNCTUATION and self.text == text


Statement = list[WordToken]

# A name may contain the characters of ELF symbols: '.' (foo.cold), '$', and '@' (memcpy@GLIBC_2.14).
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\f\v]+)
      | (?P<end>[\n;])
      | (?P<name>[A-Za-z_$.][A-Za-z0-9_$.@]*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.)')
      | (?P<punctuation><<|>>|[=:,()+\-*/%&|^~<>?!\[\]#{}@])
      | (?P<bad>[^\n])""",
    re.VERBOSE,
)

_KINDS = {kind.value: kind for kind in TokenKind}

MAX_WORDS = 10_000
"""Maximum number of tokens in a statement: a statement of megabytes is not a probe program."""


class Lexer:
    """
    A splitter of a preprocessed source text into statements.

    ``report`` is called with the span and the message of each error.
    """

    def __init__(self, text: Preprocessed, report: Callable[[Span, str], None]) -> None:
        self._preprocessed = text
        self._report = report

    def span(self, first: WordToken, last: WordToken | None = None) -> Span:
        """
        Return the span in the user's files of the tokens ``first`` to ``last``, inclusive.

        Without ``last``, return the span of ``first``.
        """
        return self._preprocessed.span(first.start, (last or first).end)

    def written(self, first: WordToken, last: WordToken) -> str:
        """Return the text of the tokens ``first`` to ``last``, inclusive: macros expanded, white space as one blank."""
        return " ".join(self._preprocessed.text[first.start : last.end].split())

    def start_span(self) -> Span:
        """Return the span of the start of the source, which is empty."""
        return self._preprocessed.span(0, 0)

    def end_span(self) -> Span:
        """Return the span of the end of the source, which is empty."""
        end = len(self._preprocessed.text)
        return self._preprocessed.span(end, end)

    def statements(self) -> Iterator[Statement]:
        """Iterate over the statements; empty statements and those with lexical errors are omitted."""
        statement: Statement = []
        bad = False
        for match in _TOKEN.finditer(self._preprocessed.text):
            group = match.lastgroup
            if group == "blank":
                continue
            if group == "end":
                if statement and not bad:
                    yield statement
                statement, bad = [], False
            elif group == "bad":
                if not bad:  # report one error for each statement
                    self._report_bad(match.start(), match.group())
                bad = True
            elif len(statement) == MAX_WORDS:
                if not bad:
                    self._report(self.span(statement[0]), f"a statement of more than {MAX_WORDS} words")
                bad = True
            else:
                assert group is not None
                statement.append(WordToken(_KINDS[group], match.group(), match.start(), match.end()))
        if statement and not bad:
            yield statement

    def _report_bad(self, start: int, character: str) -> None:
        span = self._preprocessed.span(start, start + 1)
        if character in "\"'":
            self._report(span, f"a {character} without a second one on the same line")
        else:
            shown = f"'{character}'" if character.isprintable() else f"U+{ord(character):04X}"
            self._report(span, f"unexpected character {shown}")


_PRECEDENCE = {"|": 1, "^": 2, "&": 3, "<<": 4, ">>": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}

_MAX_SHIFT = 64
_MAX_DEPTH = 100

_FOLD: dict[str, Callable[[int, int], int]] = {
    **{operation.symbol: operation.function for operation in BINARY.values()},
    "<<": lambda a, b: a << min(b, _MAX_SHIFT),
    ">>": lambda a, b: a >> min(b, _MAX_SHIFT),
    "/": lambda a, b: divided(a, b)[0],
    "%": lambda a, b: divided(a, b)[1],
}

_NUMBER = re.compile(r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9][0-9]*))[uUlL]{0,3}")

_ESCAPES = {"n": 10, "t": 9, "r": 13, "0": 0, "a": 7, "b": 8, "f": 12, "v": 11}


class ExpressionError(Exception):
    """An error in an expression, and the token at fault (None: the end of the expression)."""

    def __init__(self, message: str, token: WordToken | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.token = token
        self.hint = hint


def parse_expression(tokens: Sequence[WordToken]) -> Expression:
    """Return the value of ``tokens``; raise ``ExpressionError`` unless they are one expression."""
    reader = _Reader(tokens)
    value = reader.expression(0)
    if (extra := reader.peek()) is not None:
        raise ExpressionError(f"unexpected '{extra.text}' after the value", extra)
    return value


_READABLE = re.compile(r"([A-Za-z_(<~].*?)(?: ?([+-]) ?(0[xX][0-9a-fA-F]+|[0-9]+))?", re.ASCII)


def parse_readable(text: str) -> Expression | None:
    """
    Return the value of a symbol with ``::`` in its name, plus or minus an optional number.

    Return None for any other text.
    """
    if "::" not in text or (match := _READABLE.fullmatch(text)) is None:
        return None
    name, sign, number = match.groups()
    return Expression(int(f"{sign}{int(number, 0)}") if number else 0, name)


def parse_number(token: WordToken) -> int:
    """
    Return the value of a number or character token in C notation (a leading 0 means octal).

    Raise ``ExpressionError`` for another token, and for a number that does not fit in 64 bits.
    """
    if token.kind is TokenKind.CHARACTER:
        body = token.text[1:-1]
        return ord(body) if len(body) == 1 else _ESCAPES.get(body[1], ord(body[1]))
    match = _NUMBER.fullmatch(token.text)
    if match is None:
        hint = "a leading 0 means octal" if re.fullmatch(r"0[0-9]+", token.text) else None
        if re.fullmatch(r"[0-9a-fA-F]{1,16}[hH]", token.text):
            hint = f"write '0x{token.text[:-1]}'"
        raise ExpressionError(f"'{token.text}' is not a number", token, hint)
    text, base = match.group("hex"), 16
    if text is None:
        text, base = match.group("octal"), 8
    if text is None:
        text, base = match.group("decimal"), 10
    if len(text) > 64 or (value := int(text, base)) > MAX_VALUE:
        raise ExpressionError(f"'{token.text[:24]}' does not fit in 64 bits", token)
    return value


def unquote(token: WordToken) -> str:
    """Return the contents of a string token with its escapes resolved."""
    return re.sub(r"\\(.)", r"\1", token.text[1:-1])


class _Reader:
    def __init__(self, tokens: Sequence[WordToken]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def peek(self) -> WordToken | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def expression(self, minimum: int) -> Expression:
        left = self._operand()
        while (token := self.peek()) is not None:
            precedence = _PRECEDENCE.get(token.text) if token.kind is TokenKind.PUNCTUATION else None
            if precedence is None or precedence < minimum:
                break
            self._position += 1
            left = _combine(token, left, self.expression(precedence + 1))
        return left

    def _operand(self) -> Expression:
        token = self.peek()
        if token is None:
            raise ExpressionError("expected a value")
        self._position += 1
        if token.kind is TokenKind.NAME:
            return Expression(0, token.text)
        if token.kind is TokenKind.STRING:
            if not (symbol := unquote(token)):
                raise ExpressionError("the name of a symbol is empty", token)
            return Expression(0, symbol)
        if token.kind is not TokenKind.PUNCTUATION:
            return Expression(parse_number(token))
        if token.text not in ("(", "+", "-", "~"):
            raise ExpressionError(f"expected a value, found '{token.text}'", token)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ExpressionError(f"an expression nested more than {_MAX_DEPTH} deep", token)
        if token.text == "(":
            value = self.expression(0)
            closing = self.peek()
            if closing is None or not closing.is_punctuation(")"):
                raise ExpressionError("expected ')'", closing)
            self._position += 1
        else:
            value = self._operand()
            if token.text != "+":
                if value.symbol is not None:
                    raise ExpressionError(f"'{token.text}' cannot be applied to the symbol '{value.symbol}'", token)
                value = Expression(-value.addend if token.text == "-" else ~value.addend)
        self._depth -= 1
        return value


def _combine(operator: WordToken, left: Expression, right: Expression) -> Expression:
    match operator.text:
        case "+" if left.symbol is None or right.symbol is None:
            value = Expression(left.addend + right.addend, left.symbol or right.symbol)
        case "-" if right.symbol is None:
            value = Expression(left.addend - right.addend, left.symbol)
        case text if left.symbol is not None or right.symbol is not None:
            name = right.symbol if right.symbol is not None else left.symbol
            raise ExpressionError(
                f"'{text}' cannot be applied to the symbol '{name}'",
                operator,
                "a number may be added to or subtracted from a symbol",
            )
        case "/" | "%" if right.addend == 0:
            raise ExpressionError("division by zero", operator)
        case "<<" | ">>" if right.addend < 0:
            raise ExpressionError("a shift by a negative number", operator)
        case text:
            value = Expression(_FOLD[text](left.addend, right.addend))
    if abs(value.addend) > MAX_VALUE:
        raise ExpressionError("the value does not fit in 64 bits", operator)
    return value
