r"""
The language of filters, and its parser, which turns a text into a tree.

::

    condition   any ("or" any)*                with "and" before "or", and "not" before both
    any         "(" condition ")" | "not" any | comparison
    comparison  value ("==" | "!=" | "<" | "<=" | ">" | ">=" | "=~" | "!~" | "startswith" | "contains") value
                value ["not"] "in" "(" value ("," value)* ")"
    value       name [":" type] | number | text
                "mem" "(" address "," 1 | 2 | 4 | 8 ")" [":" type]
                "str" "(" address ["," bytes] ")"
    address     value (("+" | "-") number)*
    name        an item, a register, ...       with a "." before its last part: tp.pid, u.rsp
    number      42, 0x2a, 0b101010, 0o52, 'x', -1, 10K, 1M, 2G (of 1024), 5us, 1.5ms, 2s (in nanoseconds)
    text        "..." or '...'
    type        u8, u16, u32, u64, s8, s16, s32, s64

The escapes in strings are ``\\``, ``\"`` and ``\'``. ``&&``, ``||`` and ``!`` are ``and``, ``or`` and ``not``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from dprobes.diagnostics import Diagnostic, Severity
from dprobes.errors import SourceError
from dprobes.rpn.operands import NUMBER_TYPES, NumberType
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "And",
    "Comparison",
    "Condition",
    "Membership",
    "Memory",
    "Name",
    "Not",
    "Number",
    "Or",
    "StringAt",
    "Sum",
    "Text",
    "Value",
    "fail",
    "parse",
    "values_of",
]

# The syntax tree of a filter: conditions that combine comparisons of values. The evaluators of a filter resolve its
# names: ``trace.trace_filter`` on records, ``handler_filter`` at a hit.

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "=~", "!~", "startswith", "contains"]


@dataclass(frozen=True, slots=True)
class Name:
    """
    An item of records, a register or a field of a tracepoint.

    ``type`` truncates its value to the low bits; None leaves the value unchanged.
    """

    name: str
    span: Span
    type: NumberType | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a filter."""

    value: int
    span: Span


@dataclass(frozen=True, slots=True)
class Text:
    """A quoted string in a filter."""

    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Sum:
    """Address ``addend`` bytes above ``base``. ``addend`` may be negative."""

    base: Value
    addend: int
    span: Span


@dataclass(frozen=True, slots=True)
class Memory:
    """The number in ``size`` bytes of memory at an address."""

    address: Value
    size: int
    span: Span
    type: NumberType | None = None


@dataclass(frozen=True, slots=True)
class StringAt:
    """The string in memory at an address, of at most ``limit`` bytes; None means the default of the evaluator."""

    address: Value
    limit: int | None
    span: Span


Value = Name | Number | Text | Sum | Memory | StringAt


@dataclass(frozen=True, slots=True)
class Comparison:
    """A condition that compares two values."""

    left: Value
    operator: Operator
    right: Value
    span: Span


