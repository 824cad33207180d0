r"""
The language of filters: from a text to a tree. ``filter`` says what a tree means.

::

    condition   any ("or" any)*                with "and" before "or", and "not" before both
    any         "(" condition ")" | "not" any | comparison
    comparison  value ("==" | "!=" | "<" | "<=" | ">" | ">=" | "=~" | "!~") value
                value ["not"] "in" "(" value ("," value)* ")"
    value       an item | a number: 42, 0x2a, 0b101010, 0o52, 'x' | a text: "..." or '...'

Strings know ``\\``, ``\"`` and ``\'``. ``&&``, ``||`` and ``!`` are ``and``, ``or`` and ``not``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from dprobes.diagnostics import Diagnostic, Severity, did_you_mean
from dprobes.errors import SourceError
from dprobes.lazydataclass import dataclass
from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import NoReturn

__all__ = ["And", "Comparison", "Condition", "Membership", "Name", "Not", "Number", "Or", "Text", "Value", "parse"]

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "=~", "!~"]

_NUMBER_MAX = (1 << 64) - 1
_DEPTH_MAX = 100
"""Parentheses and negations within each other; more are nobody's intention."""


@dataclass(frozen=True, slots=True)
class Name:
    """An item, or what is known of the program."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: int
    span: Span


@dataclass(frozen=True, slots=True)
class Text:
    """A string in quotes."""

    value: str
    span: Span


Value = Name | Number | Text


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compare two values."""

    left: Value
    operator: Operator
    right: Value
    span: Span


@dataclass(frozen=True, slots=True)
class Membership:
    """Ask whether a value is one of some, or none of them."""

    value: Value
    choices: tuple[Value, ...]
    is_negated: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Not:
    """Turn a condition round."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class And:
    """Ask for all conditions."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Ask for one of the conditions."""

    conditions: tuple[Condition, ...]


Condition = Comparison | Membership | Not | And | Or

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<name>[A-Za-z_]\w*)
  | (?P<number>\d\w*)
  | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<operator>==|!=|<=|>=|=~|!~|&&|\|\||[<>!(),=])
  | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "=~", "!~")
_WORDS = {"&&": "and", "||": "or", "!": "not"}
_KEYWORDS = ("and", "or", "not", "in")
_ESCAPE = re.compile(r"\\([\\\"'])")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    span: Span


def parse(text: str, names: Collection[str], *, called: str = "filter") -> Condition:
    """Return the tree of a filter about ``names``; raise ``SourceError``, which calls the text ``called``."""
    return _Parser(_tokens(SourceFile(called, text)), names).parse()


def _fail(span: Span, message: str, hint: str | None = None) -> NoReturn:
    raise SourceError((Diagnostic(Severity.ERROR, message, span, hint=hint),))


def _tokens(file: SourceFile) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(file.text, at)
        if match is None:
            at += len(file.text[at:]) - len(file.text[at:].lstrip())
            if file.text[at] in "\"'":
                _fail(Span(file, at, len(file.text)), "a string has no end", f"close it with {file.text[at]}")
            _fail(Span(file, at, at + 1), f"'{file.text[at]}' means nothing in a filter")
        assert match.lastgroup is not None
        word = match[match.lastgroup]
        kind = match.lastgroup
        if (kind == "operator" and word in _WORDS) or (kind == "name" and word.lower() in _KEYWORDS):
            kind, word = "operator", _WORDS.get(word, word.lower())
        tokens.append(_Token(kind, word, Span(file, match.start(match.lastgroup), match.end())))
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: Sequence[_Token], names: Collection[str]) -> None:
        self._tokens = tokens
        self._names = names
        self._at = 0

    def parse(self) -> Condition:
        if self._next.kind == "end":
            _fail(self._next.span, "the filter is empty", "write something like 'major == 1 and pid == 42'")
        condition = self._or(0)
        if self._next.kind != "end":
            self._unexpected("'and', 'or' or the end")
        return condition

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, *strings: str) -> _Token | None:
        token = self._next
        if token.kind != "operator" or token.text not in strings:
            return None
        self._at += 1
        return token

    def _unexpected(self, expected: str, hint: str | None = None) -> NoReturn:
        token = self._next
        found = "the end" if token.kind == "end" else f"'{token.span.text}'"
        if token.text == "=":
            hint = "write '==' to compare"
        _fail(token.span, f"expected {expected}, found {found}", hint)

    def _or(self, depth: int) -> Condition:
        conditions = [self._and(depth)]
        while self._take("or"):
            conditions.append(self._and(depth))
        return conditions[0] if len(conditions) == 1 else Or(tuple(conditions))

    def _and(self, depth: int) -> Condition:
        conditions = [self._any(depth)]
        while self._take("and"):
            conditions.append(self._any(depth))
        return conditions[0] if len(conditions) == 1 else And(tuple(conditions))

    def _any(self, depth: int) -> Condition:
        if depth > _DEPTH_MAX:
            _fail(self._next.span, f"more than {_DEPTH_MAX} parentheses or negations within each other")
        if self._take("not"):
            return Not(self._any(depth + 1))
        if self._take("("):
            condition = self._or(depth + 1)
            if not self._take(")"):
                self._unexpected("')'")
            return condition
        return self._comparison()

    def _comparison(self) -> Condition:
        left = self._value()
        if self._take("in"):
            return self._membership(left, is_negated=False)
        if self._take("not"):
            if not self._take("in"):
                self._unexpected("'in'")
            return self._membership(left, is_negated=True)
        operator = self._take(*_OPERATORS)
        if operator is None:
            self._unexpected("a comparison", _SAMPLE.format(left.span.text))
        right = self._value()
        if self._next.kind == "operator" and self._next.text in _OPERATORS:
            _fail(self._next.span, "comparisons cannot be chained", "write two of them with 'and' between")
        return Comparison(left, operator.text, right, left.span.to(right.span))  # type: ignore[arg-type] # one of them

    def _membership(self, value: Value, *, is_negated: bool) -> Membership:
        if not self._take("("):
            self._unexpected("'('", "write the values in parentheses, with commas between")
        choices = [self._value()]
        while self._take(","):
            choices.append(self._value())
        if not self._take(")"):
            self._unexpected("',' or ')'")
        return Membership(value, tuple(choices), is_negated, value.span)

    def _value(self) -> Value:
        token = self._next
        match token.kind:
            case "name":
                if token.text not in self._names:
                    known = ", ".join(self._names)
                    hint = did_you_mean(token.text, self._names) or f"there are {known}; strings are in quotes"
                    _fail(token.span, f"there is no item '{token.text}'", hint)
                value: Value = Name(token.text, token.span)
            case "number":
                value = Number(_number(token), token.span)
            case "text":
                value = Text(_ESCAPE.sub(r"\1", token.text[1:-1]), token.span)
            case _:
                self._unexpected("a value")
        self._at += 1
        return value


_SAMPLE = "write '{} == ' and a value, or one of != < <= > >= =~ !~ in"


def _number(token: _Token) -> int:
    digits = token.text
    try:
        # More digits than any item has are not worth converting.
        value = int(digits, 0 if digits[:1] == "0" and digits.strip("0") else 10) if len(digits) <= 80 else -1
    except ValueError:
        _fail(token.span, f"'{digits}' is not a number", "write a decimal one, or 0x2a, 0b101010, 0o52")
    if not 0 <= value <= _NUMBER_MAX:
        _fail(token.span, "no item is greater than 0xffffffffffffffff")
    return value
