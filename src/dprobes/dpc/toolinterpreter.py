"""
The meaning of blocks that the tool executes: an interpreter of their typed tree.

Values are Python's numbers, as their types hold them. What blocks act on is a ``ToolHost``: variables, tables, output.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed, typedstatement
from dprobes.dpc.typedtree.folder import cut
from dprobes.dpc.types.ctype import LONG_LONG, Integer, Stack, Void, size_of
from dprobes.rpn.arithmetic import divided, signed
from dprobes.rpn.isa import PROCESS_NAME_SIZE, ExceptionCode, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.toolblock import ToolProgram
    from dprobes.dpc.toolhost import ToolHost
    from dprobes.dpc.typedtree.typedprogram import TypedBlock
    from dprobes.dpc.types.ctype import CType
    from dprobes.source import Span

__all__ = ["ToolError", "ToolInterpreter"]

NAME = "dprobes"
"""The process name in blocks of the tool."""

_CALLS_MAX = 100
"""How deep calls may be nested, as on the RPN stack of a hit."""

_STRINGS = (typed.Literal, typed.CommName, typed.Kept)
"""What the tool puts into tables that is no number."""

_NO_NUMBERS = (*_STRINGS, typed.Text, typed.TextChoice, typed.Bytes, typed.StackTrace, typed.NetworkAddress)

_MASK = (1 << 64) - 1
_WIDE_BITS = 32
_WIDE_WORD = (1 << _WIDE_BITS) - 1


class ToolError(Exception):
    """Report what has ended a block; ``code`` is that of the exception, and ``span`` where it came."""

    def __init__(self, code: ExceptionCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.span: Span | None = None


class _JumpError(Exception):
    def __init__(self, kind: typedstatement.Jumping) -> None:
        self.kind = kind


def _unsigned(word: int) -> bytes:
    return word.to_bytes(8, sys.byteorder)


class _EndError(Exception):
    """The end of a block."""


class _ResultError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class ToolInterpreter:
    """Execute the blocks of a program."""

    def __init__(self, program: ToolProgram, host: ToolHost) -> None:
        self._program = program
        self._host = host
        self._numbers = {name: number for number, name in enumerate(program.tables)}

    def execute(self, block: TypedBlock) -> None:
        """Execute a block; raise ``ToolError`` for what ends it before its time."""
        with suppress(_EndError):
            try:
                _Frame(self._program, self._host, self._numbers, block.slots, ()).execute(block.body)
            except RecursionError:
                raise ToolError(ExceptionCode.CALL_MAX, "calls too deep in each other") from None


class _Frame:
    """A block or a call of a function, with its variables; ``counts`` has the jumps that were taken."""

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

    # Statements

    def execute(self, statement: typedstatement.Statement) -> None:
        if isinstance(statement, typedstatement.Steps):
            for each in statement.statements:
                self.execute(each)
            return
        try:
            self._execute(statement)
        except ToolError as error:
            error.span = error.span or statement.span
            raise

    def _execute(self, statement: typedstatement.Statement) -> None:
        match statement:
            case typedstatement.Evaluate(value):
                self.value(value)
            case typedstatement.Log(_, items, template):
                self._host.print(template, b"".join(map(self._bytes, items)))
            case typedstatement.Tally(table, keys, (typed.Literal() | typed.CommName() | typed.Kept()) as value):
                self._host.keep(self._numbers[table], self._key(keys), self._in_memory(value))
            case typedstatement.Tally(table, keys, value):
                assert not isinstance(value, _NO_NUMBERS)
                number = 0 if value is None else self.value(value)
                self._host.tally(self._numbers[table], self._key(keys), LONG_LONG.cut(number))
            case typedstatement.Untally(table, keys):
                self._host.delete(self._numbers[table], self._key(keys))
            case typedstatement.Show(table, rows):
                self._host.show(self._numbers[table], rows)
            case typedstatement.Clear(table):
                self._host.clear(self._numbers[table])
            case typedstatement.Cat(path):
                self._host.cat(path)
            case typedstatement.Quit():
                self._host.quit()
                raise _EndError
            case typedstatement.Select(condition, then, otherwise):
                if self.value(condition):
                    self.execute(then)
                elif otherwise is not None:
                    self.execute(otherwise)
            case typedstatement.Loop():
                self._loop(statement)
            case typedstatement.Switch():
                self._switch(statement)
            case typedstatement.Jump(kind):
                raise _JumpError(kind)
            case typedstatement.Result(value):
                raise _ResultError(0 if value is None else self.value(value))
            case typedstatement.TryCatch():
                self._try(statement)
            case _:
                raise _EndError

    def _loop(self, loop: typedstatement.Loop) -> None:
        tests = loop.tests_first
        while True:
            if tests and loop.condition is not None and not self.value(loop.condition):
                return
            tests = True
            try:
                self.execute(loop.body)
            except _JumpError as jump:
                if jump.kind is typedstatement.Jumping.BREAK:
                    return
            if loop.step is not None:
                self.value(loop.step)
            self._jumps[0] += 1
            if self._jumps[0] > self._program.jmpmax:
                raise ToolError(ExceptionCode.JMP_MAX, f"more than {self._program.jmpmax} jumps")

    def _switch(self, switch: typedstatement.Switch) -> None:
        value = self.value(switch.value)
        places = {test.value: test.position for test in switch.tests}
        start = places.get(value, places.get(None))
        if start is None:
            return
        try:
            for each in switch.statements[start:]:
                self.execute(each)
        except _JumpError as jump:
            if jump.kind is not typedstatement.Jumping.BREAK:
                raise

    def _try(self, statement: typedstatement.TryCatch) -> None:
        try:
            self.execute(statement.body)
        except ToolError as error:
            for place, value in ((statement.code, error.code), (statement.address, 0)):
                if place is not None:
                    self._store(place, int(value))
            self.execute(statement.handler)

    # Values

    def value(self, value: typed.Value) -> int:
        """Return a value, as its type holds it."""
        host = self._host
        match value:
            case typed.Constant(number):
                return number
            case typed.System(name, type_):
                return cut(host.system(name), type_)
            case typed.Local(slot):
                return self._slots[slot] if slot >= 0 else self._arguments[-slot - 1]
            case typed.Variable(kind, _, type_) if self._is_wide(type_):
                index = self._index(value)
                words = [host.variable(kind, index + n) & _WIDE_WORD for n in (0, 1)]
                return cut(words[0] | words[1] << _WIDE_BITS, type_)
            case typed.Variable(kind, _, type_):
                return cut(host.variable(kind, self._index(value)), type_)
            case typed.Arithmetic():
                return self._arithmetic(value)
            case typed.Negation(operand, type_, is_complement):
                number = self.value(operand)
                return type_.cut(~number if is_complement else -number)
            case typed.Comparison(operator, left, right):
                one, other = self.value(left), self.value(right)
                return int(one == other if operator == "==" else one < other if operator == "<" else one <= other)
            case typed.Not(operand):
                return int(not self.value(operand))
            case typed.Both(left, right):
                return int(bool(self.value(left)) and bool(self.value(right)))
            case typed.Either(left, right):
                return int(bool(self.value(left)) or bool(self.value(right)))
            case typed.Convert(operand, type_):
                number = self.value(operand)
                return 0 if isinstance(type_, Void) else cut(number, type_)
            case typed.Assign(target, assigned):
                return self._store(target, self.value(assigned))
            case typed.Step(target, amount, is_postfix, type_):
                before = self.value(target)
                after = self._store(target, cut(before + amount, type_))
                return before if is_postfix else after
            case typed.Choice(condition, yes, no):
                return self.value(yes if self.value(condition) else no)
            case typed.Sequence(left, right):
                self.value(left)
                return self.value(right)
            case typed.FunctionCall(name, arguments, type_):
                cells: list[int] = []
                for each in arguments:
                    cells += [*([0] if self._is_wide(each.type) else []), self.value(each)]
                return self._call(name, cells)
            case typed.TableValue(table, keys):
                return host.table_value(self._numbers[table], self._key(keys))
            case typed.KeptTest(kept, text, is_prefix):
                found = self._kept(kept).rstrip(b"\0")
                return int(found.startswith(text.encode()) if is_prefix else found == text.encode())
            case typed.CommTest(text, is_prefix):
                return int(NAME.startswith(text) if is_prefix else text == NAME)
        raise AssertionError(value)

    def _arithmetic(self, value: typed.Arithmetic) -> int:
        left, right, type_ = self.value(value.left), self.value(value.right), value.type
        match value.operator:
            case "+":
                result = left + right
            case "-":
                result = left - right
            case "*":
                result = left * right
            case "&":
                result = left & right
            case "|":
                result = left | right
            case "^":
                result = left ^ right
            case "<<":
                result = left << right if 0 <= right < type_.bits else 0
            case ">>":
                result = left >> min(right & _MASK, type_.bits)
            case operator:
                if not right:
                    raise ToolError(ExceptionCode.DIVIDE_BY_ZERO, "a division by zero")
                result = divided(left, right)[operator == "%"]
        return type_.cut(result)

    def _index(self, variable: typed.Variable) -> int:
        if variable.index is None:
            return variable.first
        return variable.first + self.value(variable.index) * (2 if self._is_wide(variable.type) else 1)

    def _is_wide(self, type_: CType) -> bool:
        """Return whether a number takes two cells, the low word first."""
        return (size_of(type_) or 0) > self._program.word_size

    def _store(self, target: typed.Place, value: int) -> int:
        match target:
            case typed.Local(slot, type_) if slot >= 0:
                self._slots[slot] = value = cut(value, type_)
            case typed.Local(slot, type_):
                self._arguments[-slot - 1] = value = cut(value, type_)
            case typed.Variable(kind, _, type_) if self._is_wide(type_):
                value, index = cut(value, type_), self._index(target)
                self._host.set_variable(kind, index, value & _WIDE_WORD)
                self._host.set_variable(kind, index + 1, value >> _WIDE_BITS & _WIDE_WORD)
            case typed.Variable(kind, _, type_):
                value = cut(value, type_)
                self._host.set_variable(kind, self._index(target), value & _MASK)
            case _:
                raise AssertionError(target)
        return value

    def _call(self, name: str, arguments: Sequence[int]) -> int:
        function = self._program.functions[name]
        if self._depth >= _CALLS_MAX:
            raise ToolError(ExceptionCode.CALL_MAX, f"more than {_CALLS_MAX} calls in each other")
        frame = _Frame(
            self._program, self._host, self._numbers, function.slots, arguments, self._depth + 1, self._jumps
        )
        try:
            frame.execute(function.body)
        except _ResultError as result:
            return result.value
        return 0

    # Bytes

    def _bytes(self, item: typed.Argument) -> bytes:
        """Return the bytes that a handler would log of a value."""
        match item:
            case typed.CommName():
                return b""  # it is in the header
            case typed.Kept(_, _, _, Stack()):
                return self._stack_item(self._kept(item))
            case typed.Kept() | typed.Literal():
                text = self._in_memory(item).partition(b"\0")[0]
                return bytes([Token.STRING]) + len(text).to_bytes(2, "little") + text
        assert not isinstance(item, _NO_NUMBERS)
        size = size_of(item.type) or self._program.word_size
        return (self.value(item) & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def _kept(self, kept: typed.Kept) -> bytes:
        """Return the bytes of what a table keeps."""
        return self._host.table_kept(self._numbers[kept.table], self._key(kept.keys))

    def _stack_item(self, found: bytes) -> bytes:
        """Return a call stack that a table keeps as an item of a record."""
        words, size = found.rstrip(b"\0"), self._program.word_size
        count = -(-len(words) // size)
        return bytes([Token.KERNEL_STACK]) + count.to_bytes(2, "little") + words.ljust(size * count, b"\0")

    def _in_memory(self, value: typed.Literal | typed.CommName | typed.Kept) -> bytes:
        """Return the bytes of a string or call stack in a table."""
        match value:
            case typed.Literal(text, limit):
                return text.encode().ljust((limit // 8 + 1) * 8, b"\0")
            case typed.CommName():
                return NAME.encode().ljust(PROCESS_NAME_SIZE, b"\0")
            case typed.Kept():
                return self._kept(value)

    def _key(self, keys: Sequence[typed.Argument]) -> bytes:
        found = []
        for key in keys:
            if isinstance(key, _STRINGS):
                found.append(self._in_memory(key))
                continue
            assert not isinstance(key, _NO_NUMBERS)
            bits = 8 * max(self._program.word_size, size_of(key.type) or 0)
            word = self.value(key) & ((1 << bits) - 1)
            has_sign = isinstance(key.type, Integer) and key.type.is_signed  # as the table's key has, then
            found.append(signed(word, bits).to_bytes(8, sys.byteorder, signed=True) if has_sign else _unsigned(word))
        return b"".join(found)
