"""Expressions of bpftrace: those of C, with maps, variables with a dollar sign, strings and tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpftrace import tree
from dprobes.bpftrace.token import TokenStream
from dprobes.clike.cursor import TokenCursor
from dprobes.clike.token import Token, TokenKind
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.diagnostics import Diagnostics

__all__ = ["Cursor", "ExpressionParser", "height_of", "parts_of"]

_DEPTH_MAX = 60
_PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "%": 10,
}  # fmt: skip
_UNARY = ("!", "~", "-", "*", "&", "+")
_TAGS = ("struct", "union", "enum")
_TYPES = lazy_pattern(
    r"u?int(?:8|16|32|64)(?:_t)?|void|char|short|int|long|unsigned|signed|bool|size_t|u(?:8|16|32|64)"
)
_NUMBER = lazy_pattern(
    r"(?P<hex>0[xX][0-9a-fA-F_]+)|(?P<digits>[0-9][0-9_]*)(?:e(?P<exponent>[0-9]+))?(?P<unit>ns|us|ms|s|m|h|d)?"
)
_UNITS = {"": 1, "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_SUFFIX = lazy_pattern(r"(?i:u|l|ul|ll|ull)\Z")
_DIGITS_MAX = 24
"""Of a number of 64 bits, octal ones included."""
_EXPONENT_MAX = 18


class Cursor(TokenCursor[TokenStream]):
    """Walk through the tokens of a script."""

    def __init__(self, tokens: TokenStream, diagnostics: Diagnostics) -> None:
        super().__init__(tokens, diagnostics, _DEPTH_MAX)


class ExpressionParser:
    """Parse expressions. The condition of a probe stands between slashes: there a slash does not divide."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._divides = True

    def condition(self) -> tree.Expression:
        """Parse the condition of a probe; its first slash has been taken."""
        self._divides = False
        try:
            found = self.expression()
        finally:
            self._divides = True
        self._cursor.expect("/", "behind the condition")
        return found

    def expression(self) -> tree.Expression:
        """Parse an expression."""
        with self._cursor:
            first = self._cursor.peek()
            condition = self._binary(1)
            if height_of(condition) > _DEPTH_MAX:
                raise self._cursor.wrong(f"this has more than {_DEPTH_MAX} levels", condition.span)
            if self._cursor.accept("?") is None:
                return condition
            then = self.expression()
            self._cursor.expect(":", "between the two values")
            otherwise = self.expression()
            return tree.Conditional(condition, then, otherwise, self._cursor.span_from(first))

    def arguments(self, end: str) -> tuple[tree.Expression, ...]:
        """Parse expressions between commas up to a bracket, which is taken."""
        divides, self._divides = self._divides, True
        found: list[tree.Expression] = []
        if not self._cursor.sees(end):
            found.append(self.expression())
            while self._cursor.accept(","):
                found.append(self.expression())
        self._cursor.expect(end, "behind the values")
        self._divides = divides
        return tuple(found)

    def _binary(self, least: int) -> tree.Expression:
        first = self._cursor.peek()
        left = self._unary()
        while True:
            token = self._cursor.peek()
            precedence = _PRECEDENCE.get(token.text, 0) if token.kind is TokenKind.PUNCTUATION else 0
            if precedence < least or (token.text == "/" and not self._divides):
                return left
            self._cursor.take()
            right = self._binary(precedence + 1)
            left = tree.Binary(token.text, left, right, self._cursor.span_from(first))

    def _unary(self) -> tree.Expression:
        cursor = self._cursor
        with cursor:
            first = cursor.peek()
            if cursor.accept("++", "--") is not None:
                operand = self._unary()
                return tree.Step(first.text, operand, is_postfix=False, span=cursor.span_from(first))
            if cursor.accept(*_UNARY) is not None:
                operand = self._unary()
                return tree.Unary(first.text, operand, cursor.span_from(first))
            if (length := self._cast_length()) > 0:
                type_ = self._type(length)
                operand = self._unary()
                return tree.Cast(type_, operand, cursor.span_from(first))
            return self._postfix()

    def _cast_length(self) -> int:
        """Return how many tokens a type in brackets has that comes next; 0 if none does."""
        cursor = self._cursor
        if not cursor.sees("("):
            return 0
        distance = 1
        if cursor.sees(*_TAGS, distance=1):
            distance = 3
        elif cursor.peek(1).kind is TokenKind.NAME:
            is_known = True
            while cursor.peek(distance).kind is TokenKind.NAME:
                is_known = is_known and _TYPES.fullmatch(cursor.peek(distance).text) is not None
                distance += 1
            if not is_known and not cursor.sees("*", distance=distance):
                return 0
        else:
            return 0
        while cursor.sees("*", distance=distance):
            distance += 1
        if not cursor.sees(")", distance=distance):
            return 0
        # (name *) is a type only if something follows that it can be applied to.
        return distance + 1

    def _type(self, length: int) -> str:
        words = [self._cursor.take().text for _ in range(length)][1:-1]
        return " ".join(words).replace("* *", "**")

    def _postfix(self) -> tree.Expression:
        cursor = self._cursor
        first = cursor.peek()
        found = self._primary()
        while True:
            if (operator := cursor.accept("->", ".")) is not None:
                if cursor.peek().kind is TokenKind.NUMBER:
                    raise cursor.wrong("tuples have no like in DProbes C")
                name = cursor.expect_name("the name of a field").text
                found = tree.Field(found, name, operator.text == "->", cursor.span_from(first))
            elif cursor.accept("["):
                (index,) = self._one(self.arguments("]"))
                found = tree.Index(found, index, cursor.span_from(first))
            elif (operator := cursor.accept("++", "--")) is not None:
                found = tree.Step(operator.text, found, is_postfix=True, span=cursor.span_from(first))
            else:
                return found

    def _one(self, values: tuple[tree.Expression, ...]) -> tuple[tree.Expression]:
        if len(values) != 1:
            raise self._cursor.wrong("an array has one index", self._cursor.tokens.span(self._cursor.last))
        return (values[0],)

    def _primary(self) -> tree.Expression:
        cursor = self._cursor
        token = cursor.take()
        span = cursor.tokens.span(token)
        match token.kind:
            case TokenKind.NUMBER:
                return tree.Number(self._number(token), span)
            case TokenKind.STRING:
                return tree.String(token.text[1:-1], span)
            case TokenKind.VARIABLE:
                return tree.Variable(token.text[1:], span)
            case TokenKind.PARAMETER:
                return tree.Parameter(token.text, span)
            case TokenKind.TABLE:
                keys = self.arguments("]") if cursor.accept("[") else ()
                return tree.Map(token.text[1:], keys, cursor.span_from(token))
            case TokenKind.NAME:
                if token.text == "sizeof" and (length := self._cast_length()) > 0:
                    return tree.SizeOf(self._type(length), cursor.span_from(token))
                if not cursor.accept("("):
                    return tree.Name(token.text, span)
                arguments = self.arguments(")")
                return tree.Call(token.text, arguments, cursor.span_from(token))
        if token.text == "(":
            values = self.arguments(")")
            if len(values) == 1:
                return values[0]
            return tree.Tuple(values, cursor.span_from(token))
        raise cursor.wrong(f"expected a value, found {token.described}", span)

    def _number(self, token: Token) -> int:
        text = token.text
        match = _NUMBER.fullmatch(text if text[:2] in ("0x", "0X") else _SUFFIX.sub("", text))
        if match is None or len(match["exponent"] or "") > 2 or int(match["exponent"] or 0) > _EXPONENT_MAX:
            raise self._cursor.wrong(f"'{text}' is no number", self._cursor.tokens.span(token))
        if match["hex"]:
            return int(match["hex"].replace("_", ""), 16)
        digits = match["digits"].replace("_", "")
        if len(digits.lstrip("0")) > _DIGITS_MAX:
            raise self._cursor.wrong(f"'{text}' has more than 64 bits", self._cursor.tokens.span(token))
        if len(digits) > 1 and digits[0] == "0" and digits.isdigit() and not set(digits) & {"8", "9"}:
            value = int(digits, 8)
        else:
            value = int(digits)
        value = value * int(10 ** int(match["exponent"] or 0)) * _UNITS[match["unit"] or ""]
        if value >= 1 << 64:
            raise self._cursor.wrong(f"'{text}' has more than 64 bits", self._cursor.tokens.span(token))
        return value


def parts_of(expression: tree.Expression) -> Iterator[tree.Expression]:
    """Return an expression and all that it is made of."""
    left = [expression]
    while left:
        each = left.pop()
        yield each
        left += _inner(each)


def height_of(expression: tree.Expression) -> int:
    """Return how many levels an expression has: a chain of operators grows as well."""
    height, level = 0, [expression]
    while level:
        height += 1
        level = [inner for each in level for inner in _inner(each)]
    return height


def _inner(expression: tree.Expression) -> tuple[tree.Expression, ...]:
    match expression:
        case tree.Map(_, keys):
            return keys
        case tree.Call(_, arguments):
            return arguments
        case tree.Tuple(values):
            return values
        case tree.Field(base):
            return (base,)
        case tree.Index(base, index):
            return (base, index)
        case tree.Unary(_, operand) | tree.Step(_, operand) | tree.Cast(_, operand):
            return (operand,)
        case tree.Binary(_, left, right):
            return (left, right)
        case tree.Conditional(condition, then, otherwise):
            return (condition, then, otherwise)
    return ()
