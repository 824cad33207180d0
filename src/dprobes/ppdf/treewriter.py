"""The typed trees of blocks of the tool, and of the functions that they call, to bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax.programtree import BlockKind
from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.typedtree.typed import VariableKind
from dprobes.errors import FormatError
from dprobes.ppdf.fieldcodec import NONE, Writer
from dprobes.ppdf.treeforms import DEPTH_MAX, StatementKind, ValueKind, byte_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.dpc.types.ctype import CType
    from dprobes.ppdf.sources import Spans
    from dprobes.source import Span

__all__ = ["BLOCK_KINDS", "write_blocks"]

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

    def statement(self, statement: typedstatement.Statement | None) -> None:
        """Write a statement; None as one that does nothing."""
        out = self.out
        self._deeper()
        match statement:
            case None:
                self._begin(StatementKind.STEPS)
                out.u32(0)
            case typedstatement.Steps(statements):
                self._begin(StatementKind.STEPS)
                out.u32(len(statements))
                for each in statements:
                    self.statement(each)
            case typedstatement.Evaluate(value, span):
                self._begin(StatementKind.EVALUATE, span)
                self._value(value)
            case typedstatement.Log(_, items, template, span):
                self._begin(StatementKind.LOG, span)
                out.block(template.encode())
                self._values(items)
            case typedstatement.Tally(table, keys, number, span):
                self._begin(StatementKind.TALLY, span)
                out.u32(self._tables[table])
                self._values(keys)
                self._value(number)
            case typedstatement.Untally(table, keys, span):
                self._begin(StatementKind.UNTALLY, span)
                out.u32(self._tables[table])
                self._values(keys)
            case typedstatement.Show(table, rows, span):
                self._begin(StatementKind.SHOW, span)
                out.u32(self._tables[table])
                out.u32(NONE if rows is None else rows)
            case typedstatement.Clear(table, span):
                self._begin(StatementKind.CLEAR, span)
                out.u32(self._tables[table])
            case typedstatement.Cat(path, span):
                self._begin(StatementKind.CAT, span)
                out.block(path.encode())
            case typedstatement.Quit(span):
                self._begin(StatementKind.QUIT, span)
            case typedstatement.Select(condition, then, otherwise, span):
                self._begin(StatementKind.SELECT, span)
                self._value(condition)
                self.statement(then)
                self.statement(otherwise)
            case typedstatement.Loop(test, step, body, tests_first, span):
                self._begin(StatementKind.LOOP, span)
                out.u8(int(tests_first))
                self._value(test)
                self._value(step)
                self.statement(body)
            case typedstatement.Switch():
                self._switch(statement)
            case typedstatement.Jump(kind, span):
                breaks = kind is typedstatement.Jumping.BREAK
                self._begin(StatementKind.BREAK if breaks else StatementKind.CONTINUE, span)
            case typedstatement.Result(result, span):
                self._begin(StatementKind.RESULT, span)
                self._value(result)
            case typedstatement.End(_, span) | typedstatement.Skip(_, span):
                self._begin(StatementKind.END, span)
            case typedstatement.TryCatch(body, code, address, handler, span):
                self._begin(StatementKind.TRY, span)
                self._value(code)
                self._value(address)
                self.statement(body)
                self.statement(handler)
        self._depth -= 1

    def _switch(self, switch: typedstatement.Switch) -> None:
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

    def _values(self, values: Sequence[typed.Argument]) -> None:
        self.out.u32(len(values))
        for each in values:
            self._value(each)

    def _value(self, value: typed.Argument | None) -> None:
        out = self.out
        self._deeper()
        match value:
            case None:
                out.u8(ValueKind.NONE)
            case typed.Constant(number, type_):
                self._typed(ValueKind.CONSTANT, type_)
                out.wide(number)
            case typed.System(name, type_):
                self._typed(ValueKind.SYSTEM, type_)
                out.string(name)
            case typed.Local(slot, type_):
                self._typed(ValueKind.LOCAL if slot >= 0 else ValueKind.PARAMETER, type_)
                out.u32(slot if slot >= 0 else -slot - 1)
            case typed.Variable(kind, first, type_, index):
                self._typed(ValueKind.VARIABLE if kind is VariableKind.LOCAL else ValueKind.GLOBAL, type_)
                out.u32(first)
                self._value(index)
            case typed.Arithmetic(operator, left, right, type_):
                self._typed(ValueKind.ARITHMETIC, type_, left, right, operator=operator)
            case typed.Negation(operand, type_, is_complement):
                self._typed(ValueKind.COMPLEMENT if is_complement else ValueKind.NEGATION, type_, operand)
            case typed.Comparison(operator, left, right, _, type_):
                self._typed(ValueKind.COMPARISON, type_, left, right, operator=operator)
            case typed.Not(operand, type_):
                self._typed(ValueKind.NOT, type_, operand)
            case typed.Both(left, right, type_):
                self._typed(ValueKind.BOTH, type_, left, right)
            case typed.Either(left, right, type_):
                self._typed(ValueKind.EITHER, type_, left, right)
            case typed.Convert(operand, type_):
                self._typed(ValueKind.CONVERT, type_, operand)
            case typed.Assign(target, assigned, type_):
                self._typed(ValueKind.ASSIGN, type_, target, assigned)
            case typed.Step(target, amount, is_postfix, type_):
                self._typed(ValueKind.STEP, type_, target)
                out.wide(amount)
                out.u8(int(is_postfix))
            case typed.Choice(condition, yes, no, type_):
                self._typed(ValueKind.CHOICE, type_, condition, yes, no)
            case typed.Sequence(left, right, type_):
                self._typed(ValueKind.SEQUENCE, type_, left, right)
            case typed.FunctionCall(name, arguments, type_, span):
                self._typed(ValueKind.CALL, type_)
                out.u32(self.functions.setdefault(name, len(self.functions)))
                out.u32(self._spans.number(span))
                self._values(arguments)
            case typed.TableValue(table, keys, type_):
                self._typed(ValueKind.TABLE_VALUE, type_)
                out.u32(self._tables[table])
                self._values(keys)
            case typed.CommTest(text, is_prefix, type_):
                self._typed(ValueKind.COMM_TEST, type_)
                out.block(text.encode())
                out.u8(int(is_prefix))
            case typed.CommName(type_):
                self._typed(ValueKind.COMM, type_)
            case typed.Literal(text, limit, type_):
                self._typed(ValueKind.LITERAL, type_)
                out.block(text.encode())
                out.u32(limit)
            case typed.Kept(table, keys, _, type_):
                self._typed(ValueKind.KEPT, type_)
                out.u32(self._tables[table])
                self._values(keys)
            case typed.KeptTest(kept, text, is_prefix, type_):
                self._typed(ValueKind.KEPT_TEST, type_)
                self._value(kept)
                out.block(text.encode())
                out.u8(int(is_prefix))
            case _:
                raise AssertionError(value)  # ``toolblock.check_block`` refuses what needs a hit
        self._depth -= 1

    def _typed(self, kind: ValueKind, type_: CType, *operands: typed.Value, operator: str = "") -> None:
        self.out.u8(kind)
        self.out.u8(byte_of(type_))
        if operator:
            self.out.string(operator)
        for each in operands:
            self._value(each)
