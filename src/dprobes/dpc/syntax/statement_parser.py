"""Parser of types, declarations (C17 6.7) and statements, without function types and initialisers in braces."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from dprobes.c_tokens import ParseError, TokenKind
from dprobes.diagnostics import Note
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.syntax.expression_parser import ExpressionParser

if TYPE_CHECKING:
    from dprobes.c_tokens import Token
    from dprobes.dpc.syntax.expression_parser import Cursor
    from dprobes.source_text import Span

__all__ = ["BASIC_WORDS", "KEYWORDS", "NAMED_TYPES", "QUALIFIERS", "STORAGES", "TAGGED", "StatementParser"]

BASIC_WORDS = frozenset(
    {"void", "char", "short", "int", "long", "signed", "unsigned", "_Bool", "bool", "float", "double"}
)
_UNSUPPORTED = frozenset({"_Complex"})
QUALIFIERS = frozenset({"const", "volatile", "restrict"})
TAGGED = ("struct", "union", "enum")

NAMED_TYPES = {
    **{f"{sign}int{bits}_t": (bits // 8, not sign) for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **{f"{letter}{bits}": (bits // 8, letter == "s") for bits in (8, 16, 32, 64) for letter in "us"},
    **{f"__{letter}{bits}": (bits // 8, letter == "s") for bits in (8, 16, 32, 64) for letter in "us"},
    "size_t": (0, False), "ssize_t": (0, True), "uintptr_t": (0, False), "intptr_t": (0, True),
    "ptrdiff_t": (0, True), "off_t": (0, True), "pid_t": (4, True), "uid_t": (4, False), "gid_t": (4, False),
}  # fmt: skip
"""Types that need no declaration: size in bytes, 0 for a word, and whether they are signed."""

STORAGES = {
    "static": syntax_tree.Storage.STATIC,
    "global": syntax_tree.Storage.GLOBAL,
    "percpu": syntax_tree.Storage.PERCPU,
    "thread": syntax_tree.Storage.THREAD,
    "extern": syntax_tree.Storage.EXTERN,
    "typedef": syntax_tree.Storage.TYPEDEF,
}

_C_STORAGES = ("static", "extern", "typedef")
"""Storage words of C, allowed anywhere among the words of a type; the other storage words may also be names."""

_NO_NAMES = BASIC_WORDS | _UNSUPPORTED | QUALIFIERS | {*TAGGED, *_C_STORAGES}


class DeclarationParser:
    """A parser of types and declarations in DProbes C."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.expressions = ExpressionParser(cursor, self)

    def begins_type(self, distance: int = 0) -> bool:
        """Return whether a type begins at the token that is ``distance`` tokens after the next one."""
        token = self._cursor.peek(distance)
        if token.kind is not TokenKind.NAME:
            return False
        known = BASIC_WORDS | QUALIFIERS | _UNSUPPORTED
        if token.text in known or token.text in TAGGED or token.text in NAMED_TYPES:
            return True
        if token.text in self._cursor.typedefs:
            return True
        # A name with only stars between it and a parenthesis can only be a type of the module.
        stars = 0
        while self._cursor.sees("*", distance=distance + 1 + stars):
            stars += 1
        return stars > 0 and self._cursor.sees(")", distance=distance + 1 + stars)

    def has_storage(self) -> bool:
        """Return whether a declaration with a storage word comes next."""
        return self._cursor.sees(*STORAGES)

    def begins_declaration(self) -> bool:
        """Return whether a declaration comes next, by its first tokens."""
        if self.has_storage():
            return True
        if not self.begins_type():
            return self._cursor.peek().kind is TokenKind.NAME and self._is_name_of_type()
        return True

    def _is_name_of_type(self) -> bool:
        """Return whether an unknown name is a type: ``name name`` and ``name *name =|;`` are no useful expressions."""
        distance = 1
        while self._cursor.sees("*", distance=distance):
            distance += 1
        if self._cursor.peek(distance).kind is not TokenKind.NAME:
            return False
        return distance == 1 or self._cursor.sees("=", ";", ",", "[", distance=distance + 1)

    def type_name(self) -> syntax_tree.TypeName:
        """Parse a type without a name, as in casts."""
        first = self._cursor.peek()
        specifier = self.specifier()
        declarator = self._declarator(specifier, needs_name=False)
        if declarator.name:
            raise self._cursor.wrong(f"'{declarator.name}' is not expected in a type", declarator.span)
        return syntax_tree.TypeName(specifier, declarator, self._cursor.span_from(first))

    def parameter(self) -> syntax_tree.Parameter:
        """Parse a parameter: a name, or a type and a name."""
        cursor = self._cursor
        first = cursor.peek()
        if first.kind is TokenKind.NAME and cursor.sees(",", ")", distance=1) and not self.begins_type():
            return syntax_tree.Parameter(self._own_name(), None, cursor.tokens.span(first))
        specifier = self.specifier()
        declarator = self._declarator(specifier, needs_name=False)
        type_ = syntax_tree.TypeName(specifier, declarator, cursor.span_from(first))
        return syntax_tree.Parameter(declarator.name, type_, cursor.span_from(first))

    def _own_name(self) -> str:
        """Consume the name of a declaration. Report a name with scopes, because only the module has such names."""
        name = self._cursor.take()
        if "::" in name.text:
            message = f"'{name.text}' is a name of the module, and cannot be declared"
            raise self._cursor.wrong(message, self._cursor.tokens.span(name))
        return name.text

    def parameters(self) -> tuple[syntax_tree.Parameter, ...]:
        """Parse parameters up to the closing parenthesis. ``void`` alone means no parameters."""
        cursor = self._cursor
        if cursor.accept(")"):
            return ()
        if cursor.sees("void") and cursor.sees(")", distance=1):
            cursor.take()
            cursor.take()
            return ()
        found = cursor.listed(self.parameter)
        cursor.expect(")", "after the parameters")
        return tuple(found)

    def declaration(self) -> syntax_tree.Declaration:
        """Parse a declaration with its semicolon."""
        cursor = self._cursor
        first = cursor.peek()
        storages = [word] if (word := cursor.accept(*STORAGES)) is not None else []
        if storages and cursor.peek().kind is TokenKind.NAME and cursor.sees(";", "=", ",", distance=1):
            name = cursor.peek().text
            if not self.begins_type():
                hint = f"write {storages[0].text} long {name};"
                raise cursor.wrong(f"'{name}' is declared without a type", hint=hint)
        specifier = self.specifier(storages)
        if len(storages) > 1:
            words = " and ".join(f"'{token.text}'" for token in storages)
            raise cursor.wrong(f"{words} exclude each other", cursor.tokens.span(storages[1]))
        storage = STORAGES[storages[0].text] if storages else syntax_tree.Storage.AUTO
        is_typedef = storage is syntax_tree.Storage.TYPEDEF
        declarator = partial(self._declarator, specifier, needs_name=True, is_typedef=is_typedef)
        declarators = [] if cursor.sees(";") else cursor.listed(declarator)
        span = cursor.span_from(first)
        if not cursor.sees("}"):  # the last statement of a block needs no semicolon
            if cursor.sees(".", ":", "-"):
                hint = "a probe has no type or word before its place: MODULE:FUNCTION { … }"
                raise cursor.wrong(f"expected ';' after a declaration, found {cursor.peek().described}", hint=hint)
            cursor.expect(";", "after a declaration")
        return syntax_tree.Declaration(storage, specifier, tuple(declarators), span)

    def specifier(self, storages: list[Token] | None = None) -> syntax_tree.Specifier:
        """Parse the beginning of a declaration. A list ``storages`` collects storage words such as ``static``."""
        cursor = self._cursor
        while self._is_beside(storages):
            pass
        first = cursor.peek()
        words: list[str] = []
        while True:
            token = cursor.peek()
            if token.kind is not TokenKind.NAME:
                break
            if self._is_beside(storages):
                pass
            elif token.text in _UNSUPPORTED:
                raise cursor.wrong(f"there are no values of type '{token.text}' in DProbes C")
            elif token.text in TAGGED and not words:
                tagged = self._tagged()
                while self._is_beside(storages):
                    pass
                return tagged
            elif token.text in BASIC_WORDS or not words:
                words.append(cursor.take().text)
                if token.text not in BASIC_WORDS:
                    while self._is_beside(storages):
                        pass
                    break
            else:
                break
        if not words:
            raise cursor.wrong(f"expected a type, found {cursor.peek().described}")
        return syntax_tree.Specifier(tuple(words), cursor.span_from(first))

    def _is_beside(self, storages: list[Token] | None) -> bool:
        """Consume a qualifier or storage word among the words of a type; return whether there was one."""
        if self._cursor.accept(*QUALIFIERS):
            return True
        if storages is None or (token := self._cursor.accept(*_C_STORAGES)) is None:
            return False
        storages.append(token)
        return True

    def _tagged(self) -> syntax_tree.Specifier:
        cursor = self._cursor
        first = cursor.take()
        tag = cursor.take().text if cursor.peek().kind is TokenKind.NAME else ""
        members, enumerators = None, None
        if cursor.accept("{"):
            with cursor:
                if first.text == "enum":
                    enumerators = self._enumerators()
                else:
                    members = self._members()
        elif not tag:
            raise cursor.wrong(f"'{first.text}' needs a name or members, found {cursor.peek().described}")
        return syntax_tree.Specifier((), cursor.span_from(first), first.text, tag, members, enumerators)

    def _members(self) -> tuple[syntax_tree.Declaration, ...]:
        found = []
        while not self._cursor.accept("}"):
            found.append(self.declaration())
        return tuple(found)

    def _enumerators(self) -> tuple[syntax_tree.EnumeratorSyntax, ...]:
        cursor = self._cursor
        found = []
        while not cursor.accept("}"):
            name = cursor.expect_name("the name of an enumerator")
            value = self.expressions.constant() if cursor.accept("=") else None
            found.append(syntax_tree.EnumeratorSyntax(name.text, value, cursor.span_from(name)))
            if not cursor.sees("}"):
                cursor.expect(",", "between enumerators")
        return tuple(found)

    def _declarator(
        self, specifier: syntax_tree.Specifier, *, needs_name: bool, is_typedef: bool = False
    ) -> syntax_tree.Declarator:
        cursor = self._cursor
        first = cursor.peek()
        pointers = 0
        while True:
            if cursor.accept("*"):
                pointers += 1
                cursor.check_depth(pointers)
            elif not cursor.accept(*QUALIFIERS):
                break
        name = ""
        if cursor.peek().kind is TokenKind.NAME:
            if cursor.peek().text in _NO_NAMES:
                raise cursor.wrong(f"'{cursor.peek().text}' is not a name, and cannot be here")
            name = self._own_name()
        elif needs_name and not (cursor.sees(":") or specifier.members is not None):
            raise cursor.wrong(f"expected the name of what is declared, found {cursor.peek().described}")
        if name and is_typedef:
            cursor.typedefs.add(name)
        dimensions: list[syntax_tree.Expression | None] = []
        while cursor.accept("["):
            dimensions.append(None if cursor.sees("]") else self.expressions.constant())
            cursor.expect("]", "after the dimension of an array")
            cursor.check_depth(pointers + len(dimensions))
        bits = self.expressions.constant() if needs_name and cursor.accept(":") else None
        span = cursor.span_from(first) if name or pointers or dimensions else cursor.tokens.span(first)
        value = self.expressions.assignment() if needs_name and cursor.accept("=") else None
        return syntax_tree.Declarator(name, pointers, tuple(dimensions), span, bits, value)