@dataclass(frozen=True, slots=True)
class Membership:
    """A test whether a value is in a list of values, or, with ``is_negated``, is not."""

    value: Value
    choices: tuple[Value, ...]
    is_negated: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of another condition."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class And:
    """A condition that is true if all of its parts are."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """A condition that is true if any of its parts is."""

    conditions: tuple[Condition, ...]


Condition = Comparison | Membership | Not | And | Or


def values_of(condition: Condition) -> Iterator[Value]:
    """Iterate over the values that a condition compares, in the order of the text."""
    match condition:
        case And(conditions) | Or(conditions):
            for each in conditions:
                yield from values_of(each)
        case Not(inner):
            yield from values_of(inner)
        case Comparison(left, _, right):
            yield from _with_parts(left)
            yield from _with_parts(right)
        case Membership(value, choices):
            yield from _with_parts(value)
            for choice in choices:
                yield from _with_parts(choice)


def _with_parts(value: Value) -> Iterator[Value]:
    yield value
    match value:
        case Sum(part) | Memory(part) | StringAt(part):
            yield from _with_parts(part)


def fail(span: Span, message: str, hint: str | None = None) -> NoReturn:
    """Raise ``SourceError`` with ``span`` of the filter underlined."""
    raise SourceError((Diagnostic(Severity.ERROR, message, span, hint=hint),))


_NUMBER_MAX = (1 << 64) - 1
_NUMBER_MIN = -(1 << 63)
_DEPTH_MAX = 100
"""Maximum depth of nested parentheses, negations and addresses; deeper nesting is not intentional."""

_STRING_MAX = 4096
"""Maximum size in bytes of a string in memory."""

_SIZES = (1, 2, 4, 8)

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "ns": 1, "us": 1000, "ms": 1000_000, "s": 1000_000_000}
_SCALED = re.compile(r"(\d{1,20})(?:\.(\d{1,9}))?([A-Za-z]+)")

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<name>[A-Za-z_]\w*(?:\.\w+)*)
  | (?P<number>\d[\w.]*)
  | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<operator>==|!=|<=|>=|=~|!~|&&|\|\||[<>!(),=:+-])
  | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_OPERATORS = ("==", "!=", "<", "<=", ">", ">=", "=~", "!~", "startswith", "contains")
_WORDS = {"&&": "and", "||": "or", "!": "not"}
_KEYWORDS = ("and", "or", "not", "in", "startswith", "contains")
_ESCAPE = re.compile(r"\\([\\\"'])")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    span: Span


def parse(text: str, *, called: str = "filter") -> Condition:
    """
    Return the condition that a filter describes.

    Raise ``SourceError`` for a syntax error; ``called`` is the name of the filter in messages.
    """
    return _Parser(_tokens(SourceFile(called, text))).parse()


def _tokens(file: SourceFile) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(file.text, at)
        if match is None:
            at += len(file.text[at:]) - len(file.text[at:].lstrip())
            if file.text[at] in "\"'":
                fail(Span(file, at, len(file.text)), "a string has no end", f"close it with {file.text[at]}")
            fail(Span(file, at, at + 1), f"'{file.text[at]}' is not allowed in a filter")
        assert match.lastgroup is not None
        word = match[match.lastgroup]
        kind = match.lastgroup
        if (kind == "operator" and word in _WORDS) or (kind == "name" and word.lower() in _KEYWORDS):
            kind, word = "operator", _WORDS.get(word, word.lower())
        tokens.append(_Token(kind, word, Span(file, match.start(match.lastgroup), match.end())))
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def parse(self) -> Condition:
        if self._next.kind == "end":
            fail(self._next.span, "the filter is empty", "write something like 'major == 1 and pid == 42'")
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
        fail(token.span, f"expected {expected}, found {found}", hint)

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
            fail(self._next.span, f"more than {_DEPTH_MAX} parentheses or negations within each other")
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
            fail(self._next.span, "comparisons cannot be chained", "write two of them with 'and' between")
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

    def _value(self, depth: int = 0) -> Value:
        token = self._next
        if depth > _DEPTH_MAX:
            fail(token.span, f"more than {_DEPTH_MAX} addresses within each other")
        if token.text == "-" and token.kind == "operator":
            self._at += 1
            if self._next.kind != "number":
                self._unexpected("a number")
            return _number(self._take_any(), sign=token.span)
        if token.kind not in ("name", "number", "text"):
            self._unexpected("a value")
        self._at += 1
        if token.kind == "number":
            return _number(token)
        if token.kind == "text":
            return Text(_ESCAPE.sub(r"\1", token.text[1:-1]), token.span)
        if token.text in ("mem", "str") and self._take("("):
            return self._at_address(token, depth)
        type_ = self._type()
        return Name(token.text, token.span.to(self._last.span), type_)

    @property
    def _last(self) -> _Token:
        return self._tokens[self._at - 1]

    def _take_any(self) -> _Token:
        self._at += 1
        return self._last

    def _type(self) -> NumberType | None:
        """Consume the type after a name and return it; None if there is none."""
        if not self._take(":"):
            return None
        if self._next.text not in NUMBER_TYPES:
            self._unexpected("the type of a number", f"types are {', '.join(NUMBER_TYPES)}")
        return NUMBER_TYPES[self._take_any().text]

    def _at_address(self, token: _Token, depth: int) -> Value:
        """
        Parse the arguments and the type of ``mem`` or ``str``, and return the value.

        ``token`` is the word that was consumed; ``depth`` is the nesting depth, which is limited.
        """
        address = self._value(depth + 1)
        while sign := self._take("+", "-"):
            if self._next.kind != "number":
                self._unexpected("a number")
            number = _number(self._take_any())
            addend = number.value if sign.text == "+" else -number.value
            address = Sum(address, addend, address.span.to(number.span))
        is_memory = token.text == "mem"
        size = None
        if self._take(","):
            size = self._size(1, 8 if is_memory else _STRING_MAX)
        elif is_memory:
            self._unexpected("','", "write the size of the number after the address: mem(arg0, 4)")
        if not self._take(")"):
            self._unexpected("')'")
        if not is_memory:
            return StringAt(address, size, token.span.to(self._last.span))
        assert size is not None
        if size not in _SIZES:
            fail(self._tokens[self._at - 2].span, f"a number has 1, 2, 4 or 8 bytes, not {size}")
        type_ = self._type()
        return Memory(address, size, token.span.to(self._last.span), type_)

    def _size(self, low: int, high: int) -> int:
        if self._next.kind != "number":
            self._unexpected("a number of bytes")
        size = _number(self._take_any())
        if not low <= size.value <= high:
            fail(size.span, f"expected {low} to {high} bytes, found {size.value}")
        return size.value


_SAMPLE = "write '{} == ' and a value, or one of != < <= > >= =~ !~ in startswith contains"


def _number(token: _Token, sign: Span | None = None) -> Number:
    """Return the number that a token represents; ``sign`` is the span of a minus sign before it, None without one."""
    digits = token.text
    if (scaled := _SCALED.fullmatch(digits)) is not None and scaled[3] in _UNITS:
        value = _scaled(token, int(scaled[1]), scaled[2] or "", _UNITS[scaled[3]])
    else:
        try:
            # A number with more digits than any item has is rejected without conversion.
            is_short = len(digits) <= 80
            value = int(digits, 0 if digits[:1] == "0" and digits.strip("0") else 10) if is_short else _NUMBER_MAX + 1
        except ValueError:
            fail(token.span, f"'{digits}' is not a number", "write a decimal one, or 0x2a, 0b101010, 0o52, 10K, 5ms")
    if sign is not None:
        value = -value
    if value > _NUMBER_MAX:
        fail(token.span, "no item is greater than 0xffffffffffffffff")
    if value < _NUMBER_MIN:
        fail(token.span, "no item is less than -0x8000000000000000")
    return Number(value, token.span if sign is None else sign.to(token.span))


def _scaled(token: _Token, whole: int, fraction: str, unit: int) -> int:
    """
    Return a number with a unit in base units; raise ``SourceError`` if the result is not a whole number.

    ``whole`` and ``fraction`` are the digits before and after the decimal point. ``unit`` is the number of base units
    in one unit.
    """
    value, rest = divmod(int(f"{whole}{fraction}") * unit, int("1".ljust(1 + len(fraction), "0")))
    if rest:
        fail(token.span, f"'{token.text}' is not a whole number")
    return value
