"""What ``printf`` logs as RPN: numbers, strings and memory, and the faults where they cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import integer_of
from dprobes.dpc.typedtree.valueproperties import does_something, fails_otherwise, is_item
from dprobes.dpc.types.ctype import UNSIGNED_LONG_LONG, Array, Stack, String, size_of
from dprobes.rpn.isa import ITEM_PREFIX_SIZE, KERNEL_FRAMES_MAX, USER_FRAMES_MAX
from dprobes.rpn.tables import Key, KeyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dpc.emitters.faultemitter import FaultExits
    from dprobes.dpc.emitters.valueemitter import ValueEmitter
    from dprobes.dpc.emitters.writer import Writer
    from dprobes.dpc.types.ctype import CType

__all__ = ["LogEmitter", "logged_size"]

_LETTERS = {1: "b, ", 2: "w, ", 4: "d, ", 8: ""}
"""The width in an instruction that logs numbers, by their bytes in programs of 64 bits."""

_NO_NUMBERS = (
    typed.Text, typed.Bytes, typed.Literal, typed.TextChoice, typed.CommName, typed.StackTrace, typed.Kept,
    typed.NetworkAddress,
)  # fmt: skip
"""What is logged and is no number."""


_NETWORK_ADDRESS = 16
"""Bytes of the longest address of the Internet."""

_GROUP_MAX = 16
"""Numbers that are put on the stack to be logged together."""


def logged_size(item: typed.Argument, word_size: int) -> int:
    """Return how many bytes an argument of a ``printf`` takes in a record at most, also as a fault."""
    size = word_size
    match item:
        case typed.CommName() | typed.Literal():
            return 0
        case typed.Text(_, limit):
            size = limit
        case typed.Bytes(_, typed.Constant(count)):
            size = count
        case typed.Bytes(_, _, Array(shown=shown)):
            size = shown + 1
        case typed.StackTrace(is_kernel, frames):
            size = word_size * (frames or (KERNEL_FRAMES_MAX if is_kernel else USER_FRAMES_MAX))
        case typed.Kept(_, _, cells) | typed.TextChoice(type=String(limit=cells)):
            size = word_size * cells if isinstance(item, typed.Kept) else Key(KeyKind.TEXT, cells).bytes
        case typed.NetworkAddress():
            size = _NETWORK_ADDRESS
        case typed.Memory(_, type_):
            size = size_of(type_) or word_size
        case _ if not is_item(item):
            return max(size_of(item.type) or word_size, word_size)
        case _:
            size = max(size_of(item.type) or word_size, word_size)
    return ITEM_PREFIX_SIZE + max(size, word_size)


def _width_in_64(type_: CType) -> int:
    """Return how many bytes a number has in programs of 64 bits."""
    integer = integer_of(type_)
    return (UNSIGNED_LONG_LONG if integer is None else integer).bits_of_64 // 8


class LogEmitter:
    """Write the items of records; ``faults`` counts those that count as something else, in a handler."""

    def __init__(self, writer: Writer, values: ValueEmitter, faults: FaultExits | None, word_size: int) -> None:
        self._w = writer
        self._values = values
        self._faults = faults
        self._word_size = word_size
        self._line = 0
        """That of the ``printf`` at hand."""

    def log(self, items: Sequence[typed.Argument], line: int) -> None:
        """Log the items of a ``printf`` in a line."""
        self._line = line
        for group in _together(items, self._width_of):
            if len(group) == 1:
                self._log_item(group[0])
            else:
                self._log_numbers(group)

    def _width_of(self, item: typed.Argument) -> int:
        """Return of how many bytes a number is that is logged as such, 0 of everything else."""
        if isinstance(item, _NO_NUMBERS) or is_item(item):
            return 0
        if self._values.wide.is_wide(item.type) or does_something(item):
            return 0
        return _width_in_64(item.type)

    def _log_numbers(self, items: Sequence[typed.Argument]) -> None:
        """Log numbers of one width, the first of which goes to the top of the stack."""
        for item in reversed(items):
            assert not isinstance(item, _NO_NUMBERS)
            self._values.low(item, 8 * (size_of(item.type) or self._word_size))
        self._w.op(f"log {_LETTERS[self._width_of(items[0])]}{len(items)}", -len(items))

    def _log_item(self, item: typed.Argument) -> None:
        w = self._w
        match item:
            case typed.Text(address, limit):
                self._log_read(address, lambda: w.number(limit), "log str")
            case typed.Bytes(address, size):
                self._log_read(address, lambda: self._values.exact(size), "log mrf")
            case typed.StackTrace(is_kernel, frames):
                name = "kstack" if is_kernel else "ustack"
                w.op(f"log {name}" if frames is None else f"log {name}, {frames}")
            case typed.Memory(address, type_):
                self._log_read(address, lambda: w.number(size_of(type_) or self._word_size), "log mrf")
            case typed.CommName() | typed.Literal():
                pass  # that of a text in quotes is for the tool
            case typed.NetworkAddress():
                self._log_network_address(item)
            case typed.Kept() | typed.TextChoice():
                self._log_caught(item)
            case _ if is_item(item):
                self._log_caught(item)
            case _:
                cells = self._values.wide.width(item.type)
                self._values.low(item, 8 * (size_of(item.type) or self._word_size))
                w.op(f"log {_LETTERS[_width_in_64(item.type)]}{cells}", -cells)

    def _log_network_address(self, item: typed.NetworkAddress) -> None:
        size = item.size
        if size is None:
            self._log_caught(item.value)
        else:
            self._log_read(item.value, lambda: self._values.exact(size), "log mrf")

    def _log_read(self, address: typed.Value, size: Callable[[], None], instruction: str) -> None:
        """Log what is at an address; where that cannot be read, or the address not be computed, the fault."""
        w = self._w
        fault, end = w.new_label(), w.new_label()
        depth, may_fail = w.depth, is_item(address)
        if may_fail:
            w.op(f"sx {fault}")
        size()
        self._values.exact(address)
        w.op(f"sx {end}")  # the instruction has logged the fault when it raises the exception
        w.op(instruction, -2)
        if may_fail:
            w.op(f"jmp {end}")
            self._log_fault(fault, end, depth, address)
        w.label(end)
        w.restore_handler()

    def _log_caught(self, value: typed.Value | typed.Kept | typed.TextChoice) -> None:
        """Log a value that may fault as an item of one word, and a string or stack as one of as many as it takes."""
        w = self._w
        fault, end = w.new_label(), w.new_label()
        depth = w.depth
        w.op(f"sx {fault}")
        cells = self._values.tables.cells((value,))
        match value:
            case typed.Kept(_, _, _, Stack(is_kernel=False)):  # the process is on top
                process = self._values.wide.width(UNSIGNED_LONG_LONG)
                w.drop(process)
                cells -= process
        w.number(cells)
        w.op("log", -1 - cells)
        w.op(f"jmp {end}")
        self._log_fault(fault, end, depth, value)
        w.label(end)
        w.restore_handler()

    def _log_fault(self, label: str, end: str, depth: int, value: typed.Argument) -> None:
        """Log the address of an exception as a fault: what is there cannot be read now, either."""
        w = self._w
        w.label(label)
        w.settle(depth)
        if self._faults is not None and fails_otherwise(value):
            self._faults.count(self._line)
        w.number(1)
        w.op("push x", 3)  # its code is on top of the address
        w.drop()
        w.op("xchg")
        w.drop()
        w.op(f"sx {end}")
        w.op("log mrf", -2)


def _together(items: Sequence[typed.Argument], width_of: Callable[[typed.Argument], int]) -> list[list[typed.Argument]]:
    """Return items in groups that one instruction logs: numbers of one width."""
    groups: list[list[typed.Argument]] = []
    for item in items:
        width = width_of(item)
        if groups and width and width == width_of(groups[-1][-1]) and len(groups[-1]) < _GROUP_MAX:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups
