"""Parser of expressions: C's operators by their precedence (C17 6.5), and the additions of DProbes C."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from dprobes.c_tokens import TextTokens, Token, TokenCursor, TokenKind
from dprobes.dpc.syntax import syntax_tree

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.preprocessor import Preprocessed

__all__ = ["Cursor", "ExpressionParser", "TokenStream", "number_of", "scoped_parts", "string_value"]

# A name may include its scopes, ``shop::Cart``, or be in backquotes, ``Box<int>::last``. Places of probepoints are not
# tokens (``take_place_word``).

_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z_$][A-Za-z0-9_$]*(?:::[A-Za-z_$][A-Za-z0-9_$]*)*|`[^`\s][^`\n]*`)
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[A-Za-z0-9_.])*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<character>'(?:[^'\\\n]|\\.[0-7A-Fa-f]*)')
      | (?P<table>@[A-Za-z_]?[A-Za-z0-9_]*)
      | (?P<punctuation><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|::
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)
_PLACE_WORD = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"|`[^`"\\\n]*`|[^\s(){},;"`])*')
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')


class TokenStream(TextTokens):
    """The tokens of a program in DProbes C; the place of a probepoint is one word."""

    def __init__(self, text: Preprocessed, diagnostics: Diagnostics) -> None:
        super().__init__(text.text, _TOKEN, text.span, diagnostics, "the end of the program")

    def _scan(self) -> Token:
        token = super()._scan()
        if token.kind is TokenKind.NAME and token.text.startswith("`"):
            return Token(token.kind, token.text.strip("` "), token.start, token.end)
        return token

    def take_place_word(self) -> Token:
        """Consume the text up to a blank, bracket, comma or semicolon, and return it as a word, which may be empty."""
        word = self.take_match(_PLACE_WORD)
        assert word is not None
        # In a place, backquotes act as quotes.
        text = _QUOTED.sub(lambda match: f'"{match[0][1:-1]}"', word.text)
        return Token(word.kind, text, word.start, word.end)

    def written(self, start: int, end: int) -> str:
        """Return a piece of the text as written, with macros expanded, and blanks reduced to one."""
        return " ".join(self.text[start:end].split())


def scoped_parts(name: str) -> list[str]:
    """Return the scopes of a name, then the name itself; the arguments of a template are not split."""
    parts, start, depth = [], 0, 0
    for place, character in enumerate(name):
        if character in "<([{":
            depth += 1
        elif character in ">)]}":
            depth -= 1
        elif not depth and name.startswith("::", place):
            parts.append(name[start:place])
            start = place + 2
    return [*parts, name[start:]]


_DEPTH_MAX = 100
"""Maximum depth of nested expressions, statements and types."""


class Cursor(TokenCursor[TokenStream]):
    """A position in the tokens of a program in DProbes C, with a limit on the depth of nesting."""

    def __init__(self, tokens: TokenStream, diagnostics: Diagnostics) -> None:
        super().__init__(tokens, diagnostics, _DEPTH_MAX)
        self.typedefs: set[str] = set()
        """The names that ``typedef`` has declared, which make a parenthesis a cast."""


_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
"""The binary operators by precedence, the lowest first."""
_LEVEL_OF = {operator: level for level, operators in enumerate(_LEVELS) for operator in operators}

_ASSIGNMENTS = {
    "=": "",
    **{f"{operator}=": operator for operator in ("+", "-", "*", "/", "%", "<<", ">>", "&", "^", "|")},
}
_PREFIXES = ("-", "+", "~", "!", "*", "&")

_NUMBER = re.compile(r"(?P<digits>0[xX][0-9A-Fa-f]+|0[bB][01]+|[0-9]+)(?P<suffix>[A-Za-z]*)\Z")
_C_SUFFIXES = frozenset({"", "u", "l", "ul", "lu", "ll", "ull", "llu"})
UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
"""Factors of the suffixes of numbers: times, in nanoseconds, and binary multiples."""

_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]+|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "e": "\x1b"}

_CHARACTER_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_SIMPLE = frozenset("ntrabfve\"'?\\\n")

_DIGITS_MAX = 70
"""Maximum number of digits without leading zeros: more than a 64-bit number has in any base."""


def string_value(text: str) -> str:
    """Return the contents of a string or character literal."""

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
    """Return the contents of a string or character literal; report an escape that C does not have."""
    for match in _ESCAPE.finditer(token.text[1:-1]):
        code = match.group(1)
        if len(code) == 1 and code not in _SIMPLE and code not in "01234567":
            span, hint = cursor.tokens.span(token), "escapes are those of C"
            raise cursor.wrong(f"unknown escape '\\{code}'", span, "\\u has 4 digits" if code == "u" else hint)
    return string_value(token.text)


def number_of(cursor: Cursor, token: Token) -> syntax_tree.Number:
    """Return the number of a token, or report that the token is not a number."""
    span = cursor.tokens.span(token)
    if token.kind is TokenKind.CHARACTER:
        return syntax_tree.Number(ord(_checked_value(cursor, token)), "char", is_decimal=True, span=span)
    match = _NUMBER.match(token.text)
    if match is None:
        what = "a floating-point number; there are none in DProbes C" if "." in token.text else "no number"
        raise cursor.wrong(f"'{token.text}' is {what}", span)
    digits, suffix = match["digits"], match["suffix"].lower()
    is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    if is_octal and not set(digits) <= set("01234567"):
        raise cursor.wrong(f"'{token.text}' is not an octal number", span, "a number that begins with 0 is octal")
    if len(digits.lstrip("0xXbB")) > _DIGITS_MAX:
        raise cursor.wrong(f"'{token.text[:_DIGITS_MAX]}…' has more than 64 bits", span)
    value = int(digits, 8 if is_octal else 0)
    if suffix in UNITS:
        value, suffix = value * UNITS[suffix], ""
    elif suffix not in _C_SUFFIXES:
        raise cursor.wrong(
            f"'{match['suffix']}' is not a suffix of a number", span, f"there are u, l, ll, {', '.join(UNITS)}"
        )
    if value >= 1 << 64:
        raise cursor.wrong(f"'{token.text}' has more than 64 bits", span)
    return syntax_tree.Number(value, suffix, is_decimal=digits.isdigit() and not is_octal, span=span)


class TypeParser(Protocol):
    """A parser of the types in expressions."""

    def begins_type(self, distance: int = 0) -> bool:
        """Return whether a type begins at the token that is ``distance`` tokens after the next one."""

    def type_name(self) -> syntax_tree.TypeName:
        """Parse a type without a declared name, such as ``struct file *`` in a cast."""


class ExpressionParser:
    """A parser of expressions; ``declarations`` recognizes types."""

    def __init__(self, cursor: Cursor, declarations: TypeParser) -> None:
        self._cursor = cursor
        self._declarations = declarations
        self._colons = 0
        """The number of enclosing constructs in which a colon follows an expression."""

    def expression(self) -> syntax_tree.Expression:
        """Parse an expression, comma operators included, from the next token on."""
        left = self.assignment()
        while self._cursor.accept(","):
            right = self.assignment()
            left = syntax_tree.Comma(left, right, left.span.to(right.span))
        return left

    def assignment(self) -> syntax_tree.Expression:
        """Parse an expression up to a comma outside of parentheses, such as an argument."""
        with self._cursor:
            left = self._conditional()
            operator = self._cursor.accept(*_ASSIGNMENTS)
            if operator is None:
                return left
            value = self.assignment()
            return syntax_tree.Assignment(_ASSIGNMENTS[operator.text], left, value, left.span.to(value.span))

    def constant(self) -> syntax_tree.Expression:
        """Parse an expression that has to be constant; the typer checks that it is."""
        self._colons += 1
        try:
            return self._conditional()
        finally:
            self._colons -= 1

    def _conditional(self) -> syntax_tree.Expression:
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
        return syntax_tree.Conditional(condition, yes, no, condition.span.to(no.span))

    def _binary(self, least: int) -> syntax_tree.Expression:
        """Parse binary operators whose level, an index of ``_LEVELS``, is ``least`` or higher."""
        cursor = self._cursor
        left = self._unary()
        while cursor.peek().kind is TokenKind.PUNCTUATION and (level := _LEVEL_OF.get(cursor.peek().text, -1)) >= least:
            operator = cursor.take()
            right = self._binary(level + 1)
            left = syntax_tree.Binary(operator.text, left, right, left.span.to(right.span))
        if cursor.peek().kind is TokenKind.NAME:
            from dprobes.dpc.tracer_words import operator_hint

            if (hint := operator_hint(cursor.peek().text)) is not None:
                raise cursor.wrong(f"'{cursor.peek().text}' is not an operator", None, hint)
        return left

    def _unary(self) -> syntax_tree.Expression:
        cursor = self._cursor
        with cursor:
            first = cursor.peek()
            if (operator := cursor.accept("++", "--")) is not None:
                operand = self._unary()
                amount = 1 if operator.text == "++" else -1
                return syntax_tree.Increment(amount, operand, is_postfix=False, span=cursor.span_from(first))
            if (operator := cursor.accept(*_PREFIXES)) is not None:
                operand = self._unary()
                return syntax_tree.Unary(operator.text, operand, cursor.span_from(first))
            if cursor.sees("sizeof"):
                return self._sizeof()
            if cursor.sees("(") and self._declarations.begins_type(1):
                cursor.take()
                type_ = self._declarations.type_name()
                cursor.expect(")", "after the type of a cast")
                operand = self._unary()
                return syntax_tree.Cast(type_, operand, cursor.span_from(first))
            return self._postfix()

    def _sizeof(self) -> syntax_tree.Expression:
        cursor = self._cursor
        first = cursor.take()
        operand: syntax_tree.TypeName | syntax_tree.Expression
        if cursor.sees("(") and self._declarations.begins_type(1):
            cursor.take()
            operand = self._declarations.type_name()
            cursor.expect(")", "after the type of 'sizeof'")
        else:
            operand = self._unary()
        return syntax_tree.SizeOf(operand, (), cursor.span_from(first))

    def _postfix(self) -> syntax_tree.Expression:
        cursor = self._cursor
        value = self._primary()
        while True:
            if cursor.accept("["):
                index = self.expression()
                cursor.expect("]", "after an index")
                value = syntax_tree.Index(value, index, cursor.span_of(value.span))
            elif (operator := cursor.accept(".", "->")) is not None:
                name = cursor.expect_name("the name of a member")
                value = syntax_tree.MemberAccess(value, name.text, operator.text == "->", cursor.span_of(value.span))
            elif (operator := cursor.accept("++", "--")) is not None:
                amount = 1 if operator.text == "++" else -1
                value = syntax_tree.Increment(amount, value, is_postfix=True, span=cursor.span_of(value.span))
            else:
                return value

    def _primary(self) -> syntax_tree.Expression:
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
                    return syntax_tree.Name(token.text, cursor.tokens.span(token))
                arguments = self.arguments(")")
                return syntax_tree.Call(token.text, arguments, cursor.span_from(token))
        if cursor.accept("("):
            word = cursor.peek()
            value = self.expression()
            cursor.expect(")", "after an expression")
            if isinstance(value, syntax_tree.Name) and cursor.peek().kind in (TokenKind.NAME, TokenKind.NUMBER):
                from dprobes.dpc.tracer_words import cast_hint

                if (hint := cast_hint(word.text)) is not None:
                    raise cursor.wrong(f"there is no type '{word.text}'", value.span, hint)
            return value
        if cursor.accept("::"):  # a symbol of the module, even if another meaning has its name
            name = cursor.expect_name("a symbol of the module")
            return syntax_tree.Name(f"::{name.text}", cursor.span_from(token))
        hint = None
        following = cursor.peek(1)
        if token.text == "%" and following.kind is TokenKind.NAME and len(following.text) > 1:
            from dprobes.dpc.tracer_words import name_hint

            hint = name_hint(following.text)
        if token.text == "<" and cursor.last.text == "<<":
            hint = "assign the function to a table: @x = avg(y)"
        if token.text == "%":
            hint = hint or 'write the format in double quotes: printf("%d", x)'
        raise cursor.wrong(f"expected an expression, found {token.described}", None, hint)

    def _is_module(self) -> bool:
        """Return whether ``MODULE:name`` comes next, without blanks."""
        module, colon, name = (self._cursor.peek(distance) for distance in range(3))
        is_joined = module.end == colon.start and colon.end == name.start
        return not self._colons and colon.text == ":" and name.kind is TokenKind.NAME and is_joined

    def _of_module(self) -> syntax_tree.Name:
        cursor = self._cursor
        first = cursor.take()
        cursor.take()
        name = cursor.take()
        module = string_value(first.text) if first.kind is TokenKind.STRING else first.text
        return syntax_tree.Name(f"::{name.text}", cursor.span_from(first), module)

    def arguments(self, end: str) -> tuple[syntax_tree.Expression, ...]:
        """Parse expressions that are separated by commas, and the closing bracket ``end``."""
        if self._cursor.accept(end):
            return ()
        found = self._cursor.listed(self.assignment)
        if not self._cursor.sees(end):
            other = self._cursor.peek()
            values = (TokenKind.NAME, TokenKind.NUMBER, TokenKind.STRING, TokenKind.TABLE)
            hint = f"write ',' before '{other.text}'" if other.kind in values else None
            raise self._cursor.wrong(f"expected '{end}' after the last one, found {other.described}", hint=hint)
        self._cursor.take()
        return tuple(found)

    def _string(self) -> syntax_tree.StringLiteral:
        first = self._cursor.peek()
        value = ""
        while self._cursor.peek().kind is TokenKind.STRING:
            value += _checked_value(self._cursor, self._cursor.take())
        return syntax_tree.StringLiteral(value, self._cursor.span_from(first))

    def _table(self) -> syntax_tree.TableAccess:
        token = self._cursor.take()
        keys = self.arguments("]") if self._cursor.accept("[") else ()
        return syntax_tree.TableAccess(token.text[1:], keys, self._cursor.span_from(token))

    def _offsetof(self) -> syntax_tree.SizeOf:
        cursor = self._cursor
        first = cursor.take()
        cursor.expect("(", "after 'offsetof'")
        type_ = self._declarations.type_name()
        cursor.expect(",", "between type and member")
        members = [cursor.expect_name("the name of a member").text]
        while cursor.accept("."):
            members.append(cursor.expect_name("the name of a member").text)
        cursor.expect(")", "after the member")
        return syntax_tree.SizeOf(type_, tuple(members), cursor.span_from(first))
