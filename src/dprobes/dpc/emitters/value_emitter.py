"""
RPN of values. A value's number is in one cell, or two if it is wide, and exact or with only the low bits significant.

Operations that do not depend on high bits (``+ - * << & | ^ ~``) use whole cells. The result is truncated to its type
before the high bits are read: in a comparison, a division, a right shift, or a conversion to a larger type.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from dprobes.dpc.emitters.cell_emitter import TableEmitter, WideEmitter
from dprobes.dpc.emitters.rpn_writer import INSTRUCTIONS
from dprobes.dpc.typedtree.typed_values import (
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
from dprobes.dpc.typedtree.value_properties import greatest, integer_of, is_truth
from dprobes.dpc.types.c_types import Void, size_of
from dprobes.rpn.instruction_set import ALIASES, ROWS
from dprobes.rpn.rpn_program import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.dpc.emitters.cell_emitter import CellEmitter
    from dprobes.dpc.emitters.rpn_writer import Writer
    from dprobes.dpc.typedtree.typed_values import Place, Value
    from dprobes.dpc.types.c_types import CType

__all__ = ["ValueEmitter"]


class PlaceEmitter:
    """
    A writer of code that stores to variables, registers, memory and bit fields.

    ``values`` writes the stored values.
    """

    def __init__(self, values: CellEmitter, writer: Writer, word_size: int) -> None:
        self._values = values
        self._w = writer
        self._bits = 8 * word_size
        self._word_size = word_size

    def assign(self, target: Place, value: Value, *, is_wanted: bool) -> None:
        """Write code that assigns a value to ``target``; with ``is_wanted`` the value stays on the stack."""
        is_indexed = isinstance(target, Variable) and target.index is not None
        if not isinstance(target, Variable) or is_indexed or is_wanted or self._values.wide.is_wide(target.type):
            self._values.exact(value)
        else:
            self._values.low(value, self._integer_bits(target.type))
        self.store(target, is_wanted=is_wanted)

    def _integer_bits(self, type_: CType) -> int:
        integer = integer_of(type_)
        return self._bits if integer is None or integer.is_bool else integer.bits

    def store(self, target: Place, *, is_wanted: bool) -> None:
        """
        Write code that stores the number on top in ``target``.

        With ``is_wanted`` it stays on the stack, else it is popped.
        """
        w = self._w
        keep = 0 if is_wanted else -1
        if isinstance(target, BitField):
            self._store_field(target, is_wanted=is_wanted)
            return
        if self._values.wide.is_wide(target.type):
            self._values.wide.store(target, is_wanted=is_wanted)
            return
        match target:
            case Local(slot):
                w.op(f"{'copy' if is_wanted else 'pop'} sbp, {self._values.displacement(slot)}", keep)
            case Register(name):
                if is_wanted:
                    w.op("dup 1", 1)
                w.op(f"pop r, {name}", -1)
            case Variable(kind, first, _, None):
                w.op(f"{'move' if is_wanted else 'pop'} {INSTRUCTIONS[kind]}, {first}", keep)
            case Variable(kind):
                if is_wanted:
                    w.op("dup 1", 1)
                self._values.index(target)
                w.code(f"xchg; pop {INSTRUCTIONS[kind]}")
            case Memory(address, type_):
                self._values.exact(address)
                w.code(f"push tsp, 1; pop mem, u{8 * (size_of(type_) or self._word_size)}")
                if not is_wanted:
                    w.drop()

    def _store_field(self, target: BitField, *, is_wanted: bool) -> None:
        """
        Write code that stores the number on top in a bit field; with ``is_wanted`` the field's value replaces it.

        Otherwise the number is dropped. A wide field or unit takes two cells.
        """
        wide = self._values.wide
        if wide.is_wide(target.unit.type):
            wide.store_bits(target.unit, target.bits, target.shift)
        else:
            self._store_bits(target.unit, target.bits, target.shift)
        integer = integer_of(target.type)
        is_signed = integer is not None and integer.is_signed
        if not is_wanted:
            self._w.drop(wide.width(target.type))
        elif wide.is_wide(target.type):
            wide.cut(target.bits, is_signed=is_signed)
        else:
            self._w.op(f"{'pbl' if is_signed else 'pzl'} {target.bits}")

    def _store_bits(self, unit: Memory, bits: int, shift: int) -> None:
        """
        Write code that stores the low ``bits`` bits of the number on top in ``unit`` from bit ``shift`` on.

        The number stays on the stack, and the unit's other bits do not change.
        """
        w, size = self._w, 8 * (size_of(unit.type) or self._word_size)
        mask = (1 << bits) - 1
        self._values.exact(unit.address)
        w.code(f"dup 1; push mem, u{size}")
        w.number(((1 << size) - 1) & ~(mask << shift))
        w.code("and; push tsp, 2")
        w.number(mask)
        w.op("and", -1)
        if shift:
            w.op(f"shl {shift}")
        w.code(f"or; pop mem, u{size}")

    def step(self, target: Place, amount: int, *, is_postfix: bool, is_wanted: bool) -> None:
        """
        Write code that adds ``amount`` to ``target``, for ``++`` and ``--``. With ``is_wanted``, push the result.

        With ``is_postfix``, the result is the previous value.
        """
        w = self._w
        if self._values.wide.is_wide(target.type):
            self._values.wide.step(target, amount, is_postfix=is_postfix, is_wanted=is_wanted)
            return
        if isinstance(target, Variable) and amount in (1, -1) and not is_wanted:
            operation = "inc" if amount == 1 else "dec"
            if target.index is None:
                w.op(f"{operation} {INSTRUCTIONS[target.kind]}, {target.first}")
            else:
                self._values.index(target)
                w.op(f"{operation} {INSTRUCTIONS[target.kind]}", -1)
            return
        self._values.exact(target)
        if is_postfix and is_wanted:
            w.op("dup 1", 1)
        w.number(amount)
        w.op("add", -1)
        self._values.cut(target.type)
        self.store(target, is_wanted=is_wanted and not is_postfix)


OPERATIONS = {"+": "add", "-": "sub", "*": "mul", "&": "and", "|": "or", "^": "xor"}
"""Instructions for operations whose low bits depend only on the low bits of the operands."""

BITWISE = ("&", "|", "^")
"""Operations whose results are in the range of their type if their operands are."""


def emit_arithmetic(values: CellEmitter, w: Writer, value: Arithmetic, bits: int) -> None:
    """Push the result of an operation in the range of its type; ``bits`` is the width of a word."""
    type_, operator = value.type, value.operator
    if operator == "&" and (width := mask_width(value)) is not None:
        values.low(value.left, width)
        w.op(f"pzl {width}")
    elif operator in BITWISE:
        values.exact(value.right)
        values.exact(value.left)
        w.op(OPERATIONS[operator], -1)
    elif operator in OPERATIONS:
        values.low(value, type_.bits)
        values.cut(type_)
    elif operator == "<<":
        if isinstance(value.right, Constant):
            values.low(value, type_.bits)
        else:
            values.low(value.right, bits)
            values.low(value.left, type_.bits)
            w.op("shl", -1)
        values.cut(type_)
    elif operator == ">>":
        _shift_right(values, w, value, bits)
    else:
        values.exact(value.left)
        values.exact(value.right)
        w.op("idiv" if type_.is_signed else "div")
        if operator == "/":
            w.op("xchg")
        w.drop()


def mask_width(value: Arithmetic) -> int | None:
    """Return the number of low bits that a constant mask keeps, or None if it has gaps or is as wide as the type."""
    match value.right:
        case Constant(mask) if mask > 0 and mask & (mask + 1) == 0 and mask.bit_length() < value.type.bits:
            return mask.bit_length()
    return None


def _shift_right(values: CellEmitter, w: Writer, value: Arithmetic, bits: int) -> None:
    if isinstance(value.right, Constant):
        values.exact(value.left)
        count = value.right.value
        w.op(f"shr {count}")
        if value.type.is_signed and 0 < count < bits:
            w.op(f"pbl {bits - count}")
        return
    if not value.type.is_signed:
        values.low(value.right, bits)
        values.exact(value.left)
        w.op("shr", -1)
        return
    # An exclusive or with copies of the sign bit makes a negative number non-negative, so that zeros may be shifted in;
    # a second one restores the sign.
    values.exact(value.left)
    w.code(f"dup 1; pbr {bits}")
    values.low(value.right, bits)
    w.code("push tsp, 2; push tsp, 2; xor; shr; xor; xchg; ros 1")


_PORTABLE = ("arg", "ret", "pc", "sp")
_PROCESSORS = {4: "i386", 8: "x86_64"}
"""The processors with registers that exist in the user context only, by their word size in bytes."""


def push_register(w: Writer, name: str, word_size: int, *, at_entry: bool) -> None:
    """Push a register of the hit or, ``at_entry``, of the call's entry; ``word_size`` is in bytes."""
    if at_entry or name.startswith(_PORTABLE) or not _is_low_word_pushed(w, name, word_size):
        w.op(f"push {'entry' if at_entry else 'r'}, {name}", 1)


