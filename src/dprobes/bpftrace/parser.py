"""A script of bpftrace to its tree: probes, their conditions and statements. Several errors are found in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpftrace import tree
from dprobes.bpftrace.expressionparser import Cursor, ExpressionParser
from dprobes.bpftrace.token import TokenStream
from dprobes.clike.cursor import ParseError
from dprobes.clike.token import TokenKind

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.diagnostics import Diagnostics
    from dprobes.source import SourceFile

__all__ = ["parse"]

_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
_JUMPS = ("return", "break", "continue")


def parse(source: SourceFile, text: str, diagnostics: Diagnostics) -> tree.Script:
    """Parse a script; ``text`` is that of ``source`` without comments and directives. Errors are reported."""
    return _ScriptParser(Cursor(TokenStream(source, text, diagnostics), diagnostics)).script()


class _ScriptParser:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._expressions = ExpressionParser(cursor)

    def script(self) -> tree.Script:
        cursor = self._cursor
        probes: list[tree.Probe] = []
        structures: list[str] = []
        while cursor.peek().kind is not TokenKind.END:
            try:
                if cursor.sees("struct", "union", "enum"):
                    first = cursor.peek()
                    definition = cursor.tokens.take_block()
                    if definition is None:
                        raise cursor.wrong("this definition does not end with '};'", cursor.tokens.span(first))
                    structures.append(definition.text)
                else:
                    probes.append(self._probe())
            except ParseError:
                self._skip_probe()
        return tree.Script(tuple(probes), tuple(structures))

    def _probe(self) -> tree.Probe:
        cursor = self._cursor
        first = cursor.peek()
        points = [self._point()]
        while cursor.accept(","):
            if cursor.sees("{", "/"):
                break
            points.append(self._point())
        condition = self._expressions.condition() if cursor.accept("/") else None
        body = self._block("of a probe")
        return tree.Probe(tuple(points), condition, body, cursor.span_from(first))

    def _point(self) -> tree.Point:
        cursor = self._cursor
        word = cursor.tokens.take_point()
        if word is None:
            raise cursor.wrong(f"expected a probe, found {cursor.peek().described}")
        cursor.last = word
        return tree.Point(tuple(word.text.replace('"', "").split(":")), cursor.tokens.span(word))

    def _block(self, what: str) -> tuple[tree.Statement, ...]:
        cursor = self._cursor
        with cursor:
            cursor.expect("{", f"at the beginning of the block {what}")
            found: list[tree.Statement] = []
            while not cursor.sees("}"):
                if cursor.peek().kind is TokenKind.END:
                    raise cursor.wrong(f"expected '}}' at the end of the block {what}, found the end of the script")
                if cursor.accept(";"):
                    continue
                try:
                    found.append(self._statement())
                except ParseError:
                    self._cursor.skip_statement()
            cursor.take()
            return tuple(found)

    def _statement(self) -> tree.Statement:
        cursor = self._cursor
        first = cursor.peek()
        found: tree.Statement
        if cursor.accept("if"):
            return self._if(first)
        if cursor.accept("while"):
            condition = self._in_brackets("of the loop")
            return tree.While(condition, self._block("of a loop"), cursor.span_from(first))
        if cursor.accept("unroll"):
            count = self._in_brackets("of 'unroll'")
            return tree.Unroll(count, self._block("of 'unroll'"), cursor.span_from(first))
        if cursor.sees("let") and cursor.peek(1).kind is TokenKind.VARIABLE:
            cursor.take()
            first = cursor.peek()
        if cursor.sees("for"):
            raise cursor.wrong("loops over maps have no like in DProbes C")
        if (jump := cursor.accept(*_JUMPS)) is not None:
            found = tree.Jump(jump.text, cursor.tokens.span(jump))
        else:
            found = self._expression_statement(first)
        if not cursor.sees("}"):
            cursor.expect(";", "behind a statement")
        return found

    def _if(self, first: Token) -> tree.If:
        cursor = self._cursor
        with cursor:
            condition = self._in_brackets("of 'if'")
            then = self._block("of 'if'")
            otherwise: tuple[tree.Statement, ...] = ()
            if cursor.accept("else"):
                second = cursor.peek()
                otherwise = (self._if(second),) if cursor.accept("if") else self._block("of 'else'")
            return tree.If(condition, then, otherwise, cursor.span_from(first))

    def _in_brackets(self, where: str) -> tree.Expression:
        self._cursor.expect("(", f"before the condition {where}")
        found = self._expressions.expression()
        self._cursor.expect(")", f"behind the condition {where}")
        return found

    def _expression_statement(self, first: Token) -> tree.Statement:
        cursor = self._cursor
        target = self._expressions.expression()
        operator = cursor.accept(*_ASSIGNMENTS)
        if operator is None:
            return tree.Do(target, cursor.span_from(first))
        if not isinstance(target, (tree.Variable, tree.Map)):
            raise cursor.wrong("only a variable or a map can be assigned to", target.span)
        value = self._expressions.expression()
        return tree.Assignment(target, operator.text[:-1], value, cursor.span_from(first))

    def _skip_probe(self) -> None:
        """Go on behind the block of a probe in error."""
        self._cursor.skip_statement()
        while self._cursor.sees("}"):
            self._cursor.take()
