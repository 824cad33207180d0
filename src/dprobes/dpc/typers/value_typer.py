"""Typing of expressions: meaning of names, conversions of C, and errors (C17 6.5)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, assert_never

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.modules.probed_modules import KERNEL, KERNEL_MODULE
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import ItemName, ProgramVariable, Scope, Surroundings
from dprobes.dpc.typedtree.process_items import FIELDS, numbers_of
from dprobes.dpc.typedtree.value_properties import folded, steady
from dprobes.dpc.typers.call_typer import CallTyper
from dprobes.dpc.typers.name_typer import NameTyper
from dprobes.dpc.typers.operator_typer import OperatorTyper, TypingError
from dprobes.dpc.typers.provided_names import CALL_FORMS, KINDS, PROVIDED
from dprobes.dpc.typers.table_typer import TableTyper
from dprobes.dpc.typers.type_table import UnknownTypeError
from dprobes.dpc.types.c_types import (
    INT,
    UNSIGNED,
    UNSIGNED_CHAR,
    Array,
    Enumeration,
    Floating,
    Integer,
    Pointer,
    Record,
    Void,
    is_scalar,
)
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.typedtree.name_scope import FunctionSignature, TypeListener
    from dprobes.dpc.typedtree.typed_values import Place, Value
    from dprobes.dpc.typers.table_typer import Tables
    from dprobes.dpc.typers.type_table import TypeTable
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["TypingError", "ValueTyper"]


_CPU_OFFSETS, _CPU_COUNT, _ONLINE = "__per_cpu_offset", "nr_cpu_ids", "__cpu_online_mask"
"""Symbols of the kernel: each CPU's offset to its per-CPU variables, the CPUs, and a bit for each that is online."""

_NOWHERE = 1 << 63
"""Address that neither a program nor the kernel can have; no processor accepts it."""


