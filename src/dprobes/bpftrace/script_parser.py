"""Parser of bpftrace scripts: C's expressions, with maps, variables with a dollar sign, strings and tuples."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from dprobes.bpftrace import script_tree
from dprobes.c_tokens import ParseError, TextTokens, Token, TokenCursor, TokenKind
from dprobes.source_text import Span
from dprobes.tree_nodes import Node

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import SourceFile

__all__ = ["parse"]

_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[0-9][A-Za-z0-9_.]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<table>@[A-Za-z0-9_]*)
      | (?P<variable>\$[A-Za-z_][A-Za-z0-9_]*)
      | (?P<parameter>\$[0-9#]+)
      | (?P<punctuation><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\*=|/=|%=|\+=|-=|&=|\^=|\|=|\.\.
                        |[\[\](){}.&*+\-~!/%<>^|?:;=,])""",
    re.VERBOSE,
)

# A path contains slashes; elsewhere a slash begins the condition after a probe.
_POINT = re.compile(
    r"""(?:uprobe|uretprobe|usdt|u|ur|U):(?:"[^"\n]*"|[^\s,{":])*(?::(?:"[^"\n]*"|[^\s,{"/])*)?
      | [A-Za-z_]\w*(?::(?:"[^"\n]*"|[^\s,{"/])*)*""",
    re.VERBOSE,
)


class TokenStream(TextTokens):
    """
    Tokens of a bpftrace script.

    In ``text``, comments and ``#`` lines are blanked, so positions are those of ``source``.
    """

    def __init__(self, source: SourceFile, text: str, diagnostics: Diagnostics) -> None:
        super().__init__(text, _TOKEN, partial(Span, source), diagnostics, "the end of the script")

    def take_point(self) -> Token | None:
        """Consume the name of a probe, such as ``kprobe:vfs_read``, and return it; None for another token."""
        return self.take_match(_POINT)

    def take_block(self) -> Token | None:
        """Consume a structure definition, up to the ``;`` after its closing brace. If it is not closed, return None."""
        depth = 0
        for position in range(self.peek().start, len(self.text)):
            depth += {"{": 1, "}": -1}.get(self.text[position], 0)
            if depth == 0 and self.text[position] == ";":
                return self.take_to(position + 1)
        return None


