"""
Operators and conversions with types (C17 6.3, 6.5), applied to typed values.

The results do not depend on names or on the probepoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.value_properties import folded, integer_of
from dprobes.dpc.types.c_types import (
    INT,
    LONG_LONG,
    UNSIGNED,
    UNSIGNED_LONG_LONG,
    Enumeration,
    Integer,
    Pointer,
    Void,
    common_type,
    is_scalar,
    promoted,
    size_of,
)

if TYPE_CHECKING:
    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.syntax import syntax_tree
    from dprobes.dpc.typedtree.name_scope import Scope
    from dprobes.dpc.typedtree.typed_values import Argument, Kept, Place, Text, Value
    from dprobes.dpc.typers.type_table import TypeTable
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["ExpressionTyper", "OperatorTyper", "PlaceTyper", "TextTyper", "TypingError"]

_COMPARISONS = ("==", "!=", "<", ">", "<=", ">=")


class TypingError(Exception):
    """Raised for an expression or statement without a valid type, after the error has been added to the diagnostics."""


class OperatorTyper:
    """A typer of operators: each method takes typed operands and returns the typed result, after C's conversions."""

    def __init__(self, types: TypeTable, diagnostics: Diagnostics) -> None:
        self._types = types
        self._diagnostics = diagnostics

    def wrong(self, span: Span, message: str, hint: str | None = None) -> TypingError:
        """Report an error at ``span`` with an optional hint, and return a ``TypingError``, which the caller raises."""
        self._diagnostics.error(span, message, hint=hint)
        return TypingError()

    def converted(self, value: Value, type_: CType, span: Span) -> Value:
        """Return a value converted to a type, as by an assignment; raise ``TypingError`` if that is impossible."""
        source = value.type
        if source == type_:
            return value
        if not is_scalar(source) or not is_scalar(type_):
            raise self.wrong(span, f"'{source}' cannot be converted to '{type_}'")
        return folded(typed_values.Convert(value, type_))

    def number(self, number: syntax_tree.Number) -> typed_values.Constant:
        """Return a constant with the first type that can represent it (C17 6.4.4.1, 5)."""
        long, word = self._types.long, self._types.word
        if number.suffix == "char":
            return typed_values.Constant(number.value, INT)
        candidates: list[Integer] = [INT, UNSIGNED, long, word, LONG_LONG, UNSIGNED_LONG_LONG]
        if "u" in number.suffix:
            candidates = [each for each in candidates if not each.is_signed]
        elif number.is_decimal:
            candidates = [each for each in candidates if each.is_signed] + [UNSIGNED_LONG_LONG]
        lowest = {0: 0, 1: long.rank, 2: LONG_LONG.rank}[number.suffix.count("l")]
        type_ = next(each for each in candidates if each.rank >= lowest and each.holds(number.value))
        return typed_values.Constant(number.value, type_)

    def warn(self, span: Span, message: str, hint: str | None = None) -> None:
        """Report a warning once, even if the expression is typed several times."""
        if not any(each.span == span and each.message == message for each in self._diagnostics):
            self._diagnostics.warning(span, message, hint=hint)

    def unary(self, operator: str, value: Value, span: Span) -> Value:
        """
        Return the typed value of ``-x``, ``+x`` or ``~x``.

        Raise ``TypingError`` for an operand without arithmetic.
        """
        if not isinstance(value.type, Integer | Enumeration):
            raise self.wrong(span, f"'{operator}' needs a number, not '{value.type}'")
        type_ = promoted(value.type)
        value = folded(typed_values.Convert(value, type_))
        return value if operator == "+" else folded(typed_values.Negation(value, type_, is_complement=operator == "~"))

    def binary(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        """Return ``left operator right``, for all operators except the logical ones."""
        if operator in _COMPARISONS:
            return folded(self._comparison(operator, left, right, span))
        if operator in ("+", "-") and (isinstance(left.type, Pointer) or isinstance(right.type, Pointer)):
            return self._pointer_arithmetic(operator, left, right, span)
        for value in (left, right):
            if not isinstance(value.type, Integer | Enumeration):
                raise self.wrong(span, f"'{operator}' needs numbers, not '{value.type}'")
        assert isinstance(left.type, Integer | Enumeration)
        assert isinstance(right.type, Integer | Enumeration)
        if operator in ("<<", ">>"):
            type_ = promoted(left.type)
            count = folded(typed_values.Convert(right, promoted(right.type)))
            return folded(typed_values.Arithmetic(operator, folded(typed_values.Convert(left, type_)), count, type_))
        type_ = common_type(left.type, right.type)
        a, b = folded(typed_values.Convert(left, type_)), folded(typed_values.Convert(right, type_))
        if operator in ("/", "%") and isinstance(b, typed_values.Constant) and not b.value:
            self.warn(span, "this divides by zero, which is an exception each time")
        return folded(typed_values.Arithmetic(operator, a, b, type_))

    def _pointer_arithmetic(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        if isinstance(left.type, Pointer) and isinstance(right.type, Pointer):
            if operator == "+":
                raise self.wrong(span, "two pointers cannot be added")
            long = self._types.long
            size = typed_values.Constant(self.size(left.type.target, span), long)
            end, start = folded(typed_values.Convert(left, long)), folded(typed_values.Convert(right, long))
            distance = folded(typed_values.Arithmetic("-", end, start, long))
            return folded(typed_values.Arithmetic("/", distance, size, long))
        if isinstance(right.type, Pointer):
            if operator == "-":
                raise self.wrong(span, "a pointer cannot be subtracted from a number")
            left, right = right, left
        assert isinstance(left.type, Pointer)
        if not isinstance(right.type, Integer | Enumeration):
            raise self.wrong(span, f"'{right.type}' cannot be added to a pointer")
        moved = self.moved(left, right, left.type.target, span, back=operator == "-")
        return folded(typed_values.Convert(moved, left.type))

    def _comparison(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        if not is_scalar(left.type) or not is_scalar(right.type):
            raise self.wrong(span, f"'{left.type}' and '{right.type}' cannot be compared")
        if isinstance(left.type, Pointer) or isinstance(right.type, Pointer):
            type_: Integer = self._types.word
        else:
            assert isinstance(left.type, Integer | Enumeration)
            assert isinstance(right.type, Integer | Enumeration)
            type_ = common_type(left.type, right.type)
        a, b = folded(typed_values.Convert(left, type_)), folded(typed_values.Convert(right, type_))
        match operator:
            case "==" | "<":
                return typed_values.Comparison(operator, a, b, type_.is_signed, INT)
            case "!=":
                return typed_values.Not(folded(typed_values.Comparison("==", a, b, type_.is_signed, INT)), INT)
            case ">":
                return typed_values.Comparison("<", b, a, type_.is_signed, INT)
            case "<=":
                return typed_values.Not(folded(typed_values.Comparison("<", b, a, type_.is_signed, INT)), INT)
        return typed_values.Not(folded(typed_values.Comparison("<", a, b, type_.is_signed, INT)), INT)

    def choice(self, condition: Value, yes: Value, no: Value, span: Span) -> Value:
        """Return the typed value of ``condition ? yes : no``, after C's conversions of ``yes`` and ``no``."""
        if isinstance(yes.type, Integer | Enumeration) and isinstance(no.type, Integer | Enumeration):
            type_: CType = common_type(yes.type, no.type)
        elif isinstance(yes.type, Pointer):
            type_ = yes.type
        else:
            type_ = no.type
        return typed_values.Choice(condition, self.converted(yes, type_, span), self.converted(no, type_, span), type_)

    def cast(self, type_: CType, value: Value, span: Span) -> Value:
        """Return the typed value of ``(type)value``; raise ``TypingError`` if that is impossible."""
        if isinstance(type_, Void):
            return typed_values.Convert(value, type_)
        if not is_scalar(type_):
            raise self.wrong(span, f"nothing can be converted to '{type_}'")
        return typed_values.Convert(value, type_)

    def in_cells(self, value: Value) -> Value:
        """
        Return a value with which operators can calculate. Only bit fields change.

        In 32-bit programs, a bit field of 64 bits or in a 64-bit unit becomes a load and shifts.
        """
        if not isinstance(value, typed_values.BitField) or not self.is_wide_field(value):
            return value
        integer = integer_of(value.type)
        assert integer is not None
        wide = LONG_LONG if integer.is_signed else UNSIGNED_LONG_LONG
        unit = typed_values.Convert(value.unit, wide)
        above = typed_values.Constant(wide.bits - value.bits - value.shift, INT)
        top = typed_values.Arithmetic("<<", unit, above, wide)
        low = typed_values.Arithmetic(">>", top, typed_values.Constant(wide.bits - value.bits, INT), wide)
        return folded(typed_values.Convert(low, value.type))

    def is_wide_field(self, field: typed_values.BitField) -> bool:
        """Return whether a bit field or its unit takes two cells."""
        return self.is_wide(field.type) or self.is_wide(field.unit.type)

    def is_wide(self, type_: CType) -> bool:
        """Return whether values of a type take two cells: 64 bits in programs with 32-bit words."""
        return isinstance(type_, Integer | Enumeration) and (size_of(type_) or 0) > self._types.word_size

    def width(self, type_: CType) -> int:
        """Return the number of RPN stack cells of a value of this type: 2 for 64 bits in 32-bit programs, else 1."""
        return 2 if self.is_wide(type_) else 1

    def argument(self, number: int, type_: CType, *, at_entry: bool, is_certain: bool) -> Value:
        """
        Return the function argument that begins in the argument word ``number``, from 0.

        In 32-bit programs a 64-bit argument takes two words. With ``at_entry``, at the return of the function, it is
        the value from the entry of the call. ``is_certain`` means that the probe's condition guarantees that the entry
        was seen.
        """
        low, high = (typed_values.Register(f"arg{number + n}", self._types.word, at_entry, is_certain) for n in (0, 1))
        if not self.is_wide(type_):
            return folded(typed_values.Convert(low, type_))
        wide = UNSIGNED_LONG_LONG
        above = typed_values.Arithmetic("<<", typed_values.Convert(high, wide), typed_values.Constant(32, INT), wide)
        return folded(
            typed_values.Convert(typed_values.Arithmetic("|", typed_values.Convert(low, wide), above, wide), type_)
        )

    def moved(self, pointer: Value, count: Value, target: CType, span: Span, *, back: bool = False) -> Value:
        """
        Return ``pointer + count`` as a word or, with ``back``, ``pointer - count``.

        ``count`` is in elements of ``target``.
        """
        word = self._types.word
        size = typed_values.Constant(self.size(target, span), word)
        distance = folded(typed_values.Arithmetic("*", folded(typed_values.Convert(count, word)), size, word))
        return folded(
            typed_values.Arithmetic("-" if back else "+", folded(typed_values.Convert(pointer, word)), distance, word)
        )

    def size(self, type_: CType, span: Span) -> int:
        """Return the size of a type in bytes; the size of ``void`` is 1, as in gcc."""
        if isinstance(type_, Void):
            return 1
        size = size_of(type_)
        if size is None:
            raise self.wrong(span, f"the size of '{type_}' is not known")
        return size

    def stride(self, type_: CType, span: Span) -> int:
        """Return the number that ``++`` adds: the size of the target for a pointer, else 1."""
        if isinstance(type_, Pointer):
            return self.size(type_.target, span)
        if not isinstance(type_, Integer | Enumeration):
            raise self.wrong(span, f"'{type_}' cannot be counted up or down")
        return 1


class TextTyper(Protocol):
    """A typer of expressions that can only be printed or be a key field."""

    def text(self, expression: syntax_tree.Expression) -> Argument | None:
        """Return an argument that can only be printed or be a key field; None for an expression with a value."""

    def array_text(self, address: Value, count: int | None) -> Text:
        """Return the string at an address: at most ``count`` characters of an array, or, for None, up to the limit."""


class ExpressionTyper(Protocol):
    """A typer of the expressions of a handler or function."""

    types: TypeTable
    operators: OperatorTyper
    scope: Scope

    def value(self, expression: syntax_tree.Expression) -> Value:
        """Return the typed value of an expression; raise ``TypingError`` for errors, which are reported."""

    def constant(self, expression: syntax_tree.Expression) -> int | None:
        """Return the number of a constant expression; report any other expression, and return None."""

    def kept(self, access: syntax_tree.TableAccess) -> Kept | None:
        """Return the string or call stack that ``@table[keys]`` denotes, or None if the table has numbers as values."""

    def type_of(self, expression: syntax_tree.Expression) -> CType:
        """Return the type of an expression, before an array becomes the address of its first element."""

    def condition(self, expression: syntax_tree.Expression) -> Value:
        """
        Return the value of a condition, a number or a pointer; raise ``TypingError`` for other values.

        For ``@table[key]`` of a table of strings or call stacks, it is 1 if the table has a value for the key,
        otherwise 0.
        """

    def kept_once(self, value: Value) -> tuple[Value | None, Value]:
        """
        Return (first, again) for a value that is needed twice. ``first`` must be computed once, unless it is None.

        ``again`` has no side effects: it is a constant, or the variable to which ``first`` assigns the value.
        """

    def converted(self, value: Value, type_: CType, span: Span) -> Value:
        """Return a value converted to a type, as by an assignment."""

    def wrong(self, span: Span, message: str, hint: str | None = None) -> TypingError:
        """Report an error at ``span`` with an optional hint, and return a ``TypingError``, which the caller raises."""


class PlaceTyper(ExpressionTyper, Protocol):
    """A typer of expressions and places; ``scope`` has the names of the block."""

    scope: Scope

    def decayed(self, place: Place, span: Span) -> Value:
        """Return the value of a place; for an array, the address of its first element."""
