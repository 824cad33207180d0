"""RPN for the arguments of ``printf``: numbers, strings and memory, and faults in place of unreadable ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.dpc.typedtree.typed_program import is_mixed
from dprobes.dpc.typedtree.value_properties import (
    does_something,
    fails_otherwise,
    integer_of,
    is_item,
    operands_of,
    reads_memory_itself,
)
from dprobes.dpc.types.c_types import UNSIGNED_LONG_LONG, Array, Stack, String, size_of
from dprobes.rpn.instruction_set import ITEM_PREFIX_SIZE, KERNEL_FRAMES_MAX, USER_FRAMES_MAX, ExceptionCode
from dprobes.rpn.keyed_tables import FAULTS, Key, KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dpc.emitters.rpn_writer import Writer
    from dprobes.dpc.emitters.value_emitter import ValueEmitter
    from dprobes.dpc.typedtree.typed_program import LogPaths, LogSequence
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["FaultExits", "LogEmitter", "MinorCodes", "logged_size", "minor_codes"]

# An uncaught exception jumps to the end of the handler's code, where a keyed table counts its code and source line.


def may_raise(statement: typed_program.Statement) -> bool:
    """
    Return whether a statement itself, without the statements in it, may raise an exception at a hit.

    ``printf`` and ``return`` count as False: their faults are logged or raised elsewhere.
    """
    if isinstance(statement, typed_program.Log | typed_program.Result):
        return False
    values = (each for each in statement.children() if isinstance(each, typed_values.Argument))
    return isinstance(statement, typed_program.Loop) or any(map(_raises, values))  # a loop may reach the limit of jumps


def _raises(value: typed_values.Argument) -> bool:
    match value:
        case typed_values.Text() | typed_values.Bytes() | typed_values.NetworkAddress():
            return True
        case typed_values.Kept(_, keys):
            return any(map(_raises, keys))
        case typed_values.CommName() | typed_values.StackTrace() | typed_values.Literal() | typed_values.ItemText():
            return False
        case typed_values.TextChoice(condition, yes, no):
            return any(map(_raises, (condition, yes, no)))
        case typed_values.Assign(target, operand):
            return _is_risky(target) or _raises(operand)
        case typed_values.Step(target):
            return _is_risky(target)
    return reads_memory_itself(value) or any(map(_raises, operands_of(value)))


def _is_risky(place: typed_values.Place) -> bool:
    match place:
        case typed_values.Memory() | typed_values.BitField() | typed_values.Register():
            return True
        case typed_values.Variable(_, _, _, index):
            return index is not None
    return False


def fault_sequences(paths: LogPaths, body: typed_program.Statement) -> frozenset[LogSequence]:
    """
    Return those sequences of ``printf`` after which an uncaught exception may end the hit.

    A sequence has the numbers of the ``printf`` statements that the hit has executed so far (``LogPaths``).
    """
    found: set[LogSequence] = set()
    for statement in typed_program.statements_in(body):
        before = paths.at.get(id(statement), frozenset())
        if not before <= found and may_raise(statement):
            found |= before
    return frozenset(found)


def needs_trail(paths: LogPaths, body: typed_program.Statement) -> bool:
    """
    Return whether the handler needs a cell, the trail, with the number of the ``printf`` sequence executed so far.

    It needs one if an exception may end the hit at a place that is reached both with and without earlier ``printf``.
    """
    return any(
        is_mixed(paths.at.get(id(statement), frozenset())) and may_raise(statement)
        for statement in typed_program.statements_in(body)
    )


class FaultExits:
    """
    A writer of the code at the end of a handler to which uncaught exceptions jump, and which counts them.

    ``push_trail`` writes code that pushes the number of the sequence of ``printf`` that the hit has executed.
    """

    def __init__(self, writer: Writer, paths: LogPaths, push_trail: Callable[[], None]) -> None:
        self._w = writer
        self._paths = paths
        self._push_trail = push_trail
        self._labels: dict[tuple[int, str], tuple[str, Span]] = {}
        self.counts = False
        """True if exceptions are counted."""

    def guard(self, statement: typed_program.Statement, span: Span) -> None:
        """
        Write code so that an exception of ``statement`` ends the hit and is counted under ``span``'s line.

        Write none in a ``try``, or if the statement raises no exceptions.
        """
        if may_raise(statement):
            self._guard(self._paths.at.get(id(statement), frozenset({()})), span)

    def guard_condition(self, condition: typed_values.Value, span: Span) -> None:
        """Write code so that an exception of a probe's condition ends the hit and is counted under ``span``'s line."""
        if _raises(condition):
            self._guard(frozenset({()}), span)

    def _guard(self, before: frozenset[LogSequence], span: Span) -> None:
        if self._w.is_catching:
            return
        ending = "exit" if () not in before else "abort" if len(before) == 1 else ""
        label, _ = self._labels.setdefault((span.line, ending), (self._w.new_label(), span))
        self.counts = True
        self._w.guard(label)

    def count(self, line: int) -> None:
        """
        Write code that counts the last exception under a source line in the table of exceptions, and continues.

        INVALID_ADDR is not counted, because the record shows it as a fault.
        """
        w = self._w
        is_told, rest = w.new_label(), w.new_label()
        self._push_code()
        w.depth += 1
        w.op("push tsp, 0", 1)
        w.number(ExceptionCode.INVALID_ADDR)
        w.op("eq", -1)
        w.op(f"jnz {is_told}")
        w.code(f"ros 1; push {line}")
        w.op(f"tally {FAULTS}", -2)
        w.op(f"jmp {rest}")
        w.label(is_told)
        w.depth += 2
        w.drop(2)
        w.label(rest)
        self.counts = True

    def _push_code(self) -> None:
        """Write code that pushes the last exception's code, and drops the two exception parameters below it."""
        self._w.op("push x")
        for _ in range(2):
            self._w.op("xchg")
            self._w.op("ros 1")

    def write(self) -> None:
        """Write, at the end of the handler, the code to which the exceptions of guarded statements jump."""
        w = self._w
        for (line, ending), (label, span) in self._labels.items():
            with w.at(span):
                w.label(label)
                self._push_code()
                w.op(f"push {line}")
                w.op(f"tally {FAULTS}")
                if ending:
                    w.op(ending)
                    continue
                silent = w.new_label()
                self._push_trail()
                w.op(f"jz {silent}")
                w.op("exit")
                w.label(silent)
                w.op("abort")