class ValueTyper:
    """A typer of expressions in the context ``where``; ``tell`` receives the type of each expression."""

    def __init__(
        self,
        types: TypeTable,
        functions: Mapping[str, FunctionSignature],
        scope: Scope,
        diagnostics: Diagnostics,
        tables: Tables,
        where: Surroundings,
        tell: TypeListener | None = None,
    ) -> None:
        self._tell = tell
        self.types = types
        self.scope = scope
        self._functions = functions
        self.calls = CallTyper(self, functions, where)
        self.tables = TableTyper(self, self.calls, tables, is_tool=where.is_tool)
        self._diagnostics = diagnostics
        self.operators = OperatorTyper(types, diagnostics)
        self.names = NameTyper(self, functions, where)
        self._where = where
        self.slots = 0
        """The number of cells of the variables on the RPN stack."""

    def wrong(self, span: Span, message: str, hint: str | None = None) -> TypingError:
        """Report an error at ``span`` with an optional hint, and return a ``TypingError``, which the caller raises."""
        return self.operators.wrong(span, message, hint)

    def converted(self, value: Value, type_: CType, span: Span) -> Value:
        """Return a value converted to a type, as by an assignment."""
        return self.operators.converted(value, type_, span)

    # Values

    def value(self, expression: syntax_tree.Expression) -> Value:
        """Return the value of an expression; for an array, the address of its first element."""
        try:
            value = folded(self._value(expression))
        except TargetError as error:  # from the description of the module
            raise self.wrong(expression.span, error.message, error.hint) from None
        if self._tell is not None:
            self._tell(expression.span, value.type)
        return self.operators.in_cells(value)

    def kept(self, access: syntax_tree.TableAccess) -> typed_values.Kept | None:
        """Return the string or call stack that ``@table[keys]`` denotes, or None if the table has numbers as values."""
        return self.tables.kept(access)

    def condition(self, expression: syntax_tree.Expression) -> Value:
        """
        Return the value of a condition, a number or a pointer; raise ``TypingError`` for other values.

        For ``@table[key]`` of a table of strings or call stacks, it is 1 if the table has a value for the key,
        otherwise 0.
        """
        if isinstance(expression, syntax_tree.TableAccess) and (kept := self.kept(expression)) is not None:
            return typed_values.Not(typed_values.KeptTest(kept, "", is_prefix=False, type=INT), INT)
        value = self.value(expression)
        if not is_scalar(value.type):
            raise self.wrong(expression.span, f"a condition is a number or a pointer, not '{value.type}'")
        return value

    def constant(self, expression: syntax_tree.Expression) -> int | None:
        """Return the number of a constant expression; report any other expression, and return None."""
        try:
            value = self.value(expression)
        except (TypingError, UnknownTypeError):
            return None
        if isinstance(value, typed_values.Constant):
            return value.value
        self._diagnostics.error(expression.span, "this is not a constant")
        return None

    def _value(self, expression: syntax_tree.Expression) -> Value:
        match expression:
            case syntax_tree.Number():
                return self.operators.number(expression)
            case syntax_tree.StringLiteral():
                hint = "strings are compared with str(p), and printed by printf"
                raise self.wrong(expression.span, "a string is not a value", hint)
            case syntax_tree.Name():
                return self.names.value(expression)
            case syntax_tree.Unary("&", operand):
                return self._address(operand, expression.span)
            case syntax_tree.Unary("!", operand):
                return typed_values.Not(self.condition(operand), INT)
            case syntax_tree.Unary("*"):
                return self.decayed(self._place_of_memory(expression), expression.span)
            case syntax_tree.Unary(operator, operand):
                return self.operators.unary(operator, self.value(operand), operand.span)
            case syntax_tree.MemberAccess(syntax_tree.Name("args"), field) if self._where.is_traced:
                return self.names.field(field)
            case syntax_tree.MemberAccess(_, field) if (item := self._item(expression)) is not None:
                return self._field_of_item(item, field, expression)
            case syntax_tree.MemberAccess() if (part := self.names.part(expression)) is not None:
                return self.names.whole(part, expression.span)
            case syntax_tree.Index() | syntax_tree.MemberAccess():
                return self.decayed(self.place(expression), expression.span)
            case syntax_tree.Increment():
                return self._step(expression)
            case syntax_tree.Binary("&&", left, right):
                return typed_values.Both(self.condition(left), self.condition(right), INT)
            case syntax_tree.Binary("||", left, right):
                return typed_values.Either(self.condition(left), self.condition(right), INT)
            case syntax_tree.Binary("==" | "!=" as operator) if (test := self.calls.text_test(expression)) is not None:
                return test if operator == "==" else typed_values.Not(test, INT)
            case syntax_tree.Binary(operator, left, right, span):
                return self.operators.binary(operator, self.value(left), self.value(right), span)
            case syntax_tree.Conditional(condition, yes, no):
                return self.operators.choice(
                    self.condition(condition), self.value(yes), self.value(no), expression.span
                )
            case syntax_tree.Assignment():
                return self._assignment(expression)
            case syntax_tree.Comma(left, right):
                left_value, right_value = self.value(left), self.value(right)
                return typed_values.Sequence(left_value, right_value, right_value.type)
            case syntax_tree.Cast(name, operand):
                type_ = self._type(name)
                if self._tell is not None:  # even if its operand has errors
                    self._tell(expression.span, type_)
                return self.operators.cast(type_, self.value(operand), expression.span)
            case syntax_tree.SizeOf():
                return self._sizeof(expression)
            case syntax_tree.Call("per_cpu"):
                return self.decayed(self.place(expression), expression.span)
            case syntax_tree.Call():
                return self.calls.call(expression)
            case syntax_tree.TableAccess():
                return self.tables.value(expression)
        assert_never(expression)

    def _is_traced_field(self, expression: syntax_tree.Expression) -> bool:
        """Return whether an expression is a field of a tracepoint, ``args.name``."""
        match expression:
            case syntax_tree.MemberAccess(syntax_tree.Name("args")):
                return self._where.is_traced
        return False

    def _type(self, name: syntax_tree.TypeName) -> CType:
        try:
            return self.types.of(name)
        except UnknownTypeError:
            raise TypingError from None

    def decayed(self, place: Place, span: Span) -> Value:
        """Return the value of a place; for an array, the address of its first element."""
        if isinstance(place, typed_values.Memory):
            if isinstance(place.type, Array):
                return folded(typed_values.Convert(place.address, self.types.pointer_to(place.type.element)))
            if isinstance(place.type, Record):
                raise self.wrong(span, f"a whole '{place.type}' is not a value: use its members")
            if isinstance(place.type, Void):
                raise self.wrong(span, "what a 'void *' points to has no type: convert the pointer first")
            if isinstance(place.type, Floating):
                hint = "its bytes can be logged: mem(&x, sizeof x)"
                raise self.wrong(span, place.type.why_no_number, hint)
        return place

    # Places

    def place(self, expression: syntax_tree.Expression) -> Place:
        """Return the place that an expression denotes; raise ``TypingError`` if it denotes none."""
        try:
            place = self._place(expression)
        except TargetError as error:
            raise self.wrong(expression.span, error.message, error.hint) from None
        if self._tell is not None:
            self._tell(expression.span, place.type)
        return place

    def _place(self, expression: syntax_tree.Expression) -> Place:
        match expression:
            case syntax_tree.MemberAccess() if self._item(expression) is not None:
                raise self.wrong(expression.span, "a field of a loop's item is not changed, and has no address")
            case syntax_tree.Unary("*") | syntax_tree.Index() | syntax_tree.MemberAccess():
                return self._place_of_memory(expression)
            case syntax_tree.Name():
                if (memory := self.names.memory(expression)) is not None:
                    return memory
                value = self.names.value(expression)
            case syntax_tree.Call("reg"):
                value = self.calls.call(expression)
            case syntax_tree.Call("per_cpu"):
                return self._copy_of_cpu(expression)
            case _:
                raise self.wrong(expression.span, "this has no place that could be changed")
        if isinstance(value, typed_values.Convert):
            value = value.operand
        if isinstance(value, typed_values.Register | typed_values.Local | typed_values.Variable):
            return value
        raise self.wrong(expression.span, "this cannot be changed")

    def _place_of_memory(self, expression: syntax_tree.Expression) -> Place:
        match expression:
            case syntax_tree.Unary("*", operand):
                pointer = self.value(operand)
                return typed_values.Memory(pointer, self._target(pointer, operand.span))
            case syntax_tree.Index(base, index):
                return self._element(base, index)
            case syntax_tree.MemberAccess(base, name, is_arrow):
                return self._member(base, name, expression.span, is_arrow=is_arrow)
        return self.place(expression)

    def _target(self, pointer: Value, span: Span) -> CType:
        if not isinstance(pointer.type, Pointer):
            hint = "convert it first: *(int *)p" if isinstance(pointer.type, Integer) else None
            raise self.wrong(span, f"'{pointer.type}' is not a pointer", hint)
        return pointer.type.target

    def _element(self, base: syntax_tree.Expression, index: syntax_tree.Expression) -> Place:
        number = self.value(index)
        if not isinstance(number.type, Integer | Enumeration):
            raise self.wrong(index.span, f"an index is a number, not '{number.type}'")
        if isinstance(base, syntax_tree.Name) and isinstance(array := self.scope.find(base.name), ProgramVariable):
            if not array.is_array:
                raise self.wrong(base.span, f"'{base.name}' is not an array")
            return self._cell(array, number, index.span)
        pointer = self.value(base)
        target = self._target(pointer, base.span)
        return typed_values.Memory(self.operators.moved(pointer, number, target, base.span), target)

    def _cell(self, array: ProgramVariable, index: Value, span: Span) -> Place:
        if isinstance(index, typed_values.Constant):
            if not 0 <= index.value < array.count:
                raise self.wrong(span, f"index {index.value} is outside of the array's {array.count} elements")
            return typed_values.Variable(
                array.kind, array.first + index.value * self.operators.width(array.type), array.type
            )
        return typed_values.Variable(array.kind, array.first, array.type, self.converted(index, self.types.word, span))

    def _item(self, access: syntax_tree.MemberAccess) -> ItemName | None:
        """Return the item of a loop whose field an expression is; None for other members."""
        found = self.scope.find(access.base.name) if isinstance(access.base, syntax_tree.Name) else None
        return found if isinstance(found, ItemName) else None

    def _field_of_item(self, item: ItemName, field: str, access: syntax_tree.MemberAccess) -> Value:
        """Return a field of a loop's item that is a number."""
        fields = FIELDS[item.kind]
        form = fields.get(field)
        if form is None or access.is_arrow:
            raise self.wrong(
                access.span,
                f"an item of '{item.kind.value}' has no field '{'->' if access.is_arrow else ''}{field}'",
                f"it has {', '.join(f'{access.base.span.text}.{name}' for name in fields)}",
            )
        if not isinstance(form, Integer):
            hint = "print it, compare it with a text in quotes, or use it as a key"
            raise self.wrong(access.span, f"'{access.span.text}' is a string", hint)
        return typed_values.Local(item.slot + numbers_of(item.kind).index(field), form)

    def _copy_of_cpu(self, call: syntax_tree.Call) -> typed_values.Memory:
        """
        Return a CPU's copy of a per-CPU variable of the kernel, ``per_cpu(VARIABLE, CPU)``.

        Its address is that of the copy for this CPU, moved by the difference of the two CPUs' offsets. If the CPU is
        not online, it is an address that can never be read.
        """
        match call.arguments:
            case [syntax_tree.Name() as name, number]:
                pass
            case _:
                hint = "write per_cpu(VARIABLE, CPU), where VARIABLE is the name of a per-CPU variable of the kernel"
                raise self.wrong(call.span, "'per_cpu' takes the name of a variable and the number of a CPU", hint)
        if self._where.is_tool or not (self._where.is_traced or self._where.module in ("", KERNEL)):
            raise self.wrong(
                call.span, "'per_cpu' reads the kernel, and this is no hit in the kernel", "probe 'kernel:FUNCTION'"
            )
        if (memory := self.names.memory(name)) is None:
            raise self.wrong(name.span, f"'{name.name}' is not a variable of the kernel")
        value = self.value(number)
        if not isinstance(value.type, Integer | Enumeration):
            raise self.wrong(number.span, f"'per_cpu' takes the CPU as a number, not as '{value.type}'")
        first, cpu = self.kept_once(self.converted(value, self.types.word, number.span))
        word = self.types.word

        def plus(left: Value, right: Value, sign: str = "+") -> Value:
            return folded(typed_values.Arithmetic(sign, left, right, word))

        def constant(number: int) -> Value:
            return typed_values.Constant(number, word)

        def offset_of(number: Value) -> Value:
            table = self.names.symbol(_CPU_OFFSETS)
            return typed_values.Memory(plus(table, plus(number, constant(3), "<<")), word)

        this = typed_values.Convert(typed_values.System("procid", INT), word)
        here = typed_values.Convert(memory.address, word)
        there = plus(plus(here, offset_of(this), "-"), offset_of(cpu))
        count = typed_values.Convert(typed_values.Memory(self.names.symbol(_CPU_COUNT), UNSIGNED), word)
        byte = typed_values.Memory(plus(self.names.symbol(_ONLINE), plus(cpu, constant(3), ">>")), UNSIGNED_CHAR)
        bit = plus(plus(typed_values.Convert(byte, word), plus(cpu, constant(7), "&"), ">>"), constant(1), "&")
        online = typed_values.Both(typed_values.Comparison("<", cpu, count, is_signed=False, type=INT), bit, INT)
        address: Value = typed_values.Choice(online, there, constant(_NOWHERE), word)
        if first is not None:
            address = typed_values.Sequence(first, address, word)
        return typed_values.Memory(typed_values.Convert(address, self.types.pointer_to(memory.type)), memory.type)

    def _lack_of_types(self) -> str | None:
        """Return the message that the kernel has no types, if that explains an unknown type, else None."""
        kernel = self._where.kernel
        with suppress(TargetError):  # the error is reported where a type is named
            if kernel is not None and kernel.types is None:
                return "this kernel does not describe its types (CONFIG_DEBUG_INFO_BTF)"
        return None

    def _member(self, base: syntax_tree.Expression, name: str, span: Span, *, is_arrow: bool) -> Place:
        address: Value
        if is_arrow:
            pointer = self.value(base)
            if not isinstance(pointer.type, Pointer):
                message = f"'->' needs a pointer to a structure, not '{pointer.type}'"
                raise self.wrong(base.span, message, self._lack_of_types())
            record, address = pointer.type.target, pointer
        else:
            self._check_members(self.type_of(base), base.span)
            place = self.place(base)
            assert isinstance(place, typed_values.Memory)
            record, address = place.type, place.address
        self._check_members(record, base.span)
        assert isinstance(record, Record)
        if record.members is None:
            lack, advice = self._lack_of_types(), f"define them: {record} {{ … }};"
            hint = advice if lack is None else f"{lack}; {advice}"
            raise self.wrong(base.span, f"the members of '{record}' are not known", hint)
        if (member := record.member(name)) is None:
            raise self.wrong(span, f"'{record}' has no member '{name}'", did_you_mean(name, record.member_names()))
        moved = self._offset(address, member.offset)
        if member.bits is None:
            return typed_values.Memory(moved, member.type)
        unit = typed_values.Memory(moved, member.unit or member.type)
        return typed_values.BitField(unit, member.bits, member.shift, member.type)

    def _check_members(self, type_: CType, span: Span) -> None:
        if not isinstance(type_, Record):
            hint = "write '->'" if isinstance(type_, Pointer) and isinstance(type_.target, Record) else None
            raise self.wrong(span, f"'{type_}' has no members", hint)

    def _offset(self, address: Value, offset: int) -> Value:
        word = self.types.word
        cast = folded(typed_values.Convert(address, word))
        return folded(typed_values.Arithmetic("+", cast, typed_values.Constant(offset, word), word))

    def _writable(self, expression: syntax_tree.Expression) -> Place:
        place = self.place(expression)
        if isinstance(place, typed_values.Register | typed_values.Memory | typed_values.BitField):
            self.check_write(expression.span)
            if isinstance(place, typed_values.Register) and place.at_entry:
                raise self.wrong(expression.span, "an argument cannot be changed after the function has returned")
        if not is_scalar(place.type):
            raise self.wrong(expression.span, f"'{place.type}' cannot be assigned to")
        return place

    def check_write(self, span: Span) -> None:
        """Report a change of the target, and raise ``TypingError``, unless it is allowed."""
        if not self._where.allow_write:
            raise self.wrong(span, "this changes the target, which is not allowed", "allow it with --allow-write")

    def _address(self, operand: syntax_tree.Expression, span: Span) -> Value:
        if isinstance(operand, syntax_tree.Name) and self.scope.find(operand.name) is None:
            plain = operand.name.removeprefix("::")
            if plain == operand.name and operand.name in PROVIDED:
                raise self.wrong(span, f"'{operand.name}' has no address")
            if (memory := self.names.memory_of_module(operand)) is not None:
                return folded(typed_values.Convert(memory.address, self.types.pointer_to(memory.type)))
            return typed_values.Convert(self.names.symbol(plain), self.types.pointer_to(Void()))
        place = self.place(operand)
        if not isinstance(place, typed_values.Memory):
            raise self.wrong(span, "only what is in the target's memory has an address")
        return folded(typed_values.Convert(place.address, self.types.pointer_to(place.type)))

    # Assignments, sizes

    def _assignment(self, expression: syntax_tree.Assignment) -> Value:
        called = expression.value.function if isinstance(expression.value, syntax_tree.Call) else ""
        if called in KINDS and called not in self._functions:
            hint = f"write @{expression.target.span.text.lstrip('$')} = {CALL_FORMS[called]}"
            raise self.wrong(expression.span, f"'{called}' is a value of tables", hint)
        if isinstance(expression.target, syntax_tree.Name):
            self.names.check_assigned(expression.target)
        target, value = self._writable(expression.target), self.value(expression.value)
        first: Value | None = None
        if expression.operator:
            first, target = steady(target, self._kept)
            value = self.operators.binary(expression.operator, self.operators.in_cells(target), value, expression.span)
        converted = self.converted(value, target.type, expression.value.span)
        return _behind(first, typed_values.Assign(target, converted, target.type))

    def _step(self, expression: syntax_tree.Increment) -> Value:
        amount, operand, is_postfix = expression.amount, expression.operand, expression.is_postfix
        first, target = steady(self._writable(operand), self._kept)
        stride = self.operators.stride(target.type, operand.span)
        if isinstance(target, typed_values.BitField) and self.operators.is_wide_field(target):
            return _behind(first, self._step_of_bits(target, amount, operand.span, is_postfix=is_postfix))
        return _behind(first, typed_values.Step(target, amount * stride, is_postfix, target.type))

    def _step_of_bits(self, target: typed_values.BitField, amount: int, span: Span, *, is_postfix: bool) -> Value:
        """Return ``++`` or ``--`` of a bit field that takes two cells."""
        value = self.operators.in_cells(target)
        before = self._kept(value)
        after = self.operators.binary("+", before, typed_values.Constant(amount, INT), span)
        stored = typed_values.Assign(target, self.converted(after, target.type, span), target.type)
        result = typed_values.Sequence(stored, before, target.type) if is_postfix else stored
        return typed_values.Sequence(typed_values.Assign(before, value, value.type), result, target.type)

    def kept_once(self, value: Value) -> tuple[Value | None, Value]:
        """
        Return (first, again) for a value that is needed twice. ``first`` must be computed once, unless it is None.

        ``again`` has no side effects: it is a constant, or the variable to which ``first`` assigns the value.
        """
        if isinstance(value, typed_values.Constant | typed_values.Local):
            return None, value
        kept = self._kept(value)
        return typed_values.Assign(kept, value, kept.type), kept

    def _kept(self, value: Value) -> typed_values.Local:
        """Return a new variable of the handler or function, without a name, that has room for a value."""
        first = self.slots
        self.slots += self.operators.width(value.type)
        return typed_values.Local(first, value.type)

    def _sizeof(self, expression: syntax_tree.SizeOf) -> Value:
        operand = expression.operand
        if isinstance(operand, syntax_tree.TypeName):
            type_ = self._type(operand)
        else:
            named = self._type_named(operand) if isinstance(operand, syntax_tree.Name) else None
            type_ = self.type_of(operand) if named is None else named
        if not expression.member:
            return typed_values.Constant(self.operators.size(type_, expression.span), self.types.word)
        offset = 0
        for name in expression.member:
            if not isinstance(type_, Record) or (member := type_.member(name)) is None:
                raise self.wrong(expression.span, f"'{type_}' has no member '{name}'")
            if member.bits is not None:
                raise self.wrong(expression.span, f"the bit field '{name}' has no offset in bytes")
            offset, type_ = offset + member.offset, member.type
        return typed_values.Constant(offset, self.types.word)

    def _type_named(self, name: syntax_tree.Name) -> CType | None:
        """Return the type of this name in debug information, or None if the name has another meaning or none."""
        if self.scope.find(name.name) is not None or name.name in PROVIDED:
            return None
        try:
            return self.types.named_in_module(name.name, name.span)
        except UnknownTypeError:
            raise TypingError from None

    @property
    def may_return_errors(self) -> bool:
        """True if -1 may be an error number: in the kernel, and if the module is not known."""
        module = self._where.module
        return self._where.is_traced or not module or module == KERNEL or module.startswith(KERNEL_MODULE)

    def type_of(self, expression: syntax_tree.Expression) -> CType:
        """Return the type of an expression, array types included."""
        if isinstance(expression, syntax_tree.Unary) and expression.operator == "*":
            return self._place_of_memory(expression).type
        if isinstance(expression, syntax_tree.MemberAccess) and (part := self.names.part(expression)) is not None:
            return part.type
        if isinstance(expression, syntax_tree.MemberAccess) and self._is_traced_field(expression):
            return self.names.type_of_field(expression.name) or self.types.long
        if isinstance(expression, syntax_tree.MemberAccess) and self._item(expression) is not None:
            return self.value(expression).type
        if isinstance(expression, syntax_tree.Index | syntax_tree.MemberAccess) or _is_copy_of_cpu(expression):
            return self.place(expression).type
        if isinstance(expression, syntax_tree.Name) and (type_ := self.names.type_of(expression)) is not None:
            return type_
        return self.value(expression).type


def _is_copy_of_cpu(expression: syntax_tree.Expression) -> bool:
    return isinstance(expression, syntax_tree.Call) and expression.function == "per_cpu"


def _behind(first: Value | None, value: Value) -> Value:
    """Return the expression ``first, value``, or ``value`` itself if ``first`` is None."""
    return value if first is None else typed_values.Sequence(first, value, value.type)