_DEPTH_MAX = 60
_PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "%": 10,
}  # fmt: skip
_UNARY = ("!", "~", "-", "*", "&", "+")
_TAGS = ("struct", "union", "enum")
_TYPES = re.compile(r"u?int(?:8|16|32|64)(?:_t)?|void|char|short|int|long|unsigned|signed|bool|size_t|u(?:8|16|32|64)")
_NUMBER = re.compile(
    r"(?P<hex>0[xX][0-9a-fA-F_]+)|(?P<digits>[0-9][0-9_]*)(?:e(?P<exponent>[0-9]+))?(?P<unit>ns|us|ms|s|m|h|d)?"
)
_UNITS = {"": 1, "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
_SUFFIX = re.compile(r"(?i:u|l|ul|ll|ull)\Z")
_DIGITS_MAX = 24
"""Maximum number of digits of a 64-bit number, octal ones included."""
_EXPONENT_MAX = 18


class Cursor(TokenCursor[TokenStream]):
    """A position in the tokens of a bpftrace script, with a limit on the depth of nesting."""

    def __init__(self, tokens: TokenStream, diagnostics: Diagnostics) -> None:
        super().__init__(tokens, diagnostics, _DEPTH_MAX)


class ExpressionParser:
    """
    A parser of bpftrace's expressions.

    In a probe's condition, ``/pid == 4/``, a slash ends the condition and does not divide.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._divides = True

    def condition(self) -> script_tree.Expression:
        """Parse the condition of a probe, after its first slash."""
        self._divides = False
        try:
            found = self.expression()
        finally:
            self._divides = True
        self._cursor.expect("/", "after the condition")
        return found

    def expression(self) -> script_tree.Expression:
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
            return script_tree.Conditional(condition, then, otherwise, self._cursor.span_from(first))

    def arguments(self, end: str) -> tuple[script_tree.Expression, ...]:
        """Parse expressions between commas, and consume the closing bracket ``end``."""
        divides, self._divides = self._divides, True
        found = [] if self._cursor.sees(end) else self._cursor.listed(self.expression)
        self._cursor.expect(end, "after the values")
        self._divides = divides
        return tuple(found)

    def _binary(self, least: int) -> script_tree.Expression:
        first = self._cursor.peek()
        left = self._unary()
        while True:
            token = self._cursor.peek()
            precedence = _PRECEDENCE.get(token.text, 0) if token.kind is TokenKind.PUNCTUATION else 0
            if precedence < least or (token.text == "/" and not self._divides):
                return left
            self._cursor.take()
            right = self._binary(precedence + 1)
            left = script_tree.Binary(token.text, left, right, self._cursor.span_from(first))

    def _unary(self) -> script_tree.Expression:
        cursor = self._cursor
        with cursor:
            first = cursor.peek()
            if cursor.accept("++", "--") is not None:
                operand = self._unary()
                return script_tree.Step(first.text, operand, is_postfix=False, span=cursor.span_from(first))
            if cursor.accept(*_UNARY) is not None:
                operand = self._unary()
                return script_tree.Unary(first.text, operand, cursor.span_from(first))
            if (length := self._cast_length()) > 0:
                type_ = self._type(length)
                operand = self._unary()
                return script_tree.Cast(type_, operand, cursor.span_from(first))
            return self._postfix()

    def _cast_length(self) -> int:
        """Return the number of tokens of a cast ``(type)`` that comes next, with its brackets, or 0 if none does."""
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
        # A name with a star in parentheses is taken for a type: as an expression, it would lack an operand.
        return distance + 1

    def _type(self, length: int) -> str:
        words = [self._cursor.take().text for _ in range(length)][1:-1]
        return " ".join(words).replace("* *", "**")

    def _postfix(self) -> script_tree.Expression:
        cursor = self._cursor
        first = cursor.peek()
        found = self._primary()
        while True:
            if (operator := cursor.accept("->", ".")) is not None:
                if cursor.peek().kind is TokenKind.NUMBER:
                    raise cursor.wrong("tuples have no equivalent in DProbes C")
                name = cursor.expect_name("the name of a field").text
                found = script_tree.Field(found, name, operator.text == "->", cursor.span_from(first))
            elif cursor.accept("["):
                (index,) = self._one(self.arguments("]"))
                found = script_tree.Index(found, index, cursor.span_from(first))
            elif (operator := cursor.accept("++", "--")) is not None:
                found = script_tree.Step(operator.text, found, is_postfix=True, span=cursor.span_from(first))
            else:
                return found

    def _one(self, values: tuple[script_tree.Expression, ...]) -> tuple[script_tree.Expression]:
        if len(values) != 1:
            raise self._cursor.wrong("an array has one index", self._cursor.tokens.span(self._cursor.last))
        return (values[0],)

    def _primary(self) -> script_tree.Expression:
        cursor = self._cursor
        token = cursor.take()
        span = cursor.tokens.span(token)
        match token.kind:
            case TokenKind.NUMBER:
                return script_tree.Number(self._number(token), span)
            case TokenKind.STRING:
                return script_tree.String(token.text[1:-1], span)
            case TokenKind.VARIABLE:
                return script_tree.Variable(token.text[1:], span)
            case TokenKind.PARAMETER:
                return script_tree.Parameter(token.text, span)
            case TokenKind.TABLE:
                keys = self.arguments("]") if cursor.accept("[") else ()
                return script_tree.Map(token.text[1:], keys, cursor.span_from(token))
            case TokenKind.NAME:
                if token.text == "sizeof" and (length := self._cast_length()) > 0:
                    return script_tree.SizeOf(self._type(length), cursor.span_from(token))
                if not cursor.accept("("):
                    return script_tree.Name(token.text, span)
                arguments = self.arguments(")")
                return script_tree.Call(token.text, arguments, cursor.span_from(token))
        if token.text == "(":
            values = self.arguments(")")
            if len(values) == 1:
                return values[0]
            return script_tree.Tuple(values, cursor.span_from(token))
        raise cursor.wrong(f"expected a value, found {token.described}", span)

    def _number(self, token: Token) -> int:
        text = token.text
        match = _NUMBER.fullmatch(text if text[:2] in ("0x", "0X") else _SUFFIX.sub("", text))
        if match is None or len(match["exponent"] or "") > 2 or int(match["exponent"] or 0) > _EXPONENT_MAX:
            raise self._cursor.wrong(f"'{text}' is not a number", self._cursor.tokens.span(token))
        if match["hex"]:
            return int(match["hex"].replace("_", ""), 16)
        digits = match["digits"].replace("_", "")
        if len(digits.lstrip("0")) > _DIGITS_MAX:
            raise self._cursor.wrong(f"'{text}' has more than 64 bits", self._cursor.tokens.span(token))
        is_octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit() and not {"8", "9"} & {*digits}
        value = int(digits, 8 if is_octal else 10)
        value = value * int(10 ** int(match["exponent"] or 0)) * _UNITS[match["unit"] or ""]
        if value >= 1 << 64:
            raise self._cursor.wrong(f"'{text}' has more than 64 bits", self._cursor.tokens.span(token))
        return value


def height_of(expression: script_tree.Expression) -> int:
    """Return the height of an expression's tree, to which each operator of a chain such as ``1 + 1 + 1`` adds."""
    height, level = 0, list[Node]([expression])
    while level:
        height += 1
        level = [inner for each in level for inner in each.children()]
    return height


_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_JUMPS = ("return", "break", "continue")


def parse(source: SourceFile, text: str, diagnostics: Diagnostics) -> script_tree.Script:
    """Parse a script; ``text`` is that of ``source`` without comments and directives. Report errors."""
    return _ScriptParser(Cursor(TokenStream(source, text, diagnostics), diagnostics)).script()


class _ScriptParser:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._expressions = ExpressionParser(cursor)

    def script(self) -> script_tree.Script:
        cursor = self._cursor
        probes: list[script_tree.Probe] = []
        structures: list[str] = []
        while cursor.peek().kind is not TokenKind.END:
            try:
                if cursor.sees("struct", "union", "enum"):
                    first = cursor.peek()
                    definition = cursor.tokens.take_block()
                    if definition is None:
                        raise cursor.wrong("this definition does not end with '};'", cursor.tokens.span(first))
                    structures.append(definition.text)
                elif cursor.sees("config") and cursor.peek(1).text in ("=", "{"):
                    self._skip_settings()
                else:
                    probes.append(self._probe())
            except ParseError:
                self._skip_probe()
        return script_tree.Script(tuple(probes), tuple(structures))

    def _skip_settings(self) -> None:
        """Consume a ``config`` block: it has no probe."""
        cursor = self._cursor
        first = cursor.take()
        cursor.accept("=")
        cursor.expect("{", "at the beginning of the settings")
        while not cursor.accept("}"):
            if cursor.peek().kind is TokenKind.END:
                raise cursor.wrong("expected '}' at the end of the settings, found the end of the script")
            cursor.take()
        cursor.diagnostics.note(cursor.span_from(first), "'config' is left out: its settings are those of bpftrace")

    def _probe(self) -> script_tree.Probe:
        cursor = self._cursor
        first = cursor.peek()
        points = [self._point()]
        while cursor.accept(","):
            if cursor.sees("{", "/"):
                break
            points.append(self._point())
        condition = self._expressions.condition() if cursor.accept("/") else None
        body = self._block("of a probe")
        return script_tree.Probe(tuple(points), condition, body, cursor.span_from(first))

    def _point(self) -> script_tree.Point:
        cursor = self._cursor
        word = cursor.tokens.take_point()
        if word is None:
            raise cursor.wrong(f"expected a probe, found {cursor.peek().described}")
        cursor.last = word
        return script_tree.Point(tuple(word.text.replace('"', "").split(":")), cursor.tokens.span(word))

    def _block(self, what: str) -> tuple[script_tree.Statement, ...]:
        cursor = self._cursor
        with cursor:
            cursor.expect("{", f"at the beginning of the block {what}")
            found: list[script_tree.Statement] = []
            while not cursor.sees("}"):
                if cursor.peek().kind is TokenKind.END:
                    raise cursor.wrong(f"expected '}}' at the end of the block {what}, found the end of the script")
                if cursor.accept(";"):
                    continue
                if cursor.sees("let") and cursor.peek(1).kind is TokenKind.VARIABLE and cursor.peek(2).text == ";":
                    for _ in range(3):  # a declaration without a value: the first assignment declares the variable
                        cursor.take()
                    continue
                try:
                    found.append(self._statement())
                except ParseError:
                    self._cursor.skip_statement()
            cursor.take()
            return tuple(found)

    def _statement(self) -> script_tree.Statement:
        cursor = self._cursor
        first = cursor.peek()
        found: script_tree.Statement
        if cursor.accept("if"):
            return self._if(first)
        if cursor.accept("while"):
            condition = self._in_brackets("of the loop")
            return script_tree.While(condition, self._block("of a loop"), cursor.span_from(first))
        if cursor.accept("unroll"):
            count = self._in_brackets("of 'unroll'")
            return script_tree.Unroll(count, self._block("of 'unroll'"), cursor.span_from(first))
        if cursor.sees("let") and cursor.peek(1).kind is TokenKind.VARIABLE:
            cursor.take()
            first = cursor.peek()
        if cursor.sees("for"):
            raise cursor.wrong("loops over maps have no equivalent in DProbes C")
        if (jump := cursor.accept(*_JUMPS)) is not None:
            found = script_tree.Jump(jump.text, cursor.tokens.span(jump))
        else:
            found = self._expression_statement(first)
        if not cursor.sees("}"):
            cursor.expect(";", "after a statement")
        return found

    def _if(self, first: Token) -> script_tree.If:
        cursor = self._cursor
        with cursor:
            condition = self._in_brackets("of 'if'")
            then = self._block("of 'if'")
            otherwise: tuple[script_tree.Statement, ...] = ()
            if cursor.accept("else"):
                second = cursor.peek()
                otherwise = (self._if(second),) if cursor.accept("if") else self._block("of 'else'")
            return script_tree.If(condition, then, otherwise, cursor.span_from(first))

    def _in_brackets(self, where: str) -> script_tree.Expression:
        self._cursor.expect("(", f"before the condition {where}")
        found = self._expressions.expression()
        self._cursor.expect(")", f"after the condition {where}")
        return found

    def _expression_statement(self, first: Token) -> script_tree.Statement:
        cursor = self._cursor
        target = self._expressions.expression()
        operator = cursor.accept(*_ASSIGNMENTS)
        if operator is None:
            return script_tree.Do(target, cursor.span_from(first))
        if not isinstance(target, (script_tree.Variable, script_tree.Map)):
            raise cursor.wrong("only a variable or a map can be assigned to", target.span)
        value = self._expressions.expression()
        return script_tree.Assignment(target, operator.text[:-1], value, cursor.span_from(first))

    def _skip_probe(self) -> None:
        """Skip the tokens up to the end of the block of a probe that has a syntax error."""
        self._cursor.skip_statement()
        while self._cursor.sees("}"):
            self._cursor.take()