@dataclass(frozen=True, slots=True)
class MinorCodes:
    """
    The minor codes of a probe, from 0: ``of`` maps a sequence to its code.

    With ``is_computed``, the code is one less than the number of the sequence, which the handler keeps in a cell.
    """

    of: dict[LogSequence, int]
    is_computed: bool

    @property
    def count(self) -> int:
        """The number of codes that the probe takes, at least one: its header has ``minor =`` even without output."""
        return max(self.of.values(), default=0) + 1


def minor_codes(paths: LogPaths, body: typed_program.Statement) -> MinorCodes:
    """Return the minor codes for the ``printf`` sequences with which a handler with this ``body`` can end."""
    is_computed = not paths.is_known or needs_trail(paths, body)
    ends = sorted((paths.ends | fault_sequences(paths, body)) - {()}, key=lambda each: (len(each), each))
    if paths.logs == 1:
        return MinorCodes(dict.fromkeys(ends, 0), is_computed)
    if is_computed:
        return MinorCodes({each: paths.number_of(each) - 1 for each in ends}, is_computed)
    return MinorCodes({each: number for number, each in enumerate(ends)}, is_computed)


_LETTERS = {1: "b, ", 2: "w, ", 4: "d, ", 8: ""}
"""The operand of an instruction that logs numbers, by the size in bytes of the numbers in 64-bit programs."""