def _is_low_word_pushed(w: Writer, name: str, word_size: int) -> bool:
    from dprobes.arch import architecture
    from dprobes.arch.processor import Direction

    register = architecture(_PROCESSORS[word_size]).register(name)
    if register is None or Direction.PUSH_CURRENT in register.allowed or register.selector_cells:
        return False
    cells = register.cells(word_size)
    w.op(f"push u, {name}", cells)
    for _ in range(cells - 1):  # the low word is on top
        w.code("xchg; ros 1")
    return True


_NUMBERED = re.compile(r"[a-z]{1,5}[0-9]{1,3}\Z")
"""A name of the form of a numbered register on any processor."""


def symbol_operand(name: str) -> str:
    """Return the operand of ``push`` for a symbol: in quotes with scopes, in parentheses if it is ambiguous."""
    if "::" in name:
        return f'"{name}"'
    word = name.lower()
    return f"({name})" if word in _known_words() or _NUMBERED.match(word) else name


@cache
def _known_words() -> frozenset[str]:
    from dprobes.arch import host_architecture

    syntaxes = [row.syntax for row in ROWS] + [alias.syntax for alias in ALIASES]
    words = {syntax.split()[1].rstrip(",") for syntax in syntaxes if syntax.startswith("push ")}
    return frozenset((*words, *host_architecture().register_names))


