"""What the parts that type expressions ask of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dprobes.dpc.syntax import tree
    from dprobes.dpc.typedtree.scope import Scope
    from dprobes.dpc.typedtree.typed import Argument, Kept, Place, Text, Value
    from dprobes.dpc.typers.operatortyper import OperatorTyper, TypingError
    from dprobes.dpc.typers.typetable import TypeTable
    from dprobes.dpc.types.ctype import CType
    from dprobes.source import Span

__all__ = ["ExpressionTyper", "PlaceTyper", "TextTyper"]


class TextTyper(Protocol):
    """Type what can only be printed, or be a key."""

    def text(self, expression: tree.Expression) -> Argument | None:
        """Return what can only be printed or be a key; None of a value."""

    def array_text(self, address: Value, count: int | None) -> Text:
        """Return the string in an array of ``count`` characters, or at an address."""


class ExpressionTyper(Protocol):
    """Type the expressions of a handler or function."""

    types: TypeTable
    operators: OperatorTyper

    def value(self, expression: tree.Expression) -> Value:
        """Return the value of an expression."""

    def constant(self, expression: tree.Expression) -> int | None:
        """Return the number of a constant expression; report one that is none."""

    def kept(self, access: tree.TableAccess) -> Kept | None:
        """Return the string or call stack that a table has under its keys; None if it keeps numbers."""

    def type_of(self, expression: tree.Expression) -> CType:
        """Return the type of an expression, before an array becomes the address of its first element."""

    def condition(self, expression: tree.Expression) -> Value:
        """Return a value that can be tested; of a string or a call stack in a table whether there is one."""

    def kept_once(self, value: Value) -> tuple[Value | None, Value]:
        """Return what is done before, and a value that may be used several times and is computed once."""

    def converted(self, value: Value, type_: CType, span: Span) -> Value:
        """Return a value as a type holds it, as an assignment converts it."""

    def wrong(self, span: Span, message: str, hint: str | None = None) -> TypingError:
        """Report an error and return what leaves what is being typed."""


class PlaceTyper(ExpressionTyper, Protocol):
    """Type places, too; ``scope`` has the names of the block."""

    scope: Scope

    def decayed(self, place: Place, span: Span) -> Value:
        """Return the value of a place; of an array the address of its first element."""