_NO_NUMBERS = (
    typed_values.Text, typed_values.Bytes, typed_values.Literal, typed_values.TextChoice, typed_values.CommName,
    typed_values.StackTrace, typed_values.Kept,
    typed_values.NetworkAddress, typed_values.ItemText,
)  # fmt: skip
"""Arguments that are logged but are not numbers."""

_NETWORK_ADDRESS = 16
"""The size in bytes of the longest Internet address."""

_GROUP_MAX = 16
"""Maximum number of values on the stack that one instruction logs."""


def logged_size(item: typed_values.Argument, word_size: int) -> int:
    """Return the maximum size in bytes of a ``printf`` argument in a record, as a value or as a fault."""
    size = word_size
    match item:
        case typed_values.CommName() | typed_values.Literal():
            return 0
        case typed_values.Text(_, limit):
            size = limit
        case typed_values.Bytes(_, typed_values.Constant(count)):
            size = count
        case typed_values.Bytes(_, _, Array(shown=shown)):
            size = shown + 1
        case typed_values.StackTrace(is_kernel, frames):
            size = word_size * (frames or (KERNEL_FRAMES_MAX if is_kernel else USER_FRAMES_MAX))
        case typed_values.Kept(_, _, cells) | typed_values.TextChoice(type=String(limit=cells)):
            size = word_size * cells if isinstance(item, typed_values.Kept) else Key(KeyKind.TEXT, cells).bytes
        case typed_values.NetworkAddress():
            size = _NETWORK_ADDRESS
        case typed_values.Memory(_, type_):
            size = size_of(type_) or word_size
        case _ if not is_item(item):
            return max(size_of(item.type) or word_size, word_size)
        case _:
            size = max(size_of(item.type) or word_size, word_size)
    return ITEM_PREFIX_SIZE + max(size, word_size)


def _width_in_64(type_: CType) -> int:
    """Return the size in bytes of a number in 64-bit programs."""
    integer = integer_of(type_)
    return (UNSIGNED_LONG_LONG if integer is None else integer).bits_of_64 // 8


