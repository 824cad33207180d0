"""
Values as RPN: each leaves one cell, which holds its number exactly, or of which only the low bits count.

What does not look at high bits (``+ - * << & | ^ ~``) is computed on whole cells, and cut to its type where somebody
looks: a comparison, a division, a shift to the right, a conversion to a larger type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.emitters.arithmeticemitter import OPERATIONS, emit_arithmetic, mask_width
from dprobes.dpc.emitters.placeemitter import PlaceEmitter
from dprobes.dpc.emitters.registeremitter import push_register
from dprobes.dpc.emitters.symboloperand import symbol_operand
from dprobes.dpc.emitters.tableemitter import TableEmitter
from dprobes.dpc.emitters.wideemitter import WideEmitter
from dprobes.dpc.emitters.writer import INSTRUCTIONS
from dprobes.dpc.typedtree.folder import integer_of
from dprobes.dpc.typedtree.typed import (
    Arithmetic,
    Assign,
    BitField,
    Both,
    Choice,
    CommTest,
    Comparison,
    Constant,
    Convert,
    Either,
    FunctionCall,
    KeptTest,
    Local,
    Memory,
    Negation,
    Not,
    Register,
    Sequence,
    Step,
    Symbol,
    System,
    TableValue,
    TextTest,
    Variable,
)
from dprobes.dpc.typedtree.valueproperties import greatest, is_truth
from dprobes.dpc.types.ctype import Void, size_of
from dprobes.rpn.program import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.typedtree.typed import Value
    from dprobes.dpc.types.ctype import CType

__all__ = ["ValueEmitter"]

_BITS_MAX = 64
"""The bits of the largest word."""


class ValueEmitter:
    """
    Write values of a handler or function; ``procedures`` are the names of the program's functions in RPN.

    ``parameters`` is how many cells those of a function have: they lie below its variables. ``used`` collects the
    procedures for wide numbers that are needed.
    """

    def __init__(
        self,
        writer: Writer,
        word_size: int,
        procedures: Mapping[str, str],
        parameters: int = 0,
        used: dict[str, None] | None = None,
    ) -> None:
        self._w = writer
        self._bits = 8 * word_size
        self._word_size = word_size
        self._procedures = procedures
        self._parameters = parameters
        self.wide = WideEmitter(self, writer, word_size, {} if used is None else used)
        self.places = PlaceEmitter(self, writer, word_size)
        self.tables = TableEmitter(self, writer, word_size)

    # Exact values

    def exact(self, value: Value) -> None:
        """Push a value, as its type holds it; a wide one takes two cells."""
        w = self._w
        match value:
            case Assign() | Step() | Choice() | Sequence() | FunctionCall():
                self._compound(value)
            case _ if self.wide.is_wide(value.type):
                self.wide.push(value)
            case Constant(number):
                w.number(number)
            case Symbol(name):
                w.op(f"push {symbol_operand(name)}", 1)
            case Register(name, type_, at_entry):
                push_register(w, name, self._word_size, at_entry=at_entry)
                self.cut(type_)
            case System(name, type_):
                w.op(f"push {name}", 1)
                self.cut(type_)
            case Local(slot):
                w.op(f"push sbp, {self.displacement(slot)}", 1)
            case Variable():
                self._load_variable(value)
            case Memory(address, type_):
                self.exact(address)
                size = self._size(type_)
                w.op(f"push mem, u{8 * size}")
                self._extend(type_)
            case BitField(unit, bits, shift, type_):
                self._bit_field(unit, bits, shift, type_)
            case Arithmetic():
                emit_arithmetic(self, w, value, self._bits)
            case Negation(operand, type_, is_complement):
                self.low(operand, type_.bits)
                w.op("neg")
                if not is_complement:
                    w.number(1)
                    w.op("add", -1)
                self.cut(type_)
            case Comparison(_, left) if self.wide.is_wide(left.type):
                self.wide.compare(value)
            case Comparison(operator, left, right, is_signed):
                self.exact(right)
                self.exact(left)
                w.op("eq" if operator == "==" else "lt" if is_signed else "ltu", -1)
            case Not(operand):
                self._not(operand)
            case Both() | Either():
                self._logical(value)
            case Convert(operand, type_):
                self._convert(operand, type_)
            case TableValue(table, keys):
                w.op(f"push table, {table}", 1 - self.tables.cells(keys))
            case KeptTest():
                self.tables.differs(value)
                w.number(0)
                w.op("eq", -1)
            case TextTest() | CommTest():
                self._differs(value)
                w.number(1)
                w.op("xor", -1)

    def _compound(self, value: Assign | Step | Choice | Sequence | FunctionCall) -> None:
        match value:
            case Assign(target, assigned):
                self.places.assign(target, assigned, is_wanted=True)
            case Step(target, amount, is_postfix):
                self.places.step(target, amount, is_postfix=is_postfix, is_wanted=True)
            case Choice(condition, yes, no):
                self._choice(condition, yes, no)
            case Sequence(left, right):
                self.effect(left)
                self.exact(right)
            case FunctionCall(name, arguments, type_):
                self._call(name, arguments, type_)

    def effect(self, value: Value) -> None:
        """Do what a value does, and push nothing."""
        match value:
            case Assign(target, assigned):
                self.places.assign(target, assigned, is_wanted=False)
            case Step(target, amount, is_postfix):
                self.places.step(target, amount, is_postfix=is_postfix, is_wanted=False)
            case Sequence(left, right):
                self.effect(left)
                self.effect(right)
            case Convert(operand, Void()):
                self.effect(operand)
            case FunctionCall(name, arguments, type_):
                self._call(name, arguments, type_)
                if not isinstance(type_, Void):
                    self._w.drop(self.wide.width(type_))
            case _:
                self.exact(value)
                self._w.drop(self.wide.width(value.type))

    def low(self, value: Value, bits: int) -> None:
        """Push a value of which only so many low bits count, in one cell if they fit into that."""
        is_wide = self.wide.is_wide(value.type)
        match value:
            case _ if bits > self._bits:
                self.exact(value)
            case Constant(number) if is_wide:
                self._w.number(number & ((1 << bits) - 1))
            case Local(slot) if is_wide:
                self._w.op(f"push sbp, {self.displacement(slot)}", 1)
            case Convert(operand, type_) if (target := integer_of(type_)) is not None and target.bits >= bits:
                if target.is_bool:
                    self.exact(value)
                else:
                    self.low(operand, bits)
            case Arithmetic("&", left, _, _) if (width := mask_width(value)) is not None and width < bits:
                self.low(left, width)
                self._w.op(f"pzl {width}")
            case Arithmetic(operator, left, right, type_) if operator in OPERATIONS and type_.bits >= bits:
                self.low(right, bits)
                self.low(left, bits)
                self._w.op(OPERATIONS[operator], -1)
            case Arithmetic("<<", left, Constant(count), type_) if type_.bits >= bits:
                self.low(left, bits)
                self._w.op(f"shl {count}")
            case Negation(operand, type_, True) if type_.bits >= bits:
                self.low(operand, bits)
                self._w.op("neg")
            case _:
                self.exact(value)
                if is_wide:
                    self.wide.drop_high()

    def _size(self, type_: CType) -> int:
        return size_of(type_) or self._word_size

    def cut(self, type_: CType) -> None:
        """Let the top cell, of which only as many low bits count as a type has, hold a number of that type."""
        integer = integer_of(type_)
        if integer is not None and integer.bits_of_64 < _BITS_MAX and integer.bits <= self._bits:
            self._w.op(f"{'pbl' if integer.is_signed else 'pzl'} {integer.bits}")

    def _extend(self, type_: CType) -> None:
        """Extend a number that was loaded with zeros above it."""
        integer = integer_of(type_)
        if integer is not None and integer.is_signed and integer.bits_of_64 < _BITS_MAX:
            self._w.op(f"pbl {integer.bits}")

    def displacement(self, slot: int) -> int:
        """Return where a variable of a block is, counted from SBP; parameters are behind it, the last one first."""
        return -(slot + 1) if slot >= 0 else self._parameters + slot

    def _load_variable(self, variable: Variable) -> None:
        name = INSTRUCTIONS[variable.kind]
        if variable.index is None:
            self._w.op(f"push {name}, {variable.first}", 1)
        else:
            self.index(variable)
            self._w.op(f"push {name}")
        self.cut(variable.type)  # what is stored there may have more bits

    def index(self, variable: Variable) -> None:
        """Push the index of an element of an array."""
        assert variable.index is not None
        self.exact(variable.index)
        if self.wide.is_wide(variable.type):
            self._w.op("shl 1")
        if variable.first:
            self._w.number(variable.first)
            self._w.op("add", -1)

    def _bit_field(self, unit: Memory, bits: int, shift: int, type_: CType) -> None:
        self.exact(unit.address)
        self._w.op(f"push mem, u{8 * self._size(unit.type)}")
        if shift:
            self._w.op(f"shr {shift}")
        integer = integer_of(type_)
        self._w.op(f"{'pbl' if integer is not None and integer.is_signed else 'pzl'} {bits}")

    # Operators

    def _tested(self, value: Value) -> None:
        """Push a cell that is 0 if a value is."""
        self.exact(value)
        if self.wide.is_wide(value.type):
            self.wide.test()

    def _not(self, operand: Value) -> None:
        self._tested(operand)
        if is_truth(operand):
            self._w.number(1)
            self._w.op("xor", -1)
        else:
            self._w.number(0)
            self._w.op("eq", -1)

    def _truth(self, value: Value) -> None:
        """Push 1 for what is not 0, else 0."""
        self._tested(value)
        if not is_truth(value):
            self._w.number(0)
            self._w.op("eq", -1)
            self._w.number(1)
            self._w.op("xor", -1)

    def _logical(self, value: Both | Either) -> None:
        end = self._w.new_label()
        self._truth(value.left)
        self._w.op(f"{'jz' if isinstance(value, Both) else 'jnz'} {end}")
        self._w.drop()
        self._truth(value.right)
        self._w.label(end)

    def _choice(self, condition: Value, yes: Value, no: Value) -> None:
        other, end = self._w.new_label(), self._w.new_label()
        self.branch(condition, other, when=False)
        self.exact(yes)
        self._w.op(f"jmp {end}")
        self.landing(other)
        self._w.depth -= self.wide.width(yes.type)
        self.exact(no)
        self._w.label(end)

    def _convert(self, operand: Value, type_: CType) -> None:
        if isinstance(type_, Void):
            self.exact(operand)
            return
        target, source = integer_of(type_), integer_of(operand.type)
        assert target is not None
        assert source is not None
        most = greatest(operand)
        wanted, given = target.bits_of_64, source.bits_of_64
        if target.is_bool:
            self._truth(operand)
        elif most is not None and target.holds(most) and not self.wide.is_wide(operand.type):
            self.exact(operand)
        elif wanted < given or (wanted == given and target.is_signed != source.is_signed):
            self.low(operand, target.bits)
            self.cut(type_)
        else:
            # All numbers of the source are numbers of the target, or become so by the cell's width.
            self.exact(operand)
            if source.is_signed and not target.is_signed:
                self.cut(type_)

    # Conditions

    def branch(self, condition: Value, label: str, *, when: bool) -> None:
        """Jump to a label, a *landing* with a cell on the stack, if a condition is what ``when`` says; else go on."""
        w = self._w
        match condition:
            case Not(operand):
                self.branch(operand, label, when=not when)
                return
            case Both(left, right) if not when:
                self.branch(left, label, when=False)
                self.branch(right, label, when=False)
                return
            case Either(left, right) if when:
                self.branch(left, label, when=True)
                self.branch(right, label, when=True)
                return
            case Both(left, right) | Either(left, right):
                inner, end = w.new_label(), w.new_label()
                self.branch(left, inner, when=not when)
                self.branch(right, label, when=when)
                w.op(f"jmp {end}")
                self.landing(inner)
                w.label(end)
                return
            case Comparison("==", value, Constant(0)) | Comparison("==", Constant(0), value):
                self._tested(value)
                jump = "jz" if when else "jnz"
            case KeptTest():
                self.tables.differs(condition)
                jump = "jz" if when else "jnz"
            case TextTest() | CommTest():
                self._differs(condition)
                jump = "jz" if when else "jnz"
            case Comparison("<", value, Constant(0), True) if not self.wide.is_wide(value.type):
                self.exact(value)
                jump = "jlt" if when else "jge"
            case Comparison("<", Constant(0), value, True) if not self.wide.is_wide(value.type):
                self.exact(value)
                jump = "jgt" if when else "jle"
            case _:
                self._tested(condition)
                jump = "jnz" if when else "jz"
        w.op(f"{jump} {label}")
        w.drop()

    def landing(self, label: str) -> None:
        """Put the label here that ``branch`` jumps to, and drop the cell that it leaves."""
        self._w.label(label)
        self._w.depth += 1
        self._w.drop()

    # Strings and functions

    def width(self, type_: CType) -> int:
        """Return how many cells a value of a type takes."""
        return self.wide.width(type_)

    def _differs(self, test: TextTest | CommTest) -> None:
        """Push 0 if a string is the text that it is compared with, else 1."""
        if isinstance(test, TextTest):
            self.exact(test.address)
            self._w.op(f"match {'strn' if test.is_prefix else 'str'}, {quoted(test.text)}")
        else:
            self._w.op(f"match {'commn' if test.is_prefix else 'comm'}, {quoted(test.text)}", 1)

    def _call(self, name: str, arguments: tuple[Value, ...], type_: CType) -> None:
        w = self._w
        if not isinstance(type_, Void):
            for _ in range(self.wide.width(type_)):
                w.number(0)  # for the result
        for argument in arguments:
            self.exact(argument)
        w.op(f"call {self._procedures[name]}")
        w.drop(sum(self.wide.width(argument.type) for argument in arguments))
