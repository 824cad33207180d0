"""Statements (C17 6.8), without ``goto``, and with ``try``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dprobes.clike.cursor import ParseError
from dprobes.clike.token import TokenKind
from dprobes.diagnostics import Note
from dprobes.dpc.syntax import tree
from dprobes.dpc.syntax.declarationparser import DeclarationParser

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.dpc.syntax.cursor import Cursor
    from dprobes.source import Span

__all__ = ["KEYWORDS", "StatementParser"]


class StatementParser:
    """Parse statements and blocks."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.declarations = DeclarationParser(cursor)
        self.expressions = self.declarations.expressions
        self._closed: list[tuple[Token, Token]] = []
        """The braces of the blocks that were parsed, in the order of their ends."""

    def block(self) -> tree.Block:
        """Parse a block; what is wrong in a statement is reported, and the others are parsed."""
        cursor = self._cursor
        first = cursor.expect("{", "at the start of a block")
        statements: list[tree.Statement] = []
        with cursor:
            while not cursor.sees("}"):
                if cursor.peek().kind is TokenKind.END:
                    raise self._unclosed(first)
                try:
                    statement = self.statement()
                except ParseError:
                    cursor.skip_statement()
                    continue
                if statement is not None:
                    statements.append(statement)
        self._closed.append((first, cursor.take()))
        return tree.Block(tuple(statements), cursor.span_from(first))

    def _unclosed(self, first: Token) -> ParseError:
        """
        Report a brace that nothing closes, and return what leaves its block.

        What was forgotten may be a brace further inside: that before a brace which is less indented than its block.
        """
        cursor = self._cursor
        span = cursor.tokens.span(first)
        notes: tuple[Note, ...] = ()
        for opening, closing in self._closed:
            begin, end = cursor.tokens.span(opening), cursor.tokens.span(closing)
            if opening.start > first.start and _indentation(end) < _indentation(begin):
                notes = (Note(f"this one closes the '{{' of line {begin.line}, which is further to the right", end),)
                break
        cursor.diagnostics.error(span, f"the '{{' of line {span.line} is never closed", notes=notes)
        return ParseError()

    def statement(self) -> tree.Statement | None:
        """Parse a statement; None of an empty one."""
        cursor = self._cursor
        if cursor.accept(";"):
            return None
        if cursor.sees("{"):
            return self.block()
        first = cursor.peek()
        if first.kind is TokenKind.NAME and (parse := KEYWORDS.get(first.text)) is not None:
            with cursor:
                return parse(self)
        if self.declarations.begins_declaration():
            return self.declarations.declaration()
        expression = self.expressions.expression()
        if isinstance(expression, tree.Call) and cursor.sees("{"):
            function = expression.function
            from dprobes.dpc.tracerwords import call_hint

            hint = "write for (int i = 0; i < 3; i++) { … }" if function == "foreach" else call_hint(function)
            raise cursor.wrong(f"'{function}' begins no statement", expression.span, hint)
        if isinstance(expression, tree.Comma) and _has_table(expression):
            raise cursor.wrong("statements are not joined by ','", expression.span, "write ';' between them")
        statement = tree.ExpressionStatement(expression, cursor.span_from(first))
        self._end("a statement", expression)
        return statement

    def _end(self, what: str, statement: tree.Expression | None = None) -> None:
        """Take the semicolon at the end; the last one of a block may be missing."""
        if not self._cursor.sees("}", ";"):
            message = f"expected ';' behind {what}, found {self._cursor.peek().described}"
            raise self._cursor.wrong(message, hint=self._hint_behind(statement))
        self._cursor.accept(";")

    def _hint_behind(self, statement: tree.Expression | None) -> str | None:
        """Return how a statement is written behind which no semicolon stands."""
        cursor = self._cursor
        found = cursor.peek()
        rest = " ".join(re.split(r"[;}]", cursor.tokens.text[found.start :], maxsplit=1)[0].split())
        match statement:
            case tree.Name("then"):
                return "write no 'then': if (…) { … }"
            case tree.Name("print"):
                return f"write print({rest})" if found.kind is TokenKind.TABLE else f"write printf({rest})"
            case tree.Name("printf" | "clear" | "delete" as name):
                return f"write {name}({rest})"
            case tree.TableAccess(name, ()) if found.text in ("{", "("):
                inner = rest[1:].partition("}" if found.text == "{" else ")")[0]
                return f"keys stand in square brackets: @{name}[{inner}]"
            case tree.TableAccess(name) if found.kind is TokenKind.NAME or found.text == ":":
                return f"write {statement.span.text} = {rest.removeprefix(':').strip()}"
        if cursor.sees("else"):
            return "a statement before 'else' ends in ';', or in braces"
        return f"write ';' before '{found.text}'" if found.kind in (TokenKind.NAME, TokenKind.TABLE) else None

    def condition(self, what: str) -> tree.Expression:
        """Parse a condition in brackets, behind a word."""
        cursor = self._cursor
        if not cursor.sees("("):
            brace = cursor.tokens.text.find("{", cursor.peek().start)
            written = cursor.tokens.written(cursor.peek().start, brace) if brace > cursor.peek().start else "…"
            negated = written.removeprefix("not ")
            written = written if negated == written else f"!({negated.strip('() ')})"
            message = f"expected '(' behind '{what}', found {cursor.peek().described}"
            raise cursor.wrong(message, hint=f"write {what} ({written})")
        cursor.take()
        condition = self.expressions.expression()
        cursor.expect(")", f"behind the condition of '{what}'")
        return condition

    def _body(self) -> tree.Statement:
        body = self.statement()
        return body if body is not None else tree.Block((), self._cursor.tokens.span(self._cursor.last))

    def _if(self) -> tree.Statement:
        first = self._cursor.take()
        condition = self.condition("if")
        then = self._body()
        otherwise = self._body() if self._cursor.accept("else") else None
        return tree.If(condition, then, otherwise, self._cursor.span_from(first))

    def _while(self) -> tree.Statement:
        first = self._cursor.take()
        condition = self.condition("while")
        body = self._body()
        return tree.While(condition, body, self._cursor.span_from(first))

    def _do(self) -> tree.Statement:
        first = self._cursor.take()
        body = self._body()
        self._cursor.expect("while", "behind the body of 'do'")
        condition = self.condition("while")
        span = self._cursor.span_from(first)
        self._end("'do … while'")
        return tree.DoWhile(body, condition, span)

    def _for(self) -> tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        if not cursor.sees("("):
            message = f"expected '(' behind 'for', found {cursor.peek().described}"
            raise cursor.wrong(message, hint="write for (int i = 0; i < 3; i++) { … }")
        cursor.take()
        start: tree.Declaration | tree.ExpressionStatement | None = None
        if self.declarations.begins_declaration():
            start = self.declarations.declaration()
        elif not cursor.accept(";"):
            value = self.expressions.expression()
            start = tree.ExpressionStatement(value, value.span)
            if cursor.sees(":"):
                hint = "tables are printed as a whole: end { print(@name); }"
                raise cursor.wrong("there are no loops over the entries of a table", hint=hint)
            cursor.expect(";", "behind the first part of 'for'")
        condition = None if cursor.sees(";") else self.expressions.expression()
        cursor.expect(";", "behind the condition of 'for'")
        step = None if cursor.sees(")") else self.expressions.expression()
        cursor.expect(")", "behind the three parts of 'for'")
        body = self._body()
        return tree.For(start, condition, step, body, cursor.span_from(first))

    def _switch(self) -> tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        value = self.condition("switch")
        body = self.block()
        return tree.Switch(value, body, cursor.span_from(first))

    def _case(self) -> tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        value = self.expressions.constant() if first.text == "case" else None
        cursor.expect(":", f"behind '{first.text}'")
        return tree.Case(value, cursor.span_from(first))

    def _break(self) -> tree.Statement:
        span = self._cursor.tokens.span(self._cursor.take())
        self._end("'break'")
        return tree.Break(span)

    def _continue(self) -> tree.Statement:
        span = self._cursor.tokens.span(self._cursor.take())
        self._end("'continue'")
        return tree.Continue(span)

    def _return(self) -> tree.Statement:
        first = self._cursor.take()
        value = None if self._cursor.sees(";", "}") else self.expressions.expression()
        span = self._cursor.span_from(first)
        self._end("'return'")
        return tree.Return(value, span)

    def _try(self) -> tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        body = self.block()
        cursor.expect("catch", "behind the block of 'try'")
        names: list[str] = []
        if cursor.accept("("):
            names.append(cursor.expect_name("a name for the exception's code").text)
            if cursor.accept(","):
                names.append(cursor.expect_name("a name for the address").text)
            cursor.expect(")", "behind the names of 'catch'")
        handler = self.block()
        return tree.Try(body, tuple(names), handler, cursor.span_from(first))

    def _goto(self) -> tree.Statement:
        raise self._cursor.wrong("there is no 'goto' in DProbes C", hint="use a loop, 'break' and 'continue'")


KEYWORDS = {
    "if": StatementParser._if,  # noqa: SLF001 - its own
    "while": StatementParser._while,  # noqa: SLF001
    "do": StatementParser._do,  # noqa: SLF001
    "for": StatementParser._for,  # noqa: SLF001
    "switch": StatementParser._switch,  # noqa: SLF001
    "case": StatementParser._case,  # noqa: SLF001
    "default": StatementParser._case,  # noqa: SLF001
    "break": StatementParser._break,  # noqa: SLF001
    "continue": StatementParser._continue,  # noqa: SLF001
    "return": StatementParser._return,  # noqa: SLF001
    "try": StatementParser._try,  # noqa: SLF001
    "goto": StatementParser._goto,  # noqa: SLF001
}


def _has_table(expression: tree.Expression) -> bool:
    """Return whether a part of an expression with commas changes a table."""
    match expression:
        case tree.Comma(left, right):
            return _has_table(left) or _has_table(right)
        case tree.Assignment(_, tree.TableAccess()) | tree.Increment(_, tree.TableAccess()):
            return True
    return False


def _indentation(span: Span) -> int:
    """Return how many blanks the line begins with where a place is."""
    line = span.file.line_text(span.line)
    return len(line) - len(line.lstrip())