class LogEmitter:
    """
    Writer of code that logs the items of a record.

    ``faults`` writes code that counts exceptions that records do not show. It is None in functions of the program.
    """

    def __init__(self, writer: Writer, values: ValueEmitter, faults: FaultExits | None, word_size: int) -> None:
        self._w = writer
        self._values = values
        self._faults = faults
        self._word_size = word_size
        self._line = 0
        """The line of the current ``printf``."""

    def log(self, items: Sequence[typed_values.Argument], line: int) -> None:
        """Write code that logs the items of a ``printf``; exceptions in it are counted under its source ``line``."""
        self._line = line
        for group in _together(items, self._width_of):
            if len(group) == 1:
                self._log_item(group[0])
            else:
                self._log_numbers(group)

    def _width_of(self, item: typed_values.Argument) -> int:
        """Return the size in bytes of an item that is logged as a plain number, 0 for other items."""
        if isinstance(item, _NO_NUMBERS) or is_item(item):
            return 0
        if self._values.wide.is_wide(item.type) or does_something(item):
            return 0
        return _width_in_64(item.type)

    def _log_numbers(self, items: Sequence[typed_values.Argument]) -> None:
        """Log numbers of one width. The first is pushed last, so that it is on top of the stack."""
        for item in reversed(items):
            assert not isinstance(item, _NO_NUMBERS)
            self._values.low(item, 8 * (size_of(item.type) or self._word_size))
        self._w.op(f"log {_LETTERS[self._width_of(items[0])]}{len(items)}", -len(items))

    def _log_item(self, item: typed_values.Argument) -> None:
        w = self._w
        match item:
            case typed_values.Text(address, limit):
                self._log_read(address, lambda: w.number(limit), "log str")
            case typed_values.Bytes(address, size):
                self._log_read(address, lambda: self._values.exact(size), "log mrf")
            case typed_values.StackTrace(is_kernel, frames):
                name = "kstack" if is_kernel else "ustack"
                w.op(f"log {name}" if frames is None else f"log {name}, {frames}")
            case typed_values.Memory(address, type_):
                self._log_read(address, lambda: w.number(size_of(type_) or self._word_size), "log mrf")
            case typed_values.ItemText():
                raise AssertionError(item)  # only blocks of the tool have items of loops
            case typed_values.CommName() | typed_values.Literal():
                pass  # not in the record: the template has the literal, the header has the name
            case typed_values.NetworkAddress():
                self._log_network_address(item)
            case typed_values.Kept() | typed_values.TextChoice():
                self._log_caught(item)
            case _ if is_item(item):
                self._log_caught(item)
            case _:
                cells = self._values.wide.width(item.type)
                self._values.low(item, 8 * (size_of(item.type) or self._word_size))
                w.op(f"log {_LETTERS[_width_in_64(item.type)]}{cells}", -cells)

    def _log_network_address(self, item: typed_values.NetworkAddress) -> None:
        size = item.size
        if size is None:
            self._log_caught(item.value)
        else:
            self._log_read(item.value, lambda: self._values.exact(size), "log mrf")

    def _log_read(self, address: typed_values.Value, size: Callable[[], None], instruction: str) -> None:
        """
        Log memory at an address, or a fault if the memory or the address expression cannot be read.

        ``size`` writes code that pushes the size in bytes; ``instruction`` pops address and size, and logs.
        """
        w = self._w
        fault, end = w.new_label(), w.new_label()
        depth, may_fail = w.depth, is_item(address)
        if may_fail:
            w.op(f"sx {fault}")
        size()
        self._values.exact(address)
        w.op(f"sx {end}")  # the instruction logs the fault before it raises the exception, which is then ignored
        w.op(instruction, -2)
        if may_fail:
            w.op(f"jmp {end}")
            self._log_fault(fault, end, depth, address)
        w.label(end)
        w.restore_handler()

    def _log_caught(self, value: typed_values.Value | typed_values.Kept | typed_values.TextChoice) -> None:
        """Log a value that may fault: its cells as words after their count, or a fault if an exception is raised."""
        w = self._w
        fault, end = w.new_label(), w.new_label()
        depth = w.depth
        w.op(f"sx {fault}")
        cells = self._values.tables.cells((value,))
        match value:
            case typed_values.Kept(_, _, _, Stack(is_kernel=False)):  # the process is on top, and is not logged
                process = self._values.wide.width(UNSIGNED_LONG_LONG)
                w.drop(process)
                cells -= process
        w.number(cells)
        w.op("log", -1 - cells)
        w.op(f"jmp {end}")
        self._log_fault(fault, end, depth, value)
        w.label(end)
        w.restore_handler()

    def _log_fault(self, label: str, end: str, depth: int, value: typed_values.Argument) -> None:
        """
        Write ``label``, to which exceptions jump, and code that logs the address of the exception as a fault.

        The code reads the address again, which logs the fault, then continues at ``end``. ``depth`` is the stack depth
        before the value was computed.
        """
        w = self._w
        w.label(label)
        w.settle(depth)
        if self._faults is not None and fails_otherwise(value):
            self._faults.count(self._line)
        w.number(1)
        w.op("push x", 3)  # the exception's code is on top of its first parameter, the address
        w.code("ros 1; xchg; ros 1")
        w.op(f"sx {end}")
        w.op("log mrf", -2)


def _together(
    items: Sequence[typed_values.Argument], width_of: Callable[[typed_values.Argument], int]
) -> list[list[typed_values.Argument]]:
    """Return items in groups, each logged by one instruction: at most 16 numbers of one width, or a single item."""
    groups: list[list[typed_values.Argument]] = []
    for item in items:
        width = width_of(item)
        if groups and width and width == width_of(groups[-1][-1]) and len(groups[-1]) < _GROUP_MAX:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
