"""
The expression of ``#if`` and ``#elif``, computed in 64-bit integers as C11 6.10.1 says.

Operands that ``&&``, ``||`` and ``?:`` skip are read but may divide by zero. Directives are not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple
from dprobes.lazypattern import lazy_pattern
from dprobes.preprocessor.problems import DirectiveError
from dprobes.preprocessor.tokens import Token

if TYPE_CHECKING:
    from dprobes.preprocessor.expansion import Macros

__all__ = ["evaluate"]

_DEPTH = 60
_LEVELS = "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %"
_PRECEDENCE = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators.split()}
_INTEGER = lazy_pattern(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)([uU]?[lL]{0,2}|[lL]{1,2}[uU])")
_CHARACTER = lazy_pattern(r"L?'(?:([^\\])|\\([0-7]{1,3})|\\x([\da-fA-F]{1,8})|\\(.))'")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11}


def evaluate(directive: str, tokens: list[Token], macros: Macros) -> bool:
    """Return whether the expression after ``#directive`` is true; raise ``DirectiveError`` if it is wrong."""
    if not tokens:
        raise DirectiveError(f"malformed #{directive} directive", hint=f"write '#{directive} EXPRESSION'")
    try:
        expanded = macros.expand(_replace_defined(tokens, macros))
        return _Expression(_replace_defined(expanded, macros)).evaluate()
    except DirectiveError as error:
        raise DirectiveError(f"malformed #{directive} directive: {error}", error.span) from error


def _replace_defined(tokens: list[Token], macros: Macros) -> list[Token]:
    """Return the tokens without blanks, and 1 or 0 for ``defined NAME``; macros may produce that too, as in GNU C."""
    result: list[Token] = []
    rest = [token for token in tokens if token.kind != "blank"][::-1]
    while rest:
        token = rest.pop()
        if token.text == "defined":
            parenthesis = bool(rest) and rest[-1].text == "(" and bool(rest.pop())
            if not rest or rest[-1].kind != "name":
                raise DirectiveError("'defined' needs a name", token.span())
            value = str(int(rest.pop().text in macros))
            if parenthesis and (not rest or rest.pop().text != ")"):
                raise DirectiveError("'defined(' has no ')'", token.span())
            token = Token("number", value, token.place, token.use)
        result.append(token)
    return result


class _Number(NamedTuple):
    """Hold a 64-bit integer; ``unsigned`` if C would make it uintmax_t."""

    value: int
    unsigned: bool = False

    @classmethod
    def wrap(cls, value: int, unsigned: bool) -> _Number:
        value &= (1 << 64) - 1
        return cls(value - (1 << 64) if not unsigned and value >> 63 else value, unsigned)


class _Expression:
    """Read and compute an expression; ``live`` says whether its value is needed."""

    def __init__(self, tokens: list[Token]) -> None:
        self._rest = tokens[::-1]
        self._depth = 0

    def evaluate(self) -> bool:
        result = self._ternary(live=True)
        if self._rest:
            raise _unexpected(self._rest[-1])
        return result.value != 0

    def _accept(self, text: str) -> bool:
        return bool(self._rest) and self._rest[-1].text == text and bool(self._rest.pop())

    def _ternary(self, *, live: bool) -> _Number:
        self._depth += 1
        if self._depth > _DEPTH:
            raise DirectiveError("the expression nests too deep")
        result = self._binary(0, live=live)
        if self._accept("?"):
            yes = self._ternary(live=live and result.value != 0)
            if not self._accept(":"):
                raise DirectiveError("'?' without ':'")
            no = self._ternary(live=live and result.value == 0)
            result = _Number.wrap((yes if result.value else no).value, yes.unsigned or no.unsigned)
        self._depth -= 1
        return result

    def _binary(self, level: int, *, live: bool) -> _Number:
        left = self._unary(live=live)
        while self._rest and _PRECEDENCE.get(self._rest[-1].text, -1) >= level:
            operator = self._rest.pop()
            skips = {"&&": not left.value, "||": left.value != 0}.get(operator.text, False)
            right = self._binary(_PRECEDENCE[operator.text] + 1, live=live and not skips)
            if operator.text in ("/", "%") and right.value == 0:
                if live:
                    raise DirectiveError("division by zero", operator.span())
                right = _Number(1, right.unsigned)
            left = _apply(operator.text, left, right)
        return left

    def _unary(self, *, live: bool) -> _Number:
        signs: list[str] = []
        while self._rest and self._rest[-1].text in ("+", "-", "!", "~"):
            signs.append(self._rest.pop().text)
        if self._accept("("):
            result = self._ternary(live=live)
            if not self._accept(")"):
                raise DirectiveError("a '(' has no ')'")
        elif self._rest:
            result = _constant(self._rest.pop())
        else:
            raise DirectiveError("the expression ends too early")
        for sign in reversed(signs):
            if sign == "!":
                result = _Number(int(not result.value))
            elif sign != "+":
                result = _Number.wrap(-result.value if sign == "-" else ~result.value, result.unsigned)
        return result


def _constant(token: Token) -> _Number:
    if token.kind == "name":
        return _Number(0)
    if matched := _CHARACTER.fullmatch(token.text):
        plain, octal, hexadecimal, escape = matched.groups()
        if plain or escape:
            return _Number(ord(plain) if plain else _ESCAPES.get(escape, ord(escape)))
        return _Number(int(octal, 8) if octal else int(hexadecimal, 16))
    if len(token.text) < 100 and (matched := _INTEGER.fullmatch(token.text)):
        digits, suffix = matched.groups()
        value = int(digits, 8 if digits[0] == "0" and digits.isdigit() else 0)
        return _Number.wrap(value, "u" in suffix.lower() or value >> 63 != 0)
    raise _unexpected(token)


def _apply(operator: str, left: _Number, right: _Number) -> _Number:
    a, b = left.value, right.value
    if operator in ("<<", ">>"):
        count = min(abs(b), 64)
        return _Number.wrap(a << count if (operator == "<<") == (b >= 0) else a >> count, left.unsigned)
    unsigned = left.unsigned or right.unsigned
    if operator not in ("&&", "||"):
        a, b = _Number.wrap(a, unsigned).value, _Number.wrap(b, unsigned).value
    match operator:
        case "&&" | "||":
            return _Number(int(bool(a and b) if operator == "&&" else bool(a or b)))
        case "==" | "!=":
            return _Number(int((a == b) == (operator == "==")))
        case "<" | ">=":
            return _Number(int((a < b) == (operator == "<")))
        case ">" | "<=":
            return _Number(int((a > b) == (operator == ">")))
        case "/" | "%":
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # rounded to zero, unlike Python's
            return _Number.wrap(quotient if operator == "/" else a - quotient * b, unsigned)
    value = {"|": a | b, "^": a ^ b, "&": a & b, "+": a + b, "-": a - b, "*": a * b}[operator]
    return _Number.wrap(value, unsigned)


def _unexpected(token: Token) -> DirectiveError:
    return DirectiveError(f"unexpected '{token.text}'", token.span())
