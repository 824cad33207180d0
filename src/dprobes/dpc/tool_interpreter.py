"""
An interpreter of the typed tree of blocks that the tool executes.

Values are Python's integers in the range of their types. Blocks act on a ``ToolHost``: variables, tables, output.
"""

from __future__ import annotations

import operator
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, assert_never

from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.process_items import ITEMS_MAX
from dprobes.dpc.typedtree.value_properties import WHOLE_OPERATIONS, cut
from dprobes.dpc.types.c_types import LONG_LONG, Integer, Stack, Void, size_of
from dprobes.rpn.instruction_set import CALL_DEPTH_MAX, PROCESS_NAME_SIZE, ExceptionCode, Token
from dprobes.rpn.word_arithmetic import divided, signed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.dpc.tool_block import ToolProgram
    from dprobes.dpc.typedtree.process_items import ItemKind, ProcessItem
    from dprobes.dpc.typedtree.typed_program import TypedBlock
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["ToolError", "ToolInterpreter"]


class ToolHost(Protocol):
    """Environment of the tool's blocks. Variables and tables are those of the probes."""

    def variable(self, kind: typed_values.VariableKind, index: int) -> int:
        """Return the 64 bits of a variable of this kind; ``index`` is its number in the RPN program."""

    def set_variable(self, kind: typed_values.VariableKind, index: int, value: int) -> None:
        """Store 64 bits in a variable of this kind; ``index`` is its number in the RPN program."""

    def table_value(self, table: int, key: bytes) -> int:
        """Return the number that the table with a number has for a key, or 0 if it has none."""

    def table_kept(self, table: int, key: bytes) -> bytes:
        """Return the string or call stack that a table has for a key, in memory layout, or zeros if it has none."""

    def tally(self, table: int, key: bytes, value: int) -> None:
        """
        Update a table's value for a key with a signed number: count, add, minimum, by the table's kind.

        A missing value is created.
        """

    def add(self, table: int, key: bytes, value: int) -> None:
        """Add a signed number to the one that a table of kind ``last`` keeps for a key; without one, add to 0."""

    def keep(self, table: int, key: bytes, value: bytes) -> None:
        """Store a string or call stack, in memory layout, as a table's value for a key."""

    def delete(self, table: int, key: bytes) -> None:
        """Delete the value that a table, by its number, has for a key."""

    def clear(self, table: int) -> None:
        """Delete all values of a table, by its number."""

    def show(self, table: int, rows: int | None) -> None:
        """Print at most ``rows`` rows of a table, or all if it is None."""

    def items(self, kind: ItemKind, process: int | None) -> Iterable[ProcessItem]:
        """Return the tasks of the system, or the files or mappings of a process; none if it has ended."""

    def cat(self, path: str) -> None:
        """Print the contents of the file ``path``, as ``cat("path")`` in a block does."""

    def print(self, template: str, data: bytes) -> None:
        """Print ``data``, the bytes of a record's items, as ``template`` formats them."""

    def quit(self) -> None:
        """Request the end of the run, as ``exit()`` in a block does."""

    def system(self, name: str) -> int:
        """Return ``pid``, ``tid``, ``uid``, ``procid`` or ``time``, by name, for the process of dprobes itself."""


NAME = "dprobes"
"""The process name in blocks of the tool."""

_STRINGS = (typed_values.Literal, typed_values.ItemText, typed_values.CommName, typed_values.Kept)
"""Kinds of values other than numbers that the tool stores in tables."""

_NO_NUMBERS = (
    *_STRINGS,
    typed_values.Text,
    typed_values.TextChoice,
    typed_values.Bytes,
    typed_values.StackTrace,
    typed_values.NetworkAddress,
)

_COMPARISONS = {"==": operator.eq, "<": operator.lt, "<=": operator.le}
_MASK = (1 << 64) - 1
_WIDE_BITS = 32
_WIDE_WORD = (1 << _WIDE_BITS) - 1


