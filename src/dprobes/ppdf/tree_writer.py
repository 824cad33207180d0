"""The typed trees of blocks of the tool, and of the functions that they call, to bytes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dprobes.dpc.syntax.syntax_tree import BlockKind
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.typed_values import VariableKind
from dprobes.dpc.typedtree.value_properties import integer_of
from dprobes.dpc.types.c_types import BOOL, VOID, CType, Integer
from dprobes.errors import FormatError
from dprobes.ppdf.ppdf_sections import NONE, Writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.ppdf.program_definitions import Spans
    from dprobes.source_text import Span

__all__ = [
    "BLOCK_KINDS",
    "DEPTH_MAX",
    "OPERATORS",
    "SLOTS_MAX",
    "StatementKind",
    "ValueKind",
    "type_of",
    "write_blocks",
]

# The typed tree of DProbes C in a file: the numbers of its statements and values, and its types as one byte each.
#
# A type is what a cell of it holds: its size in bytes, whether it has a sign, and whether it is ``_Bool``; pointers are
# unsigned numbers, enumerations those that they are held as.


DEPTH_MAX = 250
"""How deep statements and values may stand in each other."""

SLOTS_MAX = 1 << 12
"""How many variables a block or function has at most."""

OPERATORS = ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")
"""The operators of arithmetic."""


class StatementKind(enum.IntEnum):
    """The number before a statement."""

    STEPS = 1
    EVALUATE = 2
    LOG = 3
    TALLY = 4
    UNTALLY = 5
    SHOW = 6
    CLEAR = 7
    QUIT = 8
    SELECT = 9
    LOOP = 10
    SWITCH = 11
    BREAK = 12
    CONTINUE = 13
    RESULT = 14
    END = 15
    TRY = 16
    CAT = 17


class ValueKind(enum.IntEnum):
    """The number before a value; before what may be left out, NONE says that it is."""

    NONE = 0
    CONSTANT = 1
    SYSTEM = 2
    LOCAL = 3
    PARAMETER = 4
    VARIABLE = 5
    GLOBAL = 6
    ARITHMETIC = 7
    NEGATION = 8
    COMPLEMENT = 9
    COMPARISON = 10
    NOT = 11
    BOTH = 12
    EITHER = 13
    CONVERT = 14
    ASSIGN = 15
    STEP = 16
    CHOICE = 17
    SEQUENCE = 18
    CALL = 19
    TABLE_VALUE = 20
    COMM_TEST = 21
    COMM = 22
    KEPT = 23
    KEPT_TEST = 24
    LITERAL = 25


_SIGNED, _BOOL = 0x80, 0x40
_SIZES = (1, 2, 4, 8)
_TYPES = {
    size | sign: Integer(f"{'' if sign else 'u'}int{8 * size}_t", size, is_signed=bool(sign), rank=_SIZES.index(size))
    for size in _SIZES
    for sign in (0, _SIGNED)
}


def byte_of(type_: CType) -> int:
    """Return the byte of a type; 0 if it has no numbers."""
    integer = integer_of(type_)
    if integer is None:
        return 0
    if integer.is_bool:
        return _BOOL | 1
    if integer.size not in _SIZES:
        raise FormatError(f"a PPDF holds numbers of at most 8 bytes, not '{type_}'")
    return integer.size | (_SIGNED if integer.is_signed else 0)


def type_of(byte: int) -> CType | None:
    """Return the type of a byte; None if it is none's."""
    if byte == 0:
        return VOID
    return BOOL if byte == _BOOL | 1 else _TYPES.get(byte)


BLOCK_KINDS = tuple(BlockKind)
"""The kinds of blocks by their numbers."""