class StatementParser:
    """A parser of statements and blocks in DProbes C."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.declarations = DeclarationParser(cursor)
        self.expressions = self.declarations.expressions
        self._closed: list[tuple[Token, Token]] = []
        """The braces of the parsed blocks, in the order of their ends."""

    def block(self) -> syntax_tree.Block:
        """Parse a block; report statements in error, and continue with the next one."""
        cursor = self._cursor
        first = cursor.expect("{", "at the start of a block")
        statements: list[syntax_tree.Statement] = []
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
        return syntax_tree.Block(tuple(statements), cursor.span_from(first))

    def _unclosed(self, first: Token) -> ParseError:
        """
        Report that the brace ``first`` is not closed, and return the ``ParseError`` to raise.

        The missing brace may be further inside: before a closing brace that is less indented than its block.
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

    def statement(self) -> syntax_tree.Statement | None:
        """Parse a statement, from the next token on; return None for an empty one, a semicolon alone."""
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
        if isinstance(expression, syntax_tree.Call) and cursor.sees("{"):
            function = expression.function
            from dprobes.dpc.tracer_words import call_hint

            hint = "write for (int i = 0; i < 3; i++) { … }" if function == "foreach" else call_hint(function)
            raise cursor.wrong(f"'{function}' begins no statement", expression.span, hint)
        if isinstance(expression, syntax_tree.Comma) and _has_table(expression):
            raise cursor.wrong("statements are not joined by ','", expression.span, "write ';' between them")
        statement = syntax_tree.ExpressionStatement(expression, cursor.span_from(first))
        self._end("a statement", expression)
        return statement

    def _end(self, what: str, statement: syntax_tree.Expression | None = None) -> None:
        """
        Consume the semicolon after a statement, which is optional for the last statement of a block.

        ``what`` is the name of the statement in the error. ``statement`` is the expression before the semicolon, for a
        hint about a construct of another language.
        """
        if not self._cursor.sees("}", ";"):
            message = f"expected ';' after {what}, found {self._cursor.peek().described}"
            raise self._cursor.wrong(message, hint=self._hint_behind(statement))
        self._cursor.accept(";")

    def _hint_behind(self, statement: syntax_tree.Expression | None) -> str | None:
        """Return a hint for the missing semicolon after an expression statement, or None if there is none."""
        cursor = self._cursor
        found = cursor.peek()
        rest = " ".join(re.split(r"[;}]", cursor.tokens.text[found.start :], maxsplit=1)[0].split())
        match statement:
            case syntax_tree.Name("then"):
                return "write no 'then': if (…) { … }"
            case syntax_tree.Name("print"):
                return f"write print({rest})" if found.kind is TokenKind.TABLE else f"write printf({rest})"
            case syntax_tree.Name("printf" | "clear" | "delete" as name):
                return f"write {name}({rest})"
            case syntax_tree.TableAccess(name, ()) if found.text in ("{", "("):
                inner = rest[1:].partition("}" if found.text == "{" else ")")[0]
                return f"write keys in square brackets: @{name}[{inner}]"
            case syntax_tree.TableAccess(name) if found.kind is TokenKind.NAME or found.text == ":":
                return f"write {statement.span.text} = {rest.removeprefix(':').strip()}"
        if cursor.sees("else"):
            return "a statement before 'else' ends in ';', or in braces"
        return f"write ';' before '{found.text}'" if found.kind in (TokenKind.NAME, TokenKind.TABLE) else None

    def condition(self, what: str) -> syntax_tree.Expression:
        """Parse a condition in parentheses after the keyword ``what``, such as ``if``."""
        cursor = self._cursor
        if not cursor.sees("("):
            brace = cursor.tokens.text.find("{", cursor.peek().start)
            written = cursor.tokens.written(cursor.peek().start, brace) if brace > cursor.peek().start else "…"
            negated = written.removeprefix("not ")
            written = written if negated == written else f"!({negated.strip('() ')})"
            message = f"expected '(' after '{what}', found {cursor.peek().described}"
            raise cursor.wrong(message, hint=f"write {what} ({written})")
        cursor.take()
        condition = self.expressions.expression()
        cursor.expect(")", f"after the condition of '{what}'")
        return condition

    def _body(self) -> syntax_tree.Statement:
        body = self.statement()
        return body if body is not None else syntax_tree.Block((), self._cursor.tokens.span(self._cursor.last))

    def _if(self) -> syntax_tree.Statement:
        first = self._cursor.take()
        condition = self.condition("if")
        then = self._body()
        otherwise = self._body() if self._cursor.accept("else") else None
        return syntax_tree.If(condition, then, otherwise, self._cursor.span_from(first))

    def _while(self) -> syntax_tree.Statement:
        first = self._cursor.take()
        condition = self.condition("while")
        body = self._body()
        return syntax_tree.While(condition, body, self._cursor.span_from(first))

    def _do(self) -> syntax_tree.Statement:
        first = self._cursor.take()
        body = self._body()
        self._cursor.expect("while", "after the body of 'do'")
        condition = self.condition("while")
        span = self._cursor.span_from(first)
        self._end("'do … while'")
        return syntax_tree.DoWhile(body, condition, span)

    def _for(self) -> syntax_tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        if not cursor.sees("("):
            message = f"expected '(' after 'for', found {cursor.peek().described}"
            raise cursor.wrong(message, hint="write for (int i = 0; i < 3; i++) { … }")
        cursor.take()
        start: syntax_tree.Declaration | syntax_tree.ExpressionStatement | None = None
        if self.declarations.begins_declaration():
            start = self.declarations.declaration()
        elif not cursor.accept(";"):
            value = self.expressions.expression()
            start = syntax_tree.ExpressionStatement(value, value.span)
            if cursor.sees(":") and isinstance(value, syntax_tree.Name) and not value.module:
                return self._for_each(first, value)
            if cursor.sees(":"):
                hint = "tables are printed as a whole: end { print(@name); }"
                raise cursor.wrong("there are no loops over the entries of a table", hint=hint)
            cursor.expect(";", "after the first part of 'for'")
        condition = None if cursor.sees(";") else self.expressions.expression()
        cursor.expect(";", "after the condition of 'for'")
        step = None if cursor.sees(")") else self.expressions.expression()
        cursor.expect(")", "after the three parts of 'for'")
        body = self._body()
        return syntax_tree.For(start, condition, step, body, cursor.span_from(first))

    def _for_each(self, first: Token, variable: syntax_tree.Name) -> syntax_tree.Statement:
        cursor = self._cursor
        cursor.take()
        items = self.expressions.expression()
        if isinstance(items, syntax_tree.TableAccess):
            hint = "tables are printed as a whole: end { print(@name); }"
            raise cursor.wrong("there are no loops over the entries of a table", hint=hint)
        cursor.expect(")", "after the items of 'for'")
        body = self._body()
        return syntax_tree.ForEach(variable.name, items, body, cursor.span_from(first))

    def _switch(self) -> syntax_tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        value = self.condition("switch")
        body = self.block()
        return syntax_tree.Switch(value, body, cursor.span_from(first))

    def _case(self) -> syntax_tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        value = self.expressions.constant() if first.text == "case" else None
        cursor.expect(":", f"after '{first.text}'")
        return syntax_tree.Case(value, cursor.span_from(first))

    def _jump(self) -> syntax_tree.Statement:
        word = self._cursor.take()
        self._end(f"'{word.text}'")
        span = self._cursor.tokens.span(word)
        return syntax_tree.Break(span) if word.text == "break" else syntax_tree.Continue(span)

    def _return(self) -> syntax_tree.Statement:
        first = self._cursor.take()
        value = None if self._cursor.sees(";", "}") else self.expressions.expression()
        span = self._cursor.span_from(first)
        self._end("'return'")
        return syntax_tree.Return(value, span)

    def _try(self) -> syntax_tree.Statement:
        cursor = self._cursor
        first = cursor.take()
        body = self.block()
        cursor.expect("catch", "after the block of 'try'")
        names: list[str] = []
        if cursor.accept("("):
            names.append(cursor.expect_name("a name for the exception's code").text)
            if cursor.accept(","):
                names.append(cursor.expect_name("a name for the address").text)
            cursor.expect(")", "after the names of 'catch'")
        handler = self.block()
        return syntax_tree.Try(body, tuple(names), handler, cursor.span_from(first))

    def _goto(self) -> syntax_tree.Statement:
        raise self._cursor.wrong("there is no 'goto' in DProbes C", hint="use a loop, 'break' and 'continue'")