class ToolError(Exception):
    """
    An exception of the language, such as a division by 0, that ended a block of the tool.

    ``code`` is its code, ``span`` the statement that raised it.
    """

    def __init__(self, code: ExceptionCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.span: Span | None = None


class _JumpError(Exception):
    def __init__(self, kind: typed_program.Jumping) -> None:
        self.kind = kind


class _EndError(Exception):
    """Raised by ``exit()`` to end the execution of a block."""


class _ResultError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def _is_text(found: bytes, text: str, *, is_prefix: bool) -> int:
    return int(found.startswith(text.encode()) if is_prefix else found == text.encode())


class ToolInterpreter:
    """Interpreter of a program's ``begin``, ``every`` and ``end`` blocks, which act on ``host``."""

    def __init__(self, program: ToolProgram, host: ToolHost) -> None:
        self._program = program
        self._host = host
        self._numbers = {name: number for number, name in enumerate(program.tables)}

    def execute(self, block: TypedBlock) -> None:
        """Execute a block; raise ``ToolError`` for an exception that ends it early."""
        with suppress(_EndError):
            try:
                _Frame(self._program, self._host, self._numbers, block.slots, ()).execute(block.body)
            except RecursionError:
                raise ToolError(ExceptionCode.CALL_MAX, "calls too deep in each other") from None


class _Frame:
    """
    The variables of a block or of a call of a function, and their execution.

    ``jumps`` counts those of the whole block.
    """

    def __init__(
        self,
        program: ToolProgram,
        host: ToolHost,
        numbers: dict[str, int],
        slots: int,
        arguments: Sequence[int],
        depth: int = 0,
        jumps: list[int] | None = None,
    ) -> None:
        self._program = program
        self._host = host
        self._numbers = numbers
        self._slots = [0] * slots
        self._arguments = list(arguments)
        self._depth = depth
        self._jumps = [0] if jumps is None else jumps
        self._visited = [0]
        """The number of items that loops of this frame have visited; only blocks have such loops."""
        self._strings_of_items: dict[int, tuple[bytes, ...]] = {}

    # Statements

    def execute(self, statement: typed_program.Statement) -> None:
        if isinstance(statement, typed_program.Steps):
            for each in statement.statements:
                self.execute(each)
            return
        try:
            self._execute(statement)
        except ToolError as error:
            error.span = error.span or statement.span
            raise

    def _execute(self, statement: typed_program.Statement) -> None:
        match statement:
            case typed_program.Evaluate(value):
                self.value(value)
            case typed_program.Log(_, items, template):
                self._host.print(template, b"".join(map(self._bytes, items)))
            case typed_program.Tally(
                table,
                keys,
                (
                    typed_values.Literal() | typed_values.ItemText() | typed_values.CommName() | typed_values.Kept()
                ) as value,
            ):
                self._host.keep(self._numbers[table], self._key(keys), self._in_memory(value))
            case typed_program.Tally(table, keys, value):
                assert not isinstance(value, _NO_NUMBERS)
                number = 0 if value is None else self.value(value)
                self._host.tally(self._numbers[table], self._key(keys), LONG_LONG.cut(number))
            case typed_program.Addition(table, keys, added):
                number = LONG_LONG.cut(self.value(added))
                self._host.add(self._numbers[table], self._key(keys), number)
            case typed_program.Untally(table, keys):
                self._host.delete(self._numbers[table], self._key(keys))
            case typed_program.Show(table, rows):
                self._host.show(self._numbers[table], rows)
            case typed_program.Clear(table):
                self._host.clear(self._numbers[table])
            case typed_program.Cat(path):
                self._host.cat(path)
            case typed_program.Quit():
                self._host.quit()
                raise _EndError
            case typed_program.Select(condition, then, otherwise):
                if self.value(condition):
                    self.execute(then)
                elif otherwise is not None:
                    self.execute(otherwise)
            case typed_program.Loop():
                self._loop(statement)
            case typed_program.EachItem():
                self._each(statement)
            case typed_program.Switch():
                self._switch(statement)
            case typed_program.Jump(kind):
                raise _JumpError(kind)
            case typed_program.Result(value):
                raise _ResultError(0 if value is None else self.value(value))
            case typed_program.TryCatch():
                self._try(statement)
            case typed_program.End() | typed_program.Skip():
                raise _EndError
            case typed_program.Steps():
                self.execute(statement)
            case _:
                assert_never(statement)

    def _loop(self, loop: typed_program.Loop) -> None:
        tests = loop.tests_first
        while True:
            if tests and loop.condition is not None and not self.value(loop.condition):
                return
            tests = True
            try:
                self.execute(loop.body)
            except _JumpError as jump:
                if jump.kind is typed_program.Jumping.BREAK:
                    return
            if loop.step is not None:
                self.value(loop.step)
            self._jumps[0] += 1
            if self._jumps[0] > self._program.jmpmax:
                raise ToolError(ExceptionCode.JMP_MAX, f"more than {self._program.jmpmax} jumps")

    def _each(self, loop: typed_program.EachItem) -> None:
        process = None if loop.process is None else self.value(loop.process)
        for item in self._host.items(loop.kind, process):
            self._visited[0] += 1
            if self._visited[0] > ITEMS_MAX:
                raise ToolError(
                    ExceptionCode.JMP_MAX, f"the loops of the block have visited more than {ITEMS_MAX} items"
                )
            self._slots[loop.slot : loop.slot + len(item.numbers)] = item.numbers
            self._strings_of_items[loop.number] = item.strings
            try:
                self.execute(loop.body)
            except _JumpError as jump:
                if jump.kind is typed_program.Jumping.BREAK:
                    return

    def _switch(self, switch: typed_program.Switch) -> None:
        value = self.value(switch.value)
        places = {test.value: test.position for test in switch.tests}
        start = places.get(value, places.get(None))
        if start is None:
            return
        try:
            for each in switch.statements[start:]:
                self.execute(each)
        except _JumpError as jump:
            if jump.kind is not typed_program.Jumping.BREAK:
                raise

    def _try(self, statement: typed_program.TryCatch) -> None:
        try:
            self.execute(statement.body)
        except ToolError as error:
            for place, value in ((statement.code, error.code), (statement.address, 0)):
                if place is not None:
                    self._store(place, int(value))
            self.execute(statement.handler)

    # Values

    def value(self, value: typed_values.Value) -> int:
        """Compute a value, with its side effects, and return it in the range of its type."""
        host = self._host
        match value:
            case typed_values.Constant(number):
                return number
            case typed_values.System(name, type_):
                return cut(host.system(name), type_)
            case typed_values.Local() | typed_values.Variable():
                return self._load(value)
            case typed_values.Arithmetic():
                return self._arithmetic(value)
            case typed_values.Negation(operand, type_, is_complement):
                return type_.cut(-self.value(operand) - is_complement)
            case typed_values.Comparison(name, left, right):
                return int(_COMPARISONS[name](self.value(left), self.value(right)))
            case typed_values.Not(operand):
                return int(not self.value(operand))
            case typed_values.Both(left, right):
                return int(self.value(right) != 0) if self.value(left) else 0
            case typed_values.Either(left, right):
                return 1 if self.value(left) else int(self.value(right) != 0)
            case typed_values.Convert(operand, type_):
                number = self.value(operand)
                return 0 if isinstance(type_, Void) else cut(number, type_)
            case typed_values.Assign(target, assigned):
                return self._store(target, self.value(assigned))
            case typed_values.Step():
                return self._step(value)
            case typed_values.Choice(condition, yes, no):
                return self.value(yes if self.value(condition) else no)
            case typed_values.Sequence(left, right):
                self.value(left)
                return self.value(right)
            case typed_values.FunctionCall():
                return self._call(value)
            case typed_values.TableValue(table, keys):
                return host.table_value(self._numbers[table], self._key(keys))
            case typed_values.KeptTest(kept, text, is_prefix):
                return _is_text(self._kept(kept).rstrip(b"\0"), text, is_prefix=is_prefix)
            case typed_values.ItemTest(field, text, is_prefix):
                return _is_text(self._text_of_item(field), text, is_prefix=is_prefix)
            case typed_values.CommTest(text, is_prefix):
                return _is_text(NAME.encode(), text, is_prefix=is_prefix)
            case (
                typed_values.Symbol() | typed_values.Register() | typed_values.Memory() | typed_values.BitField()
                | typed_values.TextTest()
            ):  # fmt: skip
                raise AssertionError(value)  # ``check_block`` rejects them
            case _:
                assert_never(value)

    def _step(self, step: typed_values.Step) -> int:
        before = self.value(step.target)
        after = self._store(step.target, cut(before + step.amount, step.type))
        return before if step.is_postfix else after

    def _load(self, variable: typed_values.Local | typed_values.Variable) -> int:
        if isinstance(variable, typed_values.Local):
            return self._slots[variable.slot] if variable.slot >= 0 else self._arguments[-variable.slot - 1]
        host, kind, index = self._host, variable.kind, self._index(variable)
        word = host.variable(kind, index)
        if self._is_wide(variable.type):
            word = word & _WIDE_WORD | (host.variable(kind, index + 1) & _WIDE_WORD) << _WIDE_BITS
        return cut(word, variable.type)

    def _arithmetic(self, value: typed_values.Arithmetic) -> int:
        left, right, type_ = self.value(value.left), self.value(value.right), value.type
        match value.operator:
            case "<<":
                result = left << right if 0 <= right < type_.bits else 0
            case ">>":
                result = left >> min(right & _MASK, type_.bits)
            case "/" | "%" as name:
                if not right:
                    raise ToolError(ExceptionCode.DIVIDE_BY_ZERO, "a division by zero")
                result = divided(left, right)[name == "%"]
            case name:
                result = WHOLE_OPERATIONS[name](left, right)
        return type_.cut(result)

    def _index(self, variable: typed_values.Variable) -> int:
        if variable.index is None:
            return variable.first
        return variable.first + self.value(variable.index) * (2 if self._is_wide(variable.type) else 1)

    def _is_wide(self, type_: CType) -> bool:
        """Return True if a number takes two cells. The first of them has the low word."""
        return (size_of(type_) or 0) > self._program.word_size

    def _store(self, target: typed_values.Place, value: int) -> int:
        match target:
            case typed_values.Local(slot, type_):
                value = cut(value, type_)
                if slot >= 0:
                    self._slots[slot] = value
                else:
                    self._arguments[-slot - 1] = value
            case typed_values.Variable(kind, _, type_) if self._is_wide(type_):
                value, index = cut(value, type_), self._index(target)
                self._host.set_variable(kind, index, value & _WIDE_WORD)
                self._host.set_variable(kind, index + 1, value >> _WIDE_BITS & _WIDE_WORD)
            case typed_values.Variable(kind, _, type_):
                value = cut(value, type_)
                self._host.set_variable(kind, self._index(target), value & _MASK)
            case typed_values.Register() | typed_values.Memory() | typed_values.BitField():
                raise AssertionError(target)  # ``check_block`` rejects them
            case _:
                assert_never(target)
        return value

    def _call(self, call: typed_values.FunctionCall) -> int:
        cells: list[int] = []
        for each in call.arguments:
            cells += [*([0] if self._is_wide(each.type) else []), self.value(each)]
        function = self._program.functions[call.name]
        if self._depth >= CALL_DEPTH_MAX:
            raise ToolError(ExceptionCode.CALL_MAX, f"more than {CALL_DEPTH_MAX} calls in each other")
        frame = _Frame(self._program, self._host, self._numbers, function.slots, cells, self._depth + 1, self._jumps)
        try:
            frame.execute(function.body)
        except _ResultError as result:
            return result.value
        return 0

    # Bytes

    def _bytes(self, item: typed_values.Argument) -> bytes:
        """Return a ``printf`` argument as the bytes that a handler would log for it; empty for the process name."""
        match item:
            case typed_values.CommName():
                return b""  # it is in the header
            case typed_values.Kept(_, _, _, Stack()):
                return self._stack_item(self._kept(item))
            case typed_values.ItemText(_, _, limit):
                text = self._text_of_item(item)[:limit]
                return bytes([Token.STRING]) + len(text).to_bytes(2, "little") + text
            case typed_values.Kept() | typed_values.Literal():
                text = self._in_memory(item).partition(b"\0")[0]
                return bytes([Token.STRING]) + len(text).to_bytes(2, "little") + text
        assert not isinstance(item, _NO_NUMBERS)
        size = size_of(item.type) or self._program.word_size
        return (self.value(item) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def _text_of_item(self, text: typed_values.ItemText) -> bytes:
        """Return a string of the current item of a loop; empty in a tree that was read and has no such loop around."""
        found = self._strings_of_items.get(text.number, ())
        return found[text.index] if text.index < len(found) else b""

    def _kept(self, kept: typed_values.Kept) -> bytes:
        """Return the bytes that a table has for the keys of ``kept``: a string or call stack, padded with zeros."""
        return self._host.table_kept(self._numbers[kept.table], self._key(kept.keys))

    def _stack_item(self, found: bytes) -> bytes:
        """Return a call stack, ``found`` in a table, as an item of a record: token, number of frames, addresses."""
        words, size = found.rstrip(b"\0"), self._program.word_size
        count = -(-len(words) // size)
        return bytes([Token.KERNEL_STACK]) + count.to_bytes(2, "little") + words.ljust(size * count, b"\0")

    def _in_memory(
        self, value: typed_values.Literal | typed_values.ItemText | typed_values.CommName | typed_values.Kept
    ) -> bytes:
        """Return a string or call stack as a table stores it: padded with zeros to the size of the key or value."""
        match value:
            case typed_values.Literal(text, limit):
                return text.encode().ljust((limit // 8 + 1) * 8, b"\0")
            case typed_values.ItemText(_, _, limit):
                return self._text_of_item(value)[:limit].ljust((limit // 8 + 1) * 8, b"\0")
            case typed_values.CommName():
                return NAME.encode().ljust(PROCESS_NAME_SIZE, b"\0")
            case typed_values.Kept():
                return self._kept(value)

    def _key(self, keys: Sequence[typed_values.Argument]) -> bytes:
        found = []
        for key in keys:
            if isinstance(key, _STRINGS):
                found.append(self._in_memory(key))
                continue
            assert not isinstance(key, _NO_NUMBERS)
            bits = 8 * max(self._program.word_size, size_of(key.type) or 0)
            word = self.value(key) & ((1 << bits) - 1)
            has_sign = isinstance(key.type, Integer) and key.type.is_signed  # the key field of the table is signed, too
            found.append((signed(word, bits) if has_sign else word).to_bytes(8, sys.byteorder, signed=has_sign))
        return b"".join(found)