def write_blocks(out: Writer, tool: ToolProgram, spans: Spans) -> None:
    """Write what the tool executes; nothing of functions that no block calls."""
    trees = _Trees(Writer(out.all_strings), spans, {name: n for n, name in enumerate(tool.tables)})
    for block in tool.blocks:
        trees.out.u8(BLOCK_KINDS.index(block.block.kind))
        trees.out.string(block.block.written)
        trees.out.u32(spans.number(block.block.span))
        trees.out.u64(block.block.period)
        trees.out.u32(block.slots)
        trees.statement(block.body)
    written = 0
    while written < len(trees.functions):  # each may call others
        trees.statement(tool.functions[list(trees.functions)[written]].body)
        written += 1
    out.u32(len(tool.blocks))
    out.u8(tool.word_size)
    out.u32(tool.jmpmax)
    out.u32(len(trees.functions))
    for name in trees.functions:
        signature = tool.functions[name].signature
        out.string(name)
        out.u32(spans.number(signature.span))
        out.u8(byte_of(signature.type))
        out.block(bytes(byte_of(each) for each in signature.parameters))
        out.u32(tool.functions[name].slots)
    out.data += trees.out.data


class _Trees:
    def __init__(self, out: Writer, spans: Spans, tables: Mapping[str, int]) -> None:
        self.out = out
        self.functions: dict[str, int] = {}
        """The functions that are called, by their numbers."""
        self._spans = spans
        self._tables = tables
        self._depth = 0

    def statement(self, statement: typed_program.Statement | None) -> None:
        """Write a statement; None as one that does nothing."""
        out = self.out
        self._deeper()
        match statement:
            case None:
                self._begin(StatementKind.STEPS)
                out.u32(0)
            case typed_program.Steps(statements):
                self._begin(StatementKind.STEPS)
                out.u32(len(statements))
                for each in statements:
                    self.statement(each)
            case typed_program.Evaluate(value, span):
                self._begin(StatementKind.EVALUATE, span)
                self._value(value)
            case typed_program.Log(_, items, template, span):
                self._begin(StatementKind.LOG, span)
                out.block(template.encode())
                self._values(items)
            case typed_program.Tally(table, keys, number, span):
                self._begin(StatementKind.TALLY, span)
                out.u32(self._tables[table])
                self._values(keys)
                self._value(number)
            case typed_program.Untally(table, keys, span):
                self._begin(StatementKind.UNTALLY, span)
                out.u32(self._tables[table])
                self._values(keys)
            case typed_program.Show(table, rows, span):
                self._begin(StatementKind.SHOW, span)
                out.u32(self._tables[table])
                out.u32(NONE if rows is None else rows)
            case typed_program.Clear(table, span):
                self._begin(StatementKind.CLEAR, span)
                out.u32(self._tables[table])
            case typed_program.Cat(path, span):
                self._begin(StatementKind.CAT, span)
                out.block(path.encode())
            case typed_program.Quit(span):
                self._begin(StatementKind.QUIT, span)
            case typed_program.Select(condition, then, otherwise, span):
                self._begin(StatementKind.SELECT, span)
                self._value(condition)
                self.statement(then)
                self.statement(otherwise)
            case typed_program.Loop(test, step, body, tests_first, span):
                self._begin(StatementKind.LOOP, span)
                out.u8(int(tests_first))
                self._value(test)
                self._value(step)
                self.statement(body)
            case typed_program.Switch():
                self._switch(statement)
            case typed_program.Jump(kind, span):
                breaks = kind is typed_program.Jumping.BREAK
                self._begin(StatementKind.BREAK if breaks else StatementKind.CONTINUE, span)
            case typed_program.Result(result, span):
                self._begin(StatementKind.RESULT, span)
                self._value(result)
            case typed_program.End(_, span) | typed_program.Skip(_, span):
                self._begin(StatementKind.END, span)
            case typed_program.TryCatch(body, code, address, handler, span):
                self._begin(StatementKind.TRY, span)
                self._value(code)
                self._value(address)
                self.statement(body)
                self.statement(handler)
        self._depth -= 1

    def _switch(self, switch: typed_program.Switch) -> None:
        out = self.out
        self._begin(StatementKind.SWITCH, switch.span)
        self._value(switch.value)
        out.u32(len(switch.tests))
        for test in switch.tests:
            out.u8(int(test.value is not None))
            out.wide(test.value or 0)
            out.u32(test.position)
        out.u32(len(switch.statements))
        for each in switch.statements:
            self.statement(each)

    def _begin(self, kind: StatementKind, span: Span | None = None) -> None:
        self.out.u8(kind)
        if kind is not StatementKind.STEPS:
            self.out.u32(self._spans.number(span))

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FormatError(
                f"the blocks of the tool have statements and values that stand deeper than {DEPTH_MAX} in each other",
                hint="put a part of them into a function",
            )

    # Values

    def _values(self, values: Sequence[typed_values.Argument]) -> None:
        self.out.u32(len(values))
        for each in values:
            self._value(each)

    def _value(self, value: typed_values.Argument | None) -> None:
        out = self.out
        self._deeper()
        match value:
            case None:
                out.u8(ValueKind.NONE)
            case typed_values.Constant(number, type_):
                self._typed(ValueKind.CONSTANT, type_)
                out.wide(number)
            case typed_values.System(name, type_):
                self._typed(ValueKind.SYSTEM, type_)
                out.string(name)
            case typed_values.Local(slot, type_):
                self._typed(ValueKind.LOCAL if slot >= 0 else ValueKind.PARAMETER, type_)
                out.u32(slot if slot >= 0 else -slot - 1)
            case typed_values.Variable(kind, first, type_, index):
                self._typed(ValueKind.VARIABLE if kind is VariableKind.LOCAL else ValueKind.GLOBAL, type_)
                out.u32(first)
                self._value(index)
            case typed_values.Arithmetic(operator, left, right, type_):
                self._typed(ValueKind.ARITHMETIC, type_, left, right, operator=operator)
            case typed_values.Negation(operand, type_, is_complement):
                self._typed(ValueKind.COMPLEMENT if is_complement else ValueKind.NEGATION, type_, operand)
            case typed_values.Comparison(operator, left, right, _, type_):
                self._typed(ValueKind.COMPARISON, type_, left, right, operator=operator)
            case typed_values.Not(operand, type_):
                self._typed(ValueKind.NOT, type_, operand)
            case typed_values.Both(left, right, type_):
                self._typed(ValueKind.BOTH, type_, left, right)
            case typed_values.Either(left, right, type_):
                self._typed(ValueKind.EITHER, type_, left, right)
            case typed_values.Convert(operand, type_):
                self._typed(ValueKind.CONVERT, type_, operand)
            case typed_values.Assign(target, assigned, type_):
                self._typed(ValueKind.ASSIGN, type_, target, assigned)
            case typed_values.Step(target, amount, is_postfix, type_):
                self._typed(ValueKind.STEP, type_, target)
                out.wide(amount)
                out.u8(int(is_postfix))
            case typed_values.Choice(condition, yes, no, type_):
                self._typed(ValueKind.CHOICE, type_, condition, yes, no)
            case typed_values.Sequence(left, right, type_):
                self._typed(ValueKind.SEQUENCE, type_, left, right)
            case typed_values.FunctionCall(name, arguments, type_, span):
                self._typed(ValueKind.CALL, type_)
                out.u32(self.functions.setdefault(name, len(self.functions)))
                out.u32(self._spans.number(span))
                self._values(arguments)
            case typed_values.TableValue(table, keys, type_):
                self._typed(ValueKind.TABLE_VALUE, type_)
                out.u32(self._tables[table])
                self._values(keys)
            case typed_values.CommTest(text, is_prefix, type_):
                self._typed(ValueKind.COMM_TEST, type_)
                out.block(text.encode())
                out.u8(int(is_prefix))
            case typed_values.CommName(type_):
                self._typed(ValueKind.COMM, type_)
            case typed_values.Literal(text, limit, type_):
                self._typed(ValueKind.LITERAL, type_)
                out.block(text.encode())
                out.u32(limit)
            case typed_values.Kept(table, keys, _, type_):
                self._typed(ValueKind.KEPT, type_)
                out.u32(self._tables[table])
                self._values(keys)
            case typed_values.KeptTest(kept, text, is_prefix, type_):
                self._typed(ValueKind.KEPT_TEST, type_)
                self._value(kept)
                out.block(text.encode())
                out.u8(int(is_prefix))
            case _:
                raise AssertionError(value)  # ``tool_block.check_block`` refuses what needs a hit
        self._depth -= 1

    def _typed(self, kind: ValueKind, type_: CType, *operands: typed_values.Value, operator: str = "") -> None:
        self.out.u8(kind)
        self.out.u8(byte_of(type_))
        if operator:
            self.out.string(operator)
        for each in operands:
            self._value(each)
