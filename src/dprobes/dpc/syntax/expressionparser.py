"""Expressions: C's operators by their precedence (C17 6.5), and what DProbes C adds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from dprobes.clike.token import TokenKind
from dprobes.dpc.syntax import tree
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.dpc.syntax.cursor import Cursor

__all__ = ["ExpressionParser", "number_of", "string_value"]

_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
"""The operators between two operands, the loosest first."""
_LEVEL_OF = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators}

_ASSIGNMENTS = {
    "=": "",
    **{f"{operator}=": operator for operator in ("+", "-", "*", "/", "%", "<<", ">>", "&", "^", "|")},
}
_PREFIXES = ("-", "+", "~", "!", "*", "&")

_NUMBER = lazy_pattern(r"(?P<digits>0[xX][0-9A-Fa-f]+|0[bB][01]+|[0-9]+)(?P<suffix>[A-Za-z]*)\Z")
_C_SUFFIXES = frozenset({"", "u", "l", "ul", "lu", "ll", "ull", "llu"})
UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
"""What may stand behind a number: times in nanoseconds, and amounts."""

_ESCAPE = lazy_pattern(r"\\(x[0-9A-Fa-f]+|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}


_CHARACTER_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_SIMPLE = frozenset("ntrabfve\"'?\\\n")

_DIGITS_MAX = 70
"""More digits than a number of 64 bits has in any base, without zeros in front."""


def string_value(text: str) -> str:
    """Return what a string or character in quotes stands for."""

    def value(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16) & 0xFF)
        if code[0] in "uU" and len(code) > 1:
            number = int(code[1:], 16)
            is_character = number <= _CHARACTER_MAX and number not in _SURROGATES
            return chr(number) if is_character else "\N{REPLACEMENT CHARACTER}"
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)
        return _ESCAPES.get(code, code)

    return _ESCAPE.sub(value, text[1:-1])


def _checked_value(cursor: Cursor, token: Token) -> str:
    """Return what a string or character in quotes stands for; an escape that C does not have is an error."""
    for match in _ESCAPE.finditer(token.text[1:-1]):
        code = match.group(1)
        if len(code) == 1 and code not in _SIMPLE and code not in "01234567":
            span, hint = cursor.tokens.span(token), "escapes are those of C"
            raise cursor.wrong(f"unknown escape '\\{code}'", span, "\\u has 4 digits" if code == "u" else hint)
    return string_value(token.text)


def number_of(cursor: Cursor, token: Token) -> tree.Number:
    """Return the number that a token is; one that is none is an error."""
    span = cursor.tokens.span(token)
    if token.kind is TokenKind.CHARACTER:
        return tree.Number(ord(_checked_value(cursor, token)), "char", is_decimal=True, span=span)
    match = _NUMBER.match(token.text)
    if match is None:
        what = "a floating-point number; there are none in DProbes C" if "." in token.text else "no number"
        raise cursor.wrong(f"'{token.text}' is {what}", span)
    digits, suffix = match["digits"], match["suffix"].lower()
    is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    if is_octal and not set(digits) <= set("01234567"):
        raise cursor.wrong(f"'{token.text}' is no octal number", span, "a number that begins with 0 is octal")
    if len(digits.lstrip("0xXbB")) > _DIGITS_MAX:
        raise cursor.wrong(f"'{token.text[:_DIGITS_MAX]}…' has more than 64 bits", span)
    value = int(digits, 8 if is_octal else 0)
    if suffix in UNITS:
        value, suffix = value * UNITS[suffix], ""
    elif suffix not in _C_SUFFIXES:
        raise cursor.wrong(
            f"'{match['suffix']}' is no suffix of a number", span, f"there are u, l, ll, {', '.join(UNITS)}"
        )
    if value >= 1 << 64:
        raise cursor.wrong(f"'{token.text}' has more than 64 bits", span)
    return tree.Number(value, suffix, is_decimal=digits.isdigit() and not is_octal, span=span)


class TypeParser(Protocol):
    """Parse the types in expressions."""

    def begins_type(self, distance: int = 0) -> bool:
        """Return whether the next token, or one behind it, begins a type."""

    def type_name(self) -> tree.TypeName:
        """Parse a type without a name."""


class ExpressionParser:
    """Parse expressions; ``declarations`` knows what a type is."""

    def __init__(self, cursor: Cursor, declarations: TypeParser) -> None:
        self._cursor = cursor
        self._declarations = declarations
        self._colons = 0
        """In how many constructs the parser is in which a colon follows an expression."""

    def expression(self) -> tree.Expression:
        """Parse an expression with commas."""
        left = self.assignment()
        while self._cursor.accept(","):
            right = self.assignment()
            left = tree.Comma(left, right, left.span.to(right.span))
        return left

    def assignment(self) -> tree.Expression:
        """Parse an expression without commas outside of parentheses."""
        with self._cursor:
            left = self._conditional()
            operator = self._cursor.accept(*_ASSIGNMENTS)
            if operator is None:
                return left
            value = self.assignment()
            return tree.Assignment(_ASSIGNMENTS[operator.text], left, value, left.span.to(value.span))

    def constant(self) -> tree.Expression:
        """Parse an expression that is to be a constant; whether it is one is for others to say."""
        self._colons += 1
        try:
            return self._conditional()
        finally:
            self._colons -= 1

    def _conditional(self) -> tree.Expression:
        condition = self._binary(0)
        if not self._cursor.accept("?"):
            return condition
        with self._cursor:
            self._colons += 1
            try:
                yes = self.expression()
            finally:
                self._colons -= 1
            self._cursor.expect(":", "in '? :'")
            no = self._conditional()
        return tree.Conditional(condition, yes, no, condition.span.to(no.span))

    def _binary(self, least: int) -> tree.Expression:
        """Parse what operators of a level combine, and of those that bind closer."""
        cursor = self._cursor
        left = self._unary()
        while cursor.peek().kind is TokenKind.PUNCTUATION and (level := _LEVEL_OF.get(cursor.peek().text, -1)) >= least:
            operator = cursor.take()
            right = self._binary(level + 1)
            left = tree.Binary(operator.text, left, right, left.span.to(right.span))
        if cursor.peek().kind is TokenKind.NAME:
            from dprobes.dpc.tracerwords import operator_hint

            if (hint := operator_hint(cursor.peek().text)) is not None:
                raise cursor.wrong(f"'{cursor.peek().text}' is no operator", None, hint)
        return left

    def _unary(self) -> tree.Expression:
        cursor = self._cursor
        with cursor:
            first = cursor.peek()
            if (operator := cursor.accept("++", "--")) is not None:
                operand = self._unary()
                amount = 1 if operator.text == "++" else -1
                return tree.Increment(amount, operand, is_postfix=False, span=cursor.span_from(first))
            if (operator := cursor.accept(*_PREFIXES)) is not None:
                operand = self._unary()
                return tree.Unary(operator.text, operand, cursor.span_from(first))
            if cursor.sees("sizeof"):
                return self._sizeof()
            if cursor.sees("(") and self._declarations.begins_type(1):
                cursor.take()
                type_ = self._declarations.type_name()
                cursor.expect(")", "behind the type of a cast")
                operand = self._unary()
                return tree.Cast(type_, operand, cursor.span_from(first))
            return self._postfix()

    def _sizeof(self) -> tree.Expression:
        cursor = self._cursor
        first = cursor.take()
        if cursor.sees("(") and self._declarations.begins_type(1):
            cursor.take()
            type_ = self._declarations.type_name()
            cursor.expect(")", "behind the type of 'sizeof'")
            return tree.SizeOf(type_, (), cursor.span_from(first))
        operand = self._unary()
        return tree.SizeOf(operand, (), cursor.span_from(first))

    def _postfix(self) -> tree.Expression:
        cursor = self._cursor
        value = self._primary()
        while True:
            if cursor.accept("["):
                index = self.expression()
                cursor.expect("]", "behind an index")
                value = tree.Index(value, index, cursor.span_of(value.span))
            elif (operator := cursor.accept(".", "->")) is not None:
                name = cursor.expect_name("the name of a member")
                value = tree.MemberAccess(value, name.text, operator.text == "->", cursor.span_of(value.span))
            elif (operator := cursor.accept("++", "--")) is not None:
                amount = 1 if operator.text == "++" else -1
                value = tree.Increment(amount, value, is_postfix=True, span=cursor.span_of(value.span))
            else:
                return value

    def _primary(self) -> tree.Expression:
        cursor = self._cursor
        token = cursor.peek()
        match token.kind:
            case TokenKind.NUMBER | TokenKind.CHARACTER:
                return number_of(cursor, cursor.take())
            case TokenKind.STRING | TokenKind.NAME if self._is_module():
                return self._of_module()
            case TokenKind.STRING:
                return self._string()
            case TokenKind.TABLE:
                return self._table()
            case TokenKind.NAME if token.text == "offsetof":
                return self._offsetof()
            case TokenKind.NAME:
                cursor.take()
                if not cursor.accept("("):
                    return tree.Name(token.text, cursor.tokens.span(token))
                arguments = self.arguments(")")
                return tree.Call(token.text, arguments, cursor.span_from(token))
        if cursor.accept("("):
            word = cursor.peek()
            value = self.expression()
            cursor.expect(")", "behind an expression")
            if isinstance(value, tree.Name) and cursor.peek().kind in (TokenKind.NAME, TokenKind.NUMBER):
                from dprobes.dpc.tracerwords import cast_hint

                if (hint := cast_hint(word.text)) is not None:
                    raise cursor.wrong(f"there is no type '{word.text}'", value.span, hint)
            return value
        if cursor.accept("::"):  # a symbol of the module, whatever else has its name
            name = cursor.expect_name("a symbol of the module")
            return tree.Name(f"::{name.text}", cursor.span_from(token))
        hint = None
        following = cursor.peek(1)
        if token.text == "%" and following.kind is TokenKind.NAME and len(following.text) > 1:
            from dprobes.dpc.tracerwords import name_hint

            hint = name_hint(following.text)
        if token.text == "<" and cursor.last.text == "<<":
            hint = "a table keeps what a function says: @x = avg(y)"
        if token.text == "%":
            hint = hint or 'a format stands in double quotes: printf("%d", x)'
        raise cursor.wrong(f"expected an expression, found {token.described}", None, hint)

    def _is_module(self) -> bool:
        """Return whether ``MODULE:name`` comes next, without blanks."""
        module, colon, name = (self._cursor.peek(distance) for distance in range(3))
        is_joined = module.end == colon.start and colon.end == name.start
        return not self._colons and colon.text == ":" and name.kind is TokenKind.NAME and is_joined

    def _of_module(self) -> tree.Name:
        cursor = self._cursor
        first = cursor.take()
        cursor.take()
        name = cursor.take()
        module = string_value(first.text) if first.kind is TokenKind.STRING else first.text
        return tree.Name(f"::{name.text}", cursor.span_from(first), module)

    def arguments(self, end: str) -> tuple[tree.Expression, ...]:
        """Parse expressions between commas, and the bracket behind them."""
        found: list[tree.Expression] = []
        if self._cursor.accept(end):
            return ()
        while True:
            found.append(self.assignment())
            if not self._cursor.accept(","):
                break
        if not self._cursor.sees(end):
            other = self._cursor.peek()
            values = (TokenKind.NAME, TokenKind.NUMBER, TokenKind.STRING, TokenKind.TABLE)
            hint = f"write ',' before '{other.text}'" if other.kind in values else None
            raise self._cursor.wrong(f"expected '{end}' behind the last one, found {other.described}", hint=hint)
        self._cursor.take()
        return tuple(found)

    def _string(self) -> tree.StringLiteral:
        first = self._cursor.peek()
        value = ""
        while self._cursor.peek().kind is TokenKind.STRING:
            value += _checked_value(self._cursor, self._cursor.take())
        return tree.StringLiteral(value, self._cursor.span_from(first))

    def _table(self) -> tree.TableAccess:
        token = self._cursor.take()
        keys = self.arguments("]") if self._cursor.accept("[") else ()
        return tree.TableAccess(token.text[1:], keys, self._cursor.span_from(token))

    def _offsetof(self) -> tree.SizeOf:
        cursor = self._cursor
        first = cursor.take()
        cursor.expect("(", "behind 'offsetof'")
        type_ = self._declarations.type_name()
        cursor.expect(",", "between type and member")
        members = [cursor.expect_name("the name of a member").text]
        while cursor.accept("."):
            members.append(cursor.expect_name("the name of a member").text)
        cursor.expect(")", "behind the member")
        return tree.SizeOf(type_, tuple(members), cursor.span_from(first))
