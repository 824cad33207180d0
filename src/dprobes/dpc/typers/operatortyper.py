"""
Operators and conversions with types (C17 6.3, 6.5): what they make of values that have some already.

Nothing here knows names, or where in a program it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded, integer_of
from dprobes.dpc.types.ctype import (
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
    from dprobes.dpc.syntax import tree
    from dprobes.dpc.typedtree.typed import Value
    from dprobes.dpc.typers.typetable import TypeTable
    from dprobes.dpc.types.ctype import CType
    from dprobes.source import Span

__all__ = ["OperatorTyper", "TypingError"]

_COMPARISONS = ("==", "!=", "<", ">", "<=", ">=")


class TypingError(Exception):
    """Leave what is being typed; the error has been reported."""


class OperatorTyper:
    """Type operators; ``types`` knows the sizes of the target's words."""

    def __init__(self, types: TypeTable, diagnostics: Diagnostics) -> None:
        self._types = types
        self._diagnostics = diagnostics

    def wrong(self, span: Span, message: str, hint: str | None = None) -> TypingError:
        """Report an error and return what leaves what is being typed."""
        self._diagnostics.error(span, message, hint=hint)
        return TypingError()

    def converted(self, value: Value, type_: CType, span: Span) -> Value:
        """Return a value as a type holds it, as an assignment converts it."""
        source = value.type
        if source == type_:
            return value
        if not is_scalar(source) or not is_scalar(type_):
            raise self.wrong(span, f"'{source}' cannot be converted to '{type_}'")
        return folded(typed.Convert(value, type_))

    def number(self, number: tree.Number) -> typed.Constant:
        """Return a constant with the first type that holds it (C17 6.4.4.1, 5)."""
        long, word = self._types.long, self._types.word
        if number.suffix == "char":
            return typed.Constant(number.value, INT)
        candidates: list[Integer] = [INT, UNSIGNED, long, word, LONG_LONG, UNSIGNED_LONG_LONG]
        if "u" in number.suffix:
            candidates = [each for each in candidates if not each.is_signed]
        elif number.is_decimal:
            candidates = [each for each in candidates if each.is_signed] + [UNSIGNED_LONG_LONG]
        lowest = {0: 0, 1: long.rank, 2: LONG_LONG.rank}[number.suffix.count("l")]
        type_ = next(each for each in candidates if each.rank >= lowest and each.holds(number.value))
        return typed.Constant(number.value, type_)

    def warn(self, span: Span, message: str, hint: str | None = None) -> None:
        """Report a warning once, however often the expression is typed."""
        if not any(each.span == span and each.message == message for each in self._diagnostics):
            self._diagnostics.warning(span, message, hint=hint)

    def unary(self, operator: str, value: Value, span: Span) -> Value:
        """Return ``-x``, ``+x`` or ``~x``."""
        if not isinstance(value.type, Integer | Enumeration):
            raise self.wrong(span, f"'{operator}' needs a number, not '{value.type}'")
        type_ = promoted(value.type)
        value = folded(typed.Convert(value, type_))
        return value if operator == "+" else folded(typed.Negation(value, type_, is_complement=operator == "~"))

    def binary(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        """Return ``left operator right``, but for the logical operators."""
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
            count = folded(typed.Convert(right, promoted(right.type)))
            return folded(typed.Arithmetic(operator, folded(typed.Convert(left, type_)), count, type_))
        type_ = common_type(left.type, right.type)
        a, b = folded(typed.Convert(left, type_)), folded(typed.Convert(right, type_))
        if operator in ("/", "%") and isinstance(b, typed.Constant) and not b.value:
            self.warn(span, "this divides by zero, which is an exception each time")
        return folded(typed.Arithmetic(operator, a, b, type_))

    def _pointer_arithmetic(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        if isinstance(left.type, Pointer) and isinstance(right.type, Pointer):
            if operator == "+":
                raise self.wrong(span, "two pointers cannot be added")
            long = self._types.long
            size = typed.Constant(self.size(left.type.target, span), long)
            end, start = folded(typed.Convert(left, long)), folded(typed.Convert(right, long))
            distance = folded(typed.Arithmetic("-", end, start, long))
            return folded(typed.Arithmetic("/", distance, size, long))
        if isinstance(right.type, Pointer):
            if operator == "-":
                raise self.wrong(span, "a pointer cannot be subtracted from a number")
            left, right = right, left
        assert isinstance(left.type, Pointer)
        if not isinstance(right.type, Integer | Enumeration):
            raise self.wrong(span, f"'{right.type}' cannot be added to a pointer")
        moved = self.moved(left, right, left.type.target, span, back=operator == "-")
        return folded(typed.Convert(moved, left.type))

    def _comparison(self, operator: str, left: Value, right: Value, span: Span) -> Value:
        if not is_scalar(left.type) or not is_scalar(right.type):
            raise self.wrong(span, f"'{left.type}' and '{right.type}' cannot be compared")
        if isinstance(left.type, Pointer) or isinstance(right.type, Pointer):
            type_: Integer = self._types.word
        else:
            assert isinstance(left.type, Integer | Enumeration)
            assert isinstance(right.type, Integer | Enumeration)
            type_ = common_type(left.type, right.type)
        a, b = folded(typed.Convert(left, type_)), folded(typed.Convert(right, type_))
        match operator:
            case "==" | "<":
                return typed.Comparison(operator, a, b, type_.is_signed, INT)
            case "!=":
                return typed.Not(folded(typed.Comparison("==", a, b, type_.is_signed, INT)), INT)
            case ">":
                return typed.Comparison("<", b, a, type_.is_signed, INT)
            case "<=":
                return typed.Not(folded(typed.Comparison("<", b, a, type_.is_signed, INT)), INT)
        return typed.Not(folded(typed.Comparison("<", a, b, type_.is_signed, INT)), INT)

    def choice(self, condition: Value, yes: Value, no: Value, span: Span) -> Value:
        """Return ``condition ? yes : no``."""
        if isinstance(yes.type, Integer | Enumeration) and isinstance(no.type, Integer | Enumeration):
            type_: CType = common_type(yes.type, no.type)
        elif isinstance(yes.type, Pointer):
            type_ = yes.type
        else:
            type_ = no.type
        return typed.Choice(condition, self.converted(yes, type_, span), self.converted(no, type_, span), type_)

    def cast(self, type_: CType, value: Value, span: Span) -> Value:
        """Return ``(type)value``."""
        if isinstance(type_, Void):
            return typed.Convert(value, type_)
        if not is_scalar(type_):
            raise self.wrong(span, f"nothing can be converted to '{type_}'")
        return typed.Convert(value, type_)

    def in_cells(self, value: Value) -> Value:
        """Return a value that can be computed with: a bit field that is, or lies in, two words as its shifts."""
        if not isinstance(value, typed.BitField) or not self.is_wide_field(value):
            return value
        integer = integer_of(value.type)
        assert integer is not None
        wide = LONG_LONG if integer.is_signed else UNSIGNED_LONG_LONG
        unit = typed.Convert(value.unit, wide)
        above = typed.Constant(wide.bits - value.bits - value.shift, INT)
        top = typed.Arithmetic("<<", unit, above, wide)
        low = typed.Arithmetic(">>", top, typed.Constant(wide.bits - value.bits, INT), wide)
        return folded(typed.Convert(low, value.type))

    def is_wide_field(self, field: typed.BitField) -> bool:
        """Return whether a bit field takes two cells, or its unit does."""
        return self.is_wide(field.type) or self.is_wide(field.unit.type)

    def is_wide(self, type_: CType) -> bool:
        """Return whether values of a type take two cells: 64 bits in programs with words of 32."""
        return isinstance(type_, Integer | Enumeration) and (size_of(type_) or 0) > self._types.word_size

    def width(self, type_: CType) -> int:
        """Return how many cells a value of a type takes."""
        return 2 if self.is_wide(type_) else 1

    def argument(self, number: int, type_: CType, *, at_entry: bool, is_certain: bool) -> Value:
        """Return the argument that begins with the word of a number."""
        low, high = (typed.Register(f"arg{number + n}", self._types.word, at_entry, is_certain) for n in (0, 1))
        if not self.is_wide(type_):
            return folded(typed.Convert(low, type_))
        wide = UNSIGNED_LONG_LONG
        above = typed.Arithmetic("<<", typed.Convert(high, wide), typed.Constant(32, INT), wide)
        return folded(typed.Convert(typed.Arithmetic("|", typed.Convert(low, wide), above, wide), type_))

    def moved(self, pointer: Value, count: Value, target: CType, span: Span, *, back: bool = False) -> Value:
        """Return an address so many elements on, as a word."""
        word = self._types.word
        size = typed.Constant(self.size(target, span), word)
        distance = folded(typed.Arithmetic("*", folded(typed.Convert(count, word)), size, word))
        return folded(typed.Arithmetic("-" if back else "+", folded(typed.Convert(pointer, word)), distance, word))

    def size(self, type_: CType, span: Span) -> int:
        """Return the size of a type in bytes; that of ``void`` is 1, as gcc has it."""
        if isinstance(type_, Void):
            return 1
        size = size_of(type_)
        if size is None:
            raise self.wrong(span, f"the size of '{type_}' is not known")
        return size

    def stride(self, type_: CType, span: Span) -> int:
        """Return how much ``++`` adds."""
        if isinstance(type_, Pointer):
            return self.size(type_.target, span)
        if not isinstance(type_, Integer | Enumeration):
            raise self.wrong(span, f"'{type_}' cannot be counted up or down")
        return 1
