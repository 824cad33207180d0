"""
Blocks of the tool, and the functions that they call, from bytes.

What is read can be executed, whatever the bytes are: jumps lead out of something, numbers are those of what there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax import tree
from dprobes.dpc.syntax.programtree import PERIOD_MAX, PERIOD_MIN, BlockKind, ToolBlock
from dprobes.dpc.toolblock import ToolProgram
from dprobes.dpc.typedtree import typedstatement
from dprobes.dpc.typedtree.scope import FunctionSignature
from dprobes.dpc.typedtree.typedprogram import TypedBlock, TypedFunction
from dprobes.dpc.typedtree.typedstatement import Jumping
from dprobes.ppdf.fieldcodec import NONE
from dprobes.ppdf.treeforms import SLOTS_MAX, StatementKind, type_of
from dprobes.ppdf.treevalues import Surroundings, ValueReader
from dprobes.ppdf.treewriter import BLOCK_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.ppdf.fieldcodec import Reader
    from dprobes.rpn.program import Program
    from dprobes.source import Span

__all__ = ["read_blocks"]

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
    return TypedBlock(ToolBlock(kind, tree.Block((), span), span, written, period), body, slots)


class _Statements:
    def __init__(self, reader: Reader, values: ValueReader, around: Surroundings, *, in_function: bool) -> None:
        self._reader = reader
        self._values = values
        self._spans = around.spans
        self._in_function = in_function

    def statement(self, leaving: frozenset[Jumping] = frozenset()) -> typedstatement.Statement:
        """Read a statement from which the jumps ``leaving`` lead."""
        reader, at = self._reader, self._reader.offset
        number = reader.u8("the kind of a statement")
        if not 1 <= number <= len(StatementKind):
            reader.fail(f"expected the kind of a statement, found {number}", at)
        self._values.deeper()
        kind = StatementKind(number)
        if kind is StatementKind.STEPS:
            found: typedstatement.Statement = typedstatement.Steps(self._several(leaving))
        else:
            found = self._of_kind(kind, _span(reader, self._spans), leaving, at)
        self._values.depth -= 1
        return found

    def _several(self, leaving: frozenset[Jumping]) -> tuple[typedstatement.Statement, ...]:
        return tuple(self.statement(leaving) for _ in range(self._reader.count(_STATEMENT_SIZE, "statements")))

    def _of_kind(
        self, kind: StatementKind, span: Span, leaving: frozenset[Jumping], at: int
    ) -> typedstatement.Statement:
        reader, values = self._reader, self._values
        match kind:
            case StatementKind.EVALUATE:
                return typedstatement.Evaluate(values.value("a value"), span)
            case StatementKind.LOG:
                template = reader.text("a template")
                return typedstatement.Log(0, values.items(), template, span)
            case StatementKind.TALLY:
                return self._tally(span)
            case StatementKind.UNTALLY:
                table = values.table()
                return typedstatement.Untally(table.name, values.keys(table), span)
            case StatementKind.SHOW:
                table, rows = values.table(), reader.u32("the number of rows")
                return typedstatement.Show(table.name, None if rows == NONE else rows, span)
            case StatementKind.CLEAR:
                return typedstatement.Clear(values.table().name, span)
            case StatementKind.CAT:
                at, path = reader.offset, reader.text("a path")
                if not path or "\0" in path:
                    reader.fail("expected the path of a file, found none", at)
                return typedstatement.Cat(path, span)
            case StatementKind.QUIT:
                return typedstatement.Quit(span)
            case StatementKind.SELECT:
                condition = values.value("a condition")
                return typedstatement.Select(condition, self.statement(leaving), self.statement(leaving), span)
            case StatementKind.LOOP:
                tests_first = reader.flag("what comes first")
                test, step = values.optional(), values.optional()
                return typedstatement.Loop(test, step, self.statement(frozenset(Jumping)), tests_first, span)
            case StatementKind.SWITCH:
                return self._switch(span, leaving)
            case StatementKind.BREAK | StatementKind.CONTINUE:
                jumping = Jumping.BREAK if kind is StatementKind.BREAK else Jumping.CONTINUE
                if jumping not in leaving:
                    reader.fail(f"there is nothing that '{jumping.value}' leaves", at)
                return typedstatement.Jump(jumping, span)
            case StatementKind.RESULT:
                if not self._in_function:
                    reader.fail("expected no result of a block", at)
                return typedstatement.Result(values.optional(), span)
            case StatementKind.END:
                return typedstatement.End(typedstatement.Ending.RETURN, span)
            case StatementKind.TRY:
                code, address = values.local(), values.local()
                return typedstatement.TryCatch(self.statement(leaving), code, address, self.statement(leaving), span)
        raise AssertionError(kind)

    def _tally(self, span: Span) -> typedstatement.Tally:
        values, at = self._values, self._reader.offset
        table = values.table()
        keys = values.keys(table)
        if table.keeps_bytes:
            return typedstatement.Tally(table.name, keys, values.kept_by(table), span)
        number = values.optional()
        if table.kind.takes_value != (number is not None):
            expected = "a value" if table.kind.takes_value else "no value"
            self._reader.fail(f"expected {expected} for the table '{table.name}'", at)
        return typedstatement.Tally(table.name, keys, number, span)

    def _switch(self, span: Span, leaving: frozenset[Jumping]) -> typedstatement.Switch:
        reader, at = self._reader, self._reader.offset
        value = self._values.value("a value")
        tests = []
        for _ in range(reader.count(_TEST_SIZE, "labels")):
            has_value, number = reader.flag("whether a label has a value"), reader.wide("a number")
            tests.append(typedstatement.Test(number if has_value else None, reader.u32("the number of a statement")))
        statements = self._several(leaving | {Jumping.BREAK})
        if any(test.position > len(statements) for test in tests):
            reader.fail("a label leads to no statement", at)
        return typedstatement.Switch(value, statements, tuple(tests), span)
