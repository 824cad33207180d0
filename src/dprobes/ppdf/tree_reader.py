"""
The values of typed trees from bytes: what is read is a value that the interpreter of the blocks can compute.

Variables, tables, functions and operators are those that there are; places that are assigned to are places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.syntax.syntax_tree import PERIOD_MAX, PERIOD_MIN, BlockKind, ToolBlock
from dprobes.dpc.tool_block import SYSTEM, ToolProgram
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.name_scope import FunctionSignature
from dprobes.dpc.typedtree.typed_program import Jumping, TypedBlock, TypedFunction
from dprobes.dpc.typedtree.typed_values import VariableKind
from dprobes.dpc.types.c_types import CType, Integer, Stack, String, size_of
from dprobes.ppdf.ppdf_sections import NONE
from dprobes.ppdf.tree_writer import BLOCK_KINDS, DEPTH_MAX, OPERATORS, SLOTS_MAX, StatementKind, ValueKind, type_of
from dprobes.rpn.instruction_set import PROCESS_NAME_SIZE, text_problem
from dprobes.rpn.keyed_tables import STRING_SIZE_MAX, KeyKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.ppdf_sections import Reader
    from dprobes.rpn.keyed_tables import Key, Table
    from dprobes.rpn.rpn_program import Program
    from dprobes.source_text import Span

__all__ = ["read_blocks"]

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

    def value(self, what: str) -> typed_values.Value:
        """Read a value that must be there."""
        at = self._reader.offset
        found = self.optional()
        if found is None:
            self._reader.fail(f"expected {what}, found none", at)
        return found

    def optional(self) -> typed_values.Value | None:
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

    def items(self) -> tuple[typed_values.Argument, ...]:
        """Read what is printed."""
        return tuple(self._argument() for _ in range(self._reader.count(_VALUE_SIZE, "values")))

    def place(self) -> typed_values.Local | typed_values.Variable:
        """Read a place that can be assigned to."""
        at = self._reader.offset
        found = self.value("a variable")
        if not isinstance(found, typed_values.Local | typed_values.Variable):
            self._reader.fail("expected a variable, found another value", at)
        return found

    def local(self) -> typed_values.Local | None:
        """Read a variable of the block or function that may be left out."""
        at = self._reader.offset
        found = self.optional()
        if found is not None and not isinstance(found, typed_values.Local):
            self._reader.fail("expected a variable of the block, found another value", at)
        return found

    def table(self) -> Table:
        """Read the number of a table."""
        tables = self._around.program.tables
        return tables[self._reader.below(len(tables), "the number of a table")]

    def keys(self, table: Table) -> tuple[typed_values.Argument, ...]:
        """Read the keys for a table."""
        reader, at = self._reader, self._reader.offset
        found = self.items()
        kinds = tuple(key.kind for key in table.keys)
        if len(found) != len(kinds) or not all(map(self._fits, table.keys, found)):
            expected = ", ".join(kind.value for kind in kinds) or "none"
            reader.fail(f"expected the keys of the table '{table.name}' ({expected}), found others", at)
        return found

    def _fits(self, key: Key, value: typed_values.Argument) -> bool:
        """Return whether a value is one for a key."""
        match value:
            case typed_values.CommName():
                return key.kind is KeyKind.COMM
            case typed_values.Literal(_, limit):
                return key.kind.is_string and limit == (key.size or PROCESS_NAME_SIZE - 1)
            case typed_values.Kept():
                of_type = String if key.kind.is_string else Stack
                return value.cells * self._around.word_size == key.bytes and isinstance(value.type, of_type)
        return key.kind in _NUMBERS

    def wide_cells(self, type_: CType) -> int:
        """Return how many cells a number takes."""
        return 2 if (size_of(type_) or 0) > self._around.word_size else 1

    # One value

    def _argument(self) -> typed_values.Argument:
        reader, at = self._reader, self._reader.offset
        kind = self._kind()
        if kind is ValueKind.COMM:
            return typed_values.CommName(self._type())
        if kind is ValueKind.LITERAL:
            return self._literal(at)
        reader.back(at)
        if kind is ValueKind.KEPT:
            return self._kept()
        return self.value("a value")

    def kept_by(self, table: Table) -> typed_values.Argument:
        """Read the string or call stack that a table is to keep."""
        at = self._reader.offset
        found = self._argument()
        if table.value is None or not self._fits(table.value, found):
            self._reader.fail(f"expected what the table '{table.name}' keeps, found another value", at)
        return found

    def _literal(self, at: int) -> typed_values.Literal:
        self._type()
        text, limit = self._reader.text("a text"), self._reader.u32("the size of a string")
        if len(text.encode()) > limit or limit > STRING_SIZE_MAX or text_problem(text) is not None:
            self._reader.fail(f"expected a text of at most {limit} bytes, found another one", at)
        return typed_values.Literal(text, limit, String(limit))

    def _kept(self) -> typed_values.Kept:
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
        return typed_values.Kept(table.name, keys, table.kept_bytes // self._around.word_size, type_)

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

    def _of_kind(self, kind: ValueKind, at: int) -> typed_values.Value:
        reader = self._reader
        match kind:
            case ValueKind.ARITHMETIC:
                type_, operator = self._integer(), self._operator(OPERATORS)
                return typed_values.Arithmetic(operator, self.value("a value"), self.value("a value"), type_)
            case ValueKind.NEGATION | ValueKind.COMPLEMENT:
                type_ = self._integer()
                return typed_values.Negation(self.value("a value"), type_, kind is ValueKind.COMPLEMENT)
        type_of_value = self._type()
        match kind:
            case ValueKind.CONSTANT:
                return typed_values.Constant(reader.wide("a number"), type_of_value)
            case ValueKind.SYSTEM:
                name = reader.string("what the system knows")
                if name not in SYSTEM:
                    reader.fail(f"expected one of {', '.join(SYSTEM)}, found '{name}'", at)
                return typed_values.System(name, type_of_value)
            case ValueKind.LOCAL:
                return typed_values.Local(reader.below(self._slots, "the number of a variable"), type_of_value)
            case ValueKind.PARAMETER:
                return typed_values.Local(-1 - reader.below(self._cells, "the number of a parameter"), type_of_value)
            case ValueKind.VARIABLE | ValueKind.GLOBAL:
                return self._variable(kind, type_of_value)
            case ValueKind.COMPARISON:
                operator = self._operator(_COMPARISONS)
                left = self.value("a value")
                signed = isinstance(left.type, Integer) and left.type.is_signed
                return typed_values.Comparison(operator, left, self.value("a value"), signed, type_of_value)
            case ValueKind.NOT:
                return typed_values.Not(self.value("a value"), type_of_value)
            case ValueKind.BOTH:
                return typed_values.Both(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.EITHER:
                return typed_values.Either(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.CONVERT:
                return typed_values.Convert(self.value("a value"), type_of_value)
            case ValueKind.ASSIGN:
                return typed_values.Assign(self.place(), self.value("a value"), type_of_value)
            case ValueKind.STEP:
                place, amount = self.place(), reader.wide("a number")
                return typed_values.Step(place, amount, reader.flag("which value counts"), type_of_value)
            case ValueKind.CHOICE:
                return typed_values.Choice(
                    self.value("a value"), self.value("a value"), self.value("a value"), type_of_value
                )
            case ValueKind.SEQUENCE:
                return typed_values.Sequence(self.value("a value"), self.value("a value"), type_of_value)
            case ValueKind.CALL:
                return self._call(type_of_value)
            case ValueKind.TABLE_VALUE:
                table = self.table()
                return typed_values.TableValue(table.name, self.keys(table), type_of_value)
            case ValueKind.KEPT_TEST:
                kept, text = self._kept(), reader.text("a string")
                return typed_values.KeptTest(kept, text, reader.flag("whether it is a prefix"), type_of_value)
            case ValueKind.COMM_TEST:
                text = reader.text("a name")
                return typed_values.CommTest(text, reader.flag("whether it is a prefix"), type_of_value)
        raise AssertionError(kind)

    def _variable(self, kind: ValueKind, type_: CType) -> typed_values.Variable:
        program, reader, at = self._around.program, self._reader, self._reader.offset
        is_global = kind is ValueKind.GLOBAL
        count = program.gvars if is_global else program.vars
        first = reader.below(count, "the number of a variable")
        if first + self.wide_cells(type_) > count:
            reader.fail(f"expected {count} cells for variables, found a number behind them", at)
        return typed_values.Variable(
            VariableKind.GLOBAL if is_global else VariableKind.LOCAL, first, type_, self.optional()
        )

    def _call(self, type_: CType) -> typed_values.FunctionCall:
        reader, functions = self._reader, self._around.functions
        function = functions[reader.below(len(functions), "the number of a function")]
        span = self._around.spans[reader.below(len(self._around.spans), "the number of a span")]
        at = reader.offset
        arguments = tuple(self.value("an argument") for _ in range(reader.count(_VALUE_SIZE, "arguments")))
        expected = [self.wide_cells(each) for each in function.parameters]
        if [self.wide_cells(each.type) for each in arguments] != expected:
            reader.fail(f"expected the arguments of '{function.name}', found others", at)
        return typed_values.FunctionCall(function.name, arguments, type_, span)


# Blocks of the tool, and the functions that they call, from bytes.
#
# What is read can be executed, whatever the bytes are: jumps lead out of something, numbers are those of what there is.


_BLOCK_SIZE, _FUNCTION_SIZE, _STATEMENT_SIZE, _TEST_SIZE = 22, 17, 5, 21
_WORD_SIZES = (4, 8)
_JMPMAX = 0xFFFF


def read_blocks(reader: Reader, program: Program, spans: Sequence[Span]) -> ToolProgram | None:
    """Return what the tool executes of a program; None if that is nothing."""
    count = reader.count(_BLOCK_SIZE, "blocks")
    if not count:
        reader.end()
        return None
    at, word_size = reader.offset, reader.u8("the size of a word")
    if word_size not in _WORD_SIZES:
        reader.fail(f"expected words of 4 or 8 bytes, found {word_size}", at)
    jmpmax = reader.below(_JMPMAX + 1, "the number of jumps")
    signatures: list[FunctionSignature] = []
    slots: list[int] = []
    for _ in range(reader.count(_FUNCTION_SIZE, "functions")):
        signature = _signature(reader, spans)
        if any(each.name == signature.name for each in signatures):
            reader.fail(f"there are two functions '{signature.name}'")
        signatures.append(signature)
        slots.append(_slots(reader))
    around = Surroundings(program, signatures, spans, word_size)
    blocks = tuple(_block(reader, around) for _ in range(count))
    functions = {}
    for signature, size in zip(signatures, slots, strict=True):
        values = ValueReader(reader, around, size, 0)
        cells = sum(values.wide_cells(each) for each in signature.parameters)
        values = ValueReader(reader, around, size, cells)
        body = _Statements(reader, values, around, in_function=True).statement()
        functions[signature.name] = TypedFunction(signature, body, size)
    reader.end()
    return ToolProgram(blocks, functions, tuple(table.name for table in program.tables), word_size, jmpmax)


def _span(reader: Reader, spans: Sequence[Span]) -> Span:
    return spans[reader.below(len(spans), "the number of a span")]


def _slots(reader: Reader) -> int:
    return reader.below(SLOTS_MAX + 1, "the number of variables")


def _signature(reader: Reader, spans: Sequence[Span]) -> FunctionSignature:
    name, span = reader.string("the name of a function"), _span(reader, spans)
    at = reader.offset
    types = [type_of(byte) for byte in (reader.u8("a type"), *reader.block("types of parameters"))]
    result, *parameters = [each for each in types if each is not None]
    if len(parameters) + 1 != len(types):
        reader.fail("expected types, found something else", at)
    return FunctionSignature(name, result, tuple(parameters), span)


def _block(reader: Reader, around: Surroundings) -> TypedBlock:
    kind = BLOCK_KINDS[reader.below_byte(len(BLOCK_KINDS), "the kind of a block")]
    written, span = reader.string("what a block is called"), _span(reader, around.spans)
    at, period = reader.offset, reader.u64("a period")
    if kind is BlockKind.EVERY and not PERIOD_MIN <= period <= PERIOD_MAX:
        reader.fail(f"expected from {PERIOD_MIN} to {PERIOD_MAX} nanoseconds, found {period}", at)
    slots = _slots(reader)
    body = _Statements(reader, ValueReader(reader, around, slots, 0), around, in_function=False).statement()
    return TypedBlock(ToolBlock(kind, syntax_tree.Block((), span), span, written, period), body, slots)


class _Statements:
    def __init__(self, reader: Reader, values: ValueReader, around: Surroundings, *, in_function: bool) -> None:
        self._reader = reader
        self._values = values
        self._spans = around.spans
        self._in_function = in_function

    def statement(self, leaving: frozenset[Jumping] = frozenset()) -> typed_program.Statement:
        """Read a statement from which the jumps ``leaving`` lead."""
        reader, at = self._reader, self._reader.offset
        number = reader.u8("the kind of a statement")
        if not 1 <= number <= len(StatementKind):
            reader.fail(f"expected the kind of a statement, found {number}", at)
        self._values.deeper()
        kind = StatementKind(number)
        if kind is StatementKind.STEPS:
            found: typed_program.Statement = typed_program.Steps(self._several(leaving))
        else:
            found = self._of_kind(kind, _span(reader, self._spans), leaving, at)
        self._values.depth -= 1
        return found

    def _several(self, leaving: frozenset[Jumping]) -> tuple[typed_program.Statement, ...]:
        return tuple(self.statement(leaving) for _ in range(self._reader.count(_STATEMENT_SIZE, "statements")))

    def _of_kind(
        self, kind: StatementKind, span: Span, leaving: frozenset[Jumping], at: int
    ) -> typed_program.Statement:
        reader, values = self._reader, self._values
        match kind:
            case StatementKind.EVALUATE:
                return typed_program.Evaluate(values.value("a value"), span)
            case StatementKind.LOG:
                template = reader.text("a template")
                return typed_program.Log(0, values.items(), template, span)
            case StatementKind.TALLY:
                return self._tally(span)
            case StatementKind.UNTALLY:
                table = values.table()
                return typed_program.Untally(table.name, values.keys(table), span)
            case StatementKind.SHOW:
                table, rows = values.table(), reader.u32("the number of rows")
                return typed_program.Show(table.name, None if rows == NONE else rows, span)
            case StatementKind.CLEAR:
                return typed_program.Clear(values.table().name, span)
            case StatementKind.CAT:
                at, path = reader.offset, reader.text("a path")
                if not path or "\0" in path:
                    reader.fail("expected the path of a file, found none", at)
                return typed_program.Cat(path, span)
            case StatementKind.QUIT:
                return typed_program.Quit(span)
            case StatementKind.SELECT:
                condition = values.value("a condition")
                return typed_program.Select(condition, self.statement(leaving), self.statement(leaving), span)
            case StatementKind.LOOP:
                tests_first = reader.flag("what comes first")
                test, step = values.optional(), values.optional()
                return typed_program.Loop(test, step, self.statement(frozenset(Jumping)), tests_first, span)
            case StatementKind.SWITCH:
                return self._switch(span, leaving)
            case StatementKind.BREAK | StatementKind.CONTINUE:
                jumping = Jumping.BREAK if kind is StatementKind.BREAK else Jumping.CONTINUE
                if jumping not in leaving:
                    reader.fail(f"there is nothing that '{jumping.value}' leaves", at)
                return typed_program.Jump(jumping, span)
            case StatementKind.RESULT:
                if not self._in_function:
                    reader.fail("expected no result of a block", at)
                return typed_program.Result(values.optional(), span)
            case StatementKind.END:
                return typed_program.End(typed_program.Ending.RETURN, span)
            case StatementKind.TRY:
                code, address = values.local(), values.local()
                return typed_program.TryCatch(self.statement(leaving), code, address, self.statement(leaving), span)
        raise AssertionError(kind)

    def _tally(self, span: Span) -> typed_program.Tally:
        values, at = self._values, self._reader.offset
        table = values.table()
        keys = values.keys(table)
        if table.keeps_bytes:
            return typed_program.Tally(table.name, keys, values.kept_by(table), span)
        number = values.optional()
        if table.kind.takes_value != (number is not None):
            expected = "a value" if table.kind.takes_value else "no value"
            self._reader.fail(f"expected {expected} for the table '{table.name}'", at)
        return typed_program.Tally(table.name, keys, number, span)

    def _switch(self, span: Span, leaving: frozenset[Jumping]) -> typed_program.Switch:
        reader, at = self._reader, self._reader.offset
        value = self._values.value("a value")
        tests = []
        for _ in range(reader.count(_TEST_SIZE, "labels")):
            has_value, number = reader.flag("whether a label has a value"), reader.wide("a number")
            tests.append(typed_program.Test(number if has_value else None, reader.u32("the number of a statement")))
        statements = self._several(leaving | {Jumping.BREAK})
        if any(test.position > len(statements) for test in tests):
            reader.fail("a label leads to no statement", at)
        return typed_program.Switch(value, statements, tuple(tests), span)
