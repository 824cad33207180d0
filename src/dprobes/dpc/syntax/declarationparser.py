"""Types and declarations (C17 6.7), as far as probes need them: no functions' types, and no initialisers in braces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.clike.token import TokenKind
from dprobes.dpc.syntax import programtree, tree
from dprobes.dpc.syntax.expressionparser import ExpressionParser

if TYPE_CHECKING:
    from dprobes.clike.token import Token
    from dprobes.dpc.syntax.cursor import Cursor

__all__ = ["BASIC_WORDS", "NAMED_TYPES", "QUALIFIERS", "STORAGES", "TAGGED", "DeclarationParser"]

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
"""Types that are known without a declaration: size in bytes, 0 for a word, and whether they are signed."""

STORAGES = {
    "static": tree.Storage.STATIC,
    "global": tree.Storage.GLOBAL,
    "percpu": tree.Storage.PERCPU,
    "thread": tree.Storage.THREAD,
    "extern": tree.Storage.EXTERN,
    "typedef": tree.Storage.TYPEDEF,
}


_C_STORAGES = ("static", "extern", "typedef")
"""Those of C, which stand anywhere among the words of a type; the others are names as well."""

_NO_NAMES = BASIC_WORDS | _UNSUPPORTED | QUALIFIERS | {*TAGGED, *_C_STORAGES}


class DeclarationParser:
    """Parse types and declarations."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.expressions = ExpressionParser(cursor, self)

    def begins_type(self, distance: int = 0) -> bool:
        """Return whether the next token, or one behind it, begins a type."""
        token = self._cursor.peek(distance)
        if token.kind is not TokenKind.NAME:
            return False
        known = BASIC_WORDS | QUALIFIERS | _UNSUPPORTED
        if token.text in known or token.text in TAGGED or token.text in NAMED_TYPES:
            return True
        if token.text in self._cursor.typedefs:
            return True
        # A name that only stars follow up to a parenthesis can be nothing but a type of the module's.
        stars = 0
        while self._cursor.sees("*", distance=distance + 1 + stars):
            stars += 1
        return stars > 0 and self._cursor.sees(")", distance=distance + 1 + stars)

    def has_storage(self) -> bool:
        """Return whether a declaration comes next that says where its variables are."""
        return self._cursor.sees(*STORAGES)

    def begins_declaration(self) -> bool:
        """Return whether a declaration comes next."""
        if self.has_storage():
            return True
        if not self.begins_type():
            return self._cursor.peek().kind is TokenKind.NAME and self._is_name_of_type()
        return True

    def _is_name_of_type(self) -> bool:
        """Return whether an unknown name is a type: ``name name`` and ``name *name =|;`` are no expressions in use."""
        distance = 1
        while self._cursor.sees("*", distance=distance):
            distance += 1
        if self._cursor.peek(distance).kind is not TokenKind.NAME:
            return False
        return distance == 1 or self._cursor.sees("=", ";", ",", "[", distance=distance + 1)

    def type_name(self) -> tree.TypeName:
        """Parse a type without a name, as in casts."""
        first = self._cursor.peek()
        specifier = self.specifier()
        declarator = self._declarator(specifier, needs_name=False)
        if declarator.name:
            raise self._cursor.wrong(f"'{declarator.name}' is not expected in a type", declarator.span)
        return tree.TypeName(specifier, declarator, self._cursor.span_from(first))

    def parameter(self) -> programtree.Parameter:
        """Parse a parameter: a name, or a type and a name."""
        cursor = self._cursor
        first = cursor.peek()
        if first.kind is TokenKind.NAME and cursor.sees(",", ")", distance=1) and not self.begins_type():
            return programtree.Parameter(self._own_name(), None, cursor.tokens.span(first))
        specifier = self.specifier()
        declarator = self._declarator(specifier, needs_name=False)
        type_ = tree.TypeName(specifier, declarator, cursor.span_from(first))
        return programtree.Parameter(declarator.name, type_, cursor.span_from(first))

    def _own_name(self) -> str:
        """Take a name that is declared, which has no scopes: those are of the module."""
        name = self._cursor.take()
        if "::" in name.text:
            message = f"'{name.text}' is a name of the module, and cannot be declared"
            raise self._cursor.wrong(message, self._cursor.tokens.span(name))
        return name.text

    def parameters(self) -> tuple[programtree.Parameter, ...]:
        """Parse parameters up to the closing parenthesis; ``void`` alone is none."""
        cursor = self._cursor
        if cursor.accept(")"):
            return ()
        if cursor.sees("void") and cursor.sees(")", distance=1):
            cursor.take()
            cursor.take()
            return ()
        found = [self.parameter()]
        while cursor.accept(","):
            found.append(self.parameter())
        cursor.expect(")", "behind the parameters")
        return tuple(found)

    def declaration(self) -> tree.Declaration:
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
        storage = STORAGES[storages[0].text] if storages else tree.Storage.AUTO
        declarators: list[tree.Declarator] = []
        if not cursor.sees(";"):
            while True:
                declarators.append(
                    self._declarator(specifier, needs_name=True, is_typedef=storage is tree.Storage.TYPEDEF)
                )
                if not cursor.accept(","):
                    break
        span = cursor.span_from(first)
        if not cursor.sees("}"):  # as behind the last statement of a block
            if cursor.sees(".", ":", "-"):
                hint = "a probe has no type or word before its place: MODULE:FUNCTION { … }"
                raise cursor.wrong(f"expected ';' behind a declaration, found {cursor.peek().described}", hint=hint)
            cursor.expect(";", "behind a declaration")
        return tree.Declaration(storage, specifier, tuple(declarators), span)

    def specifier(self, storages: list[Token] | None = None) -> tree.Specifier:
        """Parse what a declaration begins with; ``static`` and its like may be among it if they are collected."""
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
        return tree.Specifier(tuple(words), cursor.span_from(first))

    def _is_beside(self, storages: list[Token] | None) -> bool:
        """Take a word that may stand among those of a type, if one comes next."""
        if self._cursor.accept(*QUALIFIERS):
            return True
        if storages is None or (token := self._cursor.accept(*_C_STORAGES)) is None:
            return False
        storages.append(token)
        return True

    def _tagged(self) -> tree.Specifier:
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
        return tree.Specifier((), cursor.span_from(first), first.text, tag, members, enumerators)

    def _members(self) -> tuple[tree.Declaration, ...]:
        found = []
        while not self._cursor.accept("}"):
            found.append(self.declaration())
        return tuple(found)

    def _enumerators(self) -> tuple[tree.EnumeratorSyntax, ...]:
        cursor = self._cursor
        found = []
        while not cursor.accept("}"):
            name = cursor.expect_name("the name of an enumerator")
            value = self.expressions.constant() if cursor.accept("=") else None
            found.append(tree.EnumeratorSyntax(name.text, value, cursor.span_from(name)))
            if not cursor.sees("}"):
                cursor.expect(",", "between enumerators")
        return tuple(found)

    def _declarator(self, specifier: tree.Specifier, *, needs_name: bool, is_typedef: bool = False) -> tree.Declarator:
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
                raise cursor.wrong(f"'{cursor.peek().text}' is no name, and cannot stand here")
            name = self._own_name()
        elif needs_name and not (cursor.sees(":") or specifier.members is not None):
            raise cursor.wrong(f"expected the name of what is declared, found {cursor.peek().described}")
        if name and is_typedef:
            cursor.typedefs.add(name)
        dimensions: list[tree.Expression | None] = []
        while cursor.accept("["):
            dimensions.append(None if cursor.sees("]") else self.expressions.constant())
            cursor.expect("]", "behind the dimension of an array")
            cursor.check_depth(pointers + len(dimensions))
        bits = self.expressions.constant() if needs_name and cursor.accept(":") else None
        span = cursor.span_from(first) if name or pointers or dimensions else cursor.tokens.span(first)
        value = self.expressions.assignment() if needs_name and cursor.accept("=") else None
        return tree.Declarator(name, pointers, tuple(dimensions), span, bits, value)