_BITS_MAX = 64
"""Maximum width of a word in bits."""


class ValueEmitter:
    """
    A writer of values of a handler or function; ``procedures`` maps the program's functions to their RPN names.

    ``parameters`` is the number of cells of a function's parameters, which are deeper in the stack than its variables.
    ``used`` collects the required procedures for wide numbers.
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
        """
        Write code that pushes a value, sign- or zero-extended to the cell.

        Two cells for 64 bits in 32-bit programs.
        """
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
                    w.code("push 1; add")
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
                w.code("push 0; eq")
            case TextTest() | CommTest():
                self._differs(value)
                w.code("push 1; xor")

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
        """Compute a value for its side effects, and push nothing."""
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
        """
        Write code that pushes a value of which only the low ``bits`` are used; higher bits are undefined.

        The value occupies one cell if a word has at least ``bits`` bits.
        """
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
        """Truncate the top cell to the width of a type, and sign- or zero-extend it to the cell's width."""
        integer = integer_of(type_)
        if integer is not None and integer.bits_of_64 < _BITS_MAX and integer.bits <= self._bits:
            self._w.op(f"{'pbl' if integer.is_signed else 'pzl'} {integer.bits}")

    def _extend(self, type_: CType) -> None:
        """Sign-extend the top cell, a number that was loaded zero-extended, if its type is signed."""
        integer = integer_of(type_)
        if integer is not None and integer.is_signed and integer.bits_of_64 < _BITS_MAX:
            self._w.op(f"pbl {integer.bits}")

    def displacement(self, slot: int) -> int:
        """
        Return the displacement in cells, from SBP, of the variable ``slot``. Negative slots are parameters.

        Variables are below SBP. Parameters are at SBP and above, the last one first.
        """
        return -(slot + 1) if slot >= 0 else self._parameters + slot

    def _load_variable(self, variable: Variable) -> None:
        name = INSTRUCTIONS[variable.kind]
        if variable.index is None:
            self._w.op(f"push {name}, {variable.first}", 1)
        else:
            self.index(variable)
            self._w.op(f"push {name}")
        self.cut(variable.type)  # the cell may contain more bits

    def index(self, variable: Variable) -> None:
        """Write code that pushes the number of the RPN variable in which an array element of the program is stored."""
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
        """Write code that pushes any number other than 0 if a value is not 0, else 0."""
        self.exact(value)
        if self.wide.is_wide(value.type):
            self.wide.test()

    def _not(self, operand: Value) -> None:
        self._tested(operand)
        if is_truth(operand):
            self._w.code("push 1; xor")
        else:
            self._w.code("push 0; eq")

    def _truth(self, value: Value) -> None:
        """Write code that pushes 1 if a value is not 0, else 0."""
        self._tested(value)
        if not is_truth(value):
            self._w.code("push 0; eq; push 1; xor")

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
            # The target has all numbers of the source. A negative one becomes unsigned by truncation to the target's
            # width.
            self.exact(operand)
            if source.is_signed and not target.is_signed:
                self.cut(type_)

    # Conditions

    def branch(self, condition: Value, label: str, *, when: bool) -> None:
        """
        Write a jump to ``label`` that is taken if the condition is true and ``when`` is True, or both are false.

        After the jump the stack has one more cell, which ``landing`` drops.
        """
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
        """Write the label to which ``branch`` jumps, and drop the cell that it leaves."""
        self._w.label(label)
        self._w.depth += 1
        self._w.drop()

    # Strings and functions

    def _differs(self, test: TextTest | CommTest) -> None:
        """Write code that pushes 0 if the tested string equals or begins with the test's literal, else 1."""
        if isinstance(test, TextTest):
            self.exact(test.address)
            self._w.op(f"match {'strn' if test.is_prefix else 'str'}, {quoted(test.text)}")
        else:
            self._w.op(f"match {'commn' if test.is_prefix else 'comm'}, {quoted(test.text)}", 1)

    def _call(self, name: str, arguments: tuple[Value, ...], type_: CType) -> None:
        w = self._w
        if not isinstance(type_, Void):
            for _ in range(self.wide.width(type_)):
                w.number(0)  # room for the result
        for argument in arguments:
            self.exact(argument)
        w.op(f"call {self._procedures[name]}")
        w.drop(sum(self.wide.width(argument.type) for argument in arguments))