KEYWORDS = {
    "if": StatementParser._if,  # noqa: SLF001 - its own
    "while": StatementParser._while,  # noqa: SLF001
    "do": StatementParser._do,  # noqa: SLF001
    "for": StatementParser._for,  # noqa: SLF001
    "switch": StatementParser._switch,  # noqa: SLF001
    "case": StatementParser._case,  # noqa: SLF001
    "default": StatementParser._case,  # noqa: SLF001
    "break": StatementParser._jump,  # noqa: SLF001
    "continue": StatementParser._jump,  # noqa: SLF001
    "return": StatementParser._return,  # noqa: SLF001
    "try": StatementParser._try,  # noqa: SLF001
    "goto": StatementParser._goto,  # noqa: SLF001
}


def _has_table(expression: syntax_tree.Expression) -> bool:
    """Return whether an operand of a comma expression changes a table."""
    match expression:
        case syntax_tree.Comma(left, right):
            return _has_table(left) or _has_table(right)
        case syntax_tree.Assignment(_, syntax_tree.TableAccess()) | syntax_tree.Increment(_, syntax_tree.TableAccess()):
            return True
    return False


def _indentation(span: Span) -> int:
    """Return the number of blanks at the beginning of a place's line."""
    line = span.file.line_text(span.line)
    return len(line) - len(line.lstrip())
