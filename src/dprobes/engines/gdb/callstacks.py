"""
Call stacks of threads behind a stub: its registers and memory for the walk up, by unwind tables.

Tables are read from the target's memory, where they are those of the very code, and of the probed module from its file
besides. Where a function has none, the walk ends with that reason; the caller of one that has just begun is known
nevertheless, where calls leave the return address in a register.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.rpn.isa import StackEnd
from dprobes.target.unwind.fileframes import FileFrames, MovedFrames, completed
from dprobes.target.unwind.frametable import MemoryFrameTable
from dprobes.target.unwind.stackwalk import COLUMNS, CallStack, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.resolve.probepoints import ResolvedModule
    from dprobes.target.unwind.fileframes import FrameRules

__all__ = ["CallStacks"]

_UNSAID = (StackEnd.OUTERMOST, StackEnd.LIMIT)


class CallStacks:
    """
    Walk up the stacks of a ``target``; ``names`` are its registers by our index.

    ``find_headers`` returns the addresses of the ELF headers of what is loaded.
    """

    def __init__(
        self,
        target: StubTarget,
        processor: StubProcessor,
        resolved: ResolvedModule,
        names: Mapping[int, str],
        find_headers: Callable[[], Sequence[int]],
    ) -> None:
        architecture = resolved.architecture
        self.word_size = architecture.word_size
        self.byte_order: ByteOrder = architecture.byte_order
        self._target = target
        self._processor = processor
        self._module = resolved.module
        self._columns = COLUMNS[architecture.name]
        columns = {number: architecture.register(name) for number, name in enumerate(self._columns.names) if name}
        self._names = {number: names[each.index] for number, each in columns.items() if each and each.index in names}
        self._find_headers = find_headers
        self._headers: Sequence[int] | None = None
        self._bias: int | None = None
        self._tables: dict[int | None, FrameRules | None] = {}
        self._file = FileFrames(resolved.module.elf)

    def forget(self, bias: int | None) -> None:
        """Forget the tables: other code may be there now. ``bias`` is that of the probed module, if it is there."""
        self._tables.clear()
        self._headers, self._bias = None, bias

    def stack(self, registers: Registers, frames: int) -> list[int]:
        """Return up to so many addresses of the call stack of a thread, as ``Context.user_stack`` has them."""
        values = {number: registers[name] for number, name in self._names.items()}
        stack = walk(self, self._columns, values, frames)
        if stack.end is StackEnd.NO_TABLE and len(stack.addresses) == 1 and frames > 1:
            stack = self._from_caller(stack, values, frames)
        return [*stack.addresses] if stack.end in _UNSAID else [*stack.addresses, stack.end]

    def _from_caller(self, stack: CallStack, values: dict[int, int], frames: int) -> CallStack:
        """Return a stack without tables with what the link register says of a function that has just begun."""
        (address,) = stack.addresses
        offset = None if self._bias is None else self._module.elf.file_offset(address - self._bias)
        link = next((number for number, name in self._names.items() if name == self._processor.link), None)
        if offset is None or link is None or self._module.function_start(offset) != address - (self._bias or 0):
            return stack
        above = walk(self, self._columns, values | {self._columns.pc: values[link]}, frames - 1)
        return CallStack((address, *above.addresses), above.end)

    # What the walk asks for

    def read(self, address: int, n: int) -> bytes:
        """Return bytes of memory; raise ``TargetError`` if they are not all there."""
        data = self._target.read(address, n)
        if len(data) < n:
            raise TargetError(f"{n} bytes at {address:#x} cannot be read")
        return data

    def table_at(self, address: int) -> FrameRules | None:
        """Return the unwind table of the module that an address lies in; None if there is none."""
        if self._headers is None:
            self._headers = self._find_headers()
        header = max((each for each in self._headers if each <= address), default=None)
        if header not in self._tables:
            in_memory = None if header is None else MemoryFrameTable.at(self, header)
            self._tables[header] = completed(
                in_memory, None if self._bias is None else MovedFrames(self._file, self._bias)
            )
        return self._tables[header]
