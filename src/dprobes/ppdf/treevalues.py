"""
The values of typed trees from bytes: what is read is a value that the interpreter of the blocks can compute.

Variables, tables, functions and operators are those that there are; places that are assigned to are places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.toolblock import SYSTEM
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.typed import VariableKind
from dprobes.dpc.types.ctype import CType, Integer, Stack, String, size_of
from dprobes.lazynamedtuple import NamedTuple
from dprobes.ppdf.treeforms import DEPTH_MAX, OPERATORS, ValueKind, type_of
from dprobes.rpn.isa import PROCESS_NAME_SIZE, text_problem
from dprobes.rpn.tables import STRING_SIZE_MAX, KeyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.typedtree.scope import FunctionSignature
    from dprobes.ppdf.fieldcodec import Reader
    from dprobes.rpn.program import Program
    from dprobes.rpn.tables import Key, Table
    from dprobes.source import Span

__all__ = ["Surroundings", "ValueReader"]

_COMPARISONS = ("==", "<", "<=")
_NUMBERS = (KeyKind.WORD, KeyKind.SIGNED, KeyKind.ADDRESS, KeyKind.LONG, KeyKind.SIGNED_LONG)
_VALUE_SIZE = 1


class Surroundings(NamedTuple):
    """What values may name: variables and tables of the ``program``, and functions; words have ``word_size`` bytes."""

    program: Program
    functions: Sequence[FunctionSignature]
    spans: Sequence[Span]
    word_size: int


class ValueReader:
    """Read the values of a block or function that has ``slots`` variables and ``cells`` of parameters."""

    def __init__(self, reader: Reader, around: Surroundings, slots: int, cells: int) -> None:
        self._reader = reader
        self._around = around
        self._slots = slots
        self._cells = cells
        self.depth = 0

    def deeper(self) -> None:
        """Go one level down, which the reader of statements does too."""
        self.depth += 1
        if self.depth > DEPTH_MAX:
            self._reader.fail(f"expected at most {DEPTH_MAX} statements and values in each other")

    def value(self, what: str) -> typed.Value:
        """Read a value that must be there."""
        at = self._reader.offset
        found = self.optional()
        if found is None:
            self._reader.fail(f"expected {what}, found none", at)
        return found

    def optional(self) -> typed.Value | None:
        """Read a value that may be left out."""
        reader, at = self._reader, self._reader.offset
        kind = self._kind()
        if kind is ValueKind.NONE:
            return None
        if kind is ValueKind.COMM:
            reader.fail("the name of the process is no number", at)
        if kind is ValueKind.KEPT:
            reader.fail("what a table keeps is no number", at)
        if kind is ValueKind.LITERAL:
            reader.fail("a text is no number", at)
        self.deeper()
        found = self._of_kind(kind, at)
        self.depth -= 1
        return found

    def items(self) -> tuple[typed.Argument, ...]:
        """Read what is printed."""
        return tuple(self._argument() for _ in range(self._reader.count(_VALUE_SIZE, "values")))

    def place(self) -> typed.Local | typed.Variable:
        """Read a place that can be assigned to."""
        at = self._reader.offset
        found = self.value("a variable")
        if not isinstance(found, typed.Local | typed.Variable):
            self._reader.fail("expected a variable, found another value", at)
        return found

    def local(self) -> typed.Local | None:
        """Read a variable of the block or function that may be left out."""
        at = self._reader.offset
        found = self.optional()
        if found is not None and not isinstance(found, typed.Local):
            self._reader.fail("expected a variable of the block, found another value", at)
        return found

    def table(self) -> Table:
        """Read the number of a table."""
        tables = self._around.program.tables
        return tables[self._reader.below(len(tables), "the number of a table")]

    def keys(self, table: Table) -> tuple[typed.Argument, ...]:
        """Read the keys for a table."""
        reader, at = self._reader, self._reader.offset
        found = self.items()
        kinds = tuple(key.kind for key in table.keys)
        if len(found) != len(kinds) or not all(map(self._fits, table.keys, found)):
            expected = ", ".join(kind.value for kind in kinds) or "none"
            reader.fail(f"expected the keys of the table '{table.name}' ({expected}), found others", at)
        return found

    def _fits(self, key: Key, value: typed.Argument) -> bool:
        """Return whether a value is one for a key."""
        match value:
            case typed.CommName():
                return key.kind is KeyKind.COMM
            case typed.Literal(_, limit):
                return key.kind.is_string and limit == (key.size or PROCESS_NAME_SIZE - 1)
            case typed.Kept():
                of_type = String if key.kind.is_string else Stack
                return value.cells * self._around.word_size == key.bytes and isinstance(value.type, of_type)
        return key.kind in _NUMBERS

    def wide_cells(self, type_: CType) -> int:
        """Return how many cells a number takes."""
        return 2 if (size_of(type_) or 0) > self._around.word_size else 1

    # One value

    def _argument(self) -> typed.Argument:
        reader, at = self._reader, self._reader.offset
        kind = self._kind()
        if kind is ValueKind.COMM:
            return typed.CommName(self._type())
        if kind is ValueKind.LITERAL:
            return self._literal(at)
        reader.back(at)
        if kind is ValueKind.KEPT:
            return self._kept()
        return self.value("a value")

    def kept_by(self, table: Table) -> typed.Argument:
        """Read the string or call stack that a table is to keep."""
        at = self._reader.offset
        found = self._argument()
        if table.value is None or not self._fits(table.value, found):
            self._reader.fail(f"expected what the table '{table.name}' keeps, found another value", at)
        return found

    def _literal(self, at: int) -> typed.Literal:
        self._type()
        text, limit = self._reader.text("a text"), self._reader.u32("the size of a string")
        if len(text.encode()) > limit or limit > STRING_SIZE_MAX or text_problem(text) is not None:
            self._reader.fail(f"expected a text of at most {limit} bytes, found another one", at)
        return typed.Literal(text, limit, String(limit))

    def _kept(self) -> typed.Kept:
        reader, at = self._reader, self._reader.offset
        if self._kind() is not ValueKind.KEPT:
            reader.fail("expected what a table keeps, found another value", at)
        self._type()
        at = reader.offset
        table = self.table()
        if table.value is None or not table.keeps_bytes:
            reader.fail(f"expected a table that keeps strings or call stacks, found '{table.name}'", at)
        size = table.value.size or PROCESS_NAME_SIZE - 1
        type_ = String(size) if table.value.kind.is_string else Stack(is_kernel=True, frames=size)
        self.deeper()
        keys = self.keys(table)
        self.depth -= 1
        return typed.Kept(table.name, keys, table.kept_bytes // self._around.word_size, type_)

    def _kind(self) -> ValueKind:
        at = self._reader.offset
        number = self._reader.u8("the kind of a value")
        if number >= len(ValueKind):
            self._reader.fail(f"expected the kind of a value, found {number}", at)
        return ValueKind(number)

    def _type(self) -> CType:
        at = self._reader.offset
        byte = self._reader.u8("a type")
        found = type_of(byte)
        if found is None:
            self._reader.fail(f"expected a type, found {byte:#x}", at)
        return found

    def _integer(self) -> Integer:
        at = self._reader.offset
        found = self._type()
        if not isinstance(found, Integer):
            self._reader.fail("expected a type of numbers, found another one", at)
        return found

    def _operator(self, operators: Sequence[str]) -> str:
        at = self._reader.offset
        found = self._reader.string("an operator")
        if found not in operators:
            self._reader.fail(f"expected one of {' '.join(operators)}, found '{found}'", at)
        return found

    def _of_kind(self, kind: ValueKind, at: int) -> typed.Value:
        reader = self._reader
        match kind:
            case ValueKind.ARITHMETIC:
                type_, operator = self._integer(), self._operator(OPERATORS)
                return typed.Arithmetic(operator, self.value("a value"), self.value("a value"), type_)
            case ValueKind.NEGATION | ValueKind.COMPLEMENT:
                type_ = self._integer()
                return typed.Negation(self.value("a value"), type_, kind is ValueKind.COMPLEMENT)
        type_of_value = self._type()
        match kind:
            case ValueKind.CONSTANT:
                return typed.Constant(reader.wide("a number"), type_of_value)
            case ValueKind.SYSTEM:
                name = reader.string("what the system knows")
                if name not in SYSTEM:
                    reader.fail(f"expected one of {', '.join(SYSTEM)}, found '{name}'", at)
                return typed.System(name, type_of_value)
            case ValueKind.LOCAL:
                return typed.Local(reader.below(self._slots, "the number of a variable"), type_of_value)
            case ValueKind.PARAMETER:
                return typed.Local(-1 - reader.below(self._cells, "the number of a parameter"), type_of_value)
            case ValueKind.VARIABLE | ValueKind.GLOBAL:
                return self._variable(kind, type_of_value)
            case ValueKind.COMPARISON:
                operator = self._operator(_COMPARISONS)
                left = self.value("a value")
                signed = isinstance(left.type, Integer) and left.type.is_signed
                return typed.Comparison(operator, left, self.value("a value"), signed, type_of_value)
            case ValueKind.NOT:
                return typed.Not(self.value("a value"), type_of_value)
            case ValueKind.BOTH:
                return typed.Both(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.EITHER:
                return typed.Either(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.CONVERT:
                return typed.Convert(self.value("a value"), type_of_value)
            case ValueKind.ASSIGN:
                return typed.Assign(self.place(), self.value("a value"), type_of_value)
            case ValueKind.STEP:
                place, amount = self.place(), reader.wide("a number")
                return typed.Step(place, amount, reader.flag("which value counts"), type_of_value)
            case ValueKind.CHOICE:
                return typed.Choice(self.value("a value"), self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.SEQUENCE:
                return typed.Sequence(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.CALL:
                return self._call(type_of_value)
            case ValueKind.TABLE_VALUE:
                table = self.table()
                return typed.TableValue(table.name, self.keys(table), type_of_value)
            case ValueKind.KEPT_TEST:
                kept, text = self._kept(), reader.text("a string")
                return typed.KeptTest(kept, text, reader.flag("whether it is a prefix"), type_of_value)
            case ValueKind.COMM_TEST:
                text = reader.text("a name")
                return typed.CommTest(text, reader.flag("whether it is a prefix"), type_of_value)
        raise AssertionError(kind)

    def _variable(self, kind: ValueKind, type_: CType) -> typed.Variable:
        program, reader, at = self._around.program, self._reader, self._reader.offset
        is_global = kind is ValueKind.GLOBAL
        count = program.gvars if is_global else program.vars
        first = reader.below(count, "the number of a variable")
        if first + self.wide_cells(type_) > count:
            reader.fail(f"expected {count} cells for variables, found a number behind them", at)
        return typed.Variable(VariableKind.GLOBAL if is_global else VariableKind.LOCAL, first, type_, self.optional())

    def _call(self, type_: CType) -> typed.FunctionCall:
        reader, functions = self._reader, self._around.functions
        function = functions[reader.below(len(functions), "the number of a function")]
        span = self._around.spans[reader.below(len(self._around.spans), "the number of a span")]
        at = reader.offset
        arguments = tuple(self.value("an argument") for _ in range(reader.count(_VALUE_SIZE, "arguments")))
        expected = [self.wide_cells(each) for each in function.parameters]
        if [self.wide_cells(each.type) for each in arguments] != expected:
            reader.fail(f"expected the arguments of '{function.name}', found others", at)
        return typed.FunctionCall(function.name, arguments, type_, span)
