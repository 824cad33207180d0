"""
Writing the core file of a process behind a stub, which stands still meanwhile.

Where the stub shows files of its machine, ``/proc`` says which memory is in the file, as for any other process; else
the memory is what can be found.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.core.corefile import CoreProcess, CoreThread, Note, signal_info_at
from dprobes.engines.core.corewriter import CoreContents, CorePart, write_contents
from dprobes.engines.core.processfacts import CoreRequest, ThreadState, contents_of, page_exists
from dprobes.engines.core.processors import PROCESSORS, image_of
from dprobes.engines.gdb.cores.foundmemory import FoundMemory
from dprobes.engines.gdb.cores.remotefiles import open_remote, read_remote
from dprobes.lazydataclass import dataclass
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.core.processors import CoreProcessor
    from dprobes.engines.gdb.cores.remotefiles import RemoteFile
    from dprobes.engines.gdb.process import StubProcess
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.stopreplies import ThreadId
    from dprobes.engines.gdb.target import StubTarget

__all__ = ["StubCore"]

_BASES = ("fs_base", "gs_base", "tpidr_el0")
"""Registers that point to the variables of a thread, where that is none of the general ones."""


@dataclass(frozen=True, slots=True)
class StubCore:
    """The core file of a ``process``, whose ``thread``, with those ``registers``, has hit at the address ``at``."""

    target: StubTarget
    processor: StubProcessor
    architecture: str
    process: StubProcess
    thread: ThreadId | None
    registers: Registers
    at: int

    def write(self, output: int) -> int:
        """Write it to a new, empty file, and return its size; raise OSError if it cannot be written."""
        layout = PROCESSORS[self.architecture]
        states = tuple(self._states(layout))
        threads = tuple(state for state, _ in states)
        request = CoreRequest(max(self.process.pid, 1), layout, threads, signal_info_at(layout, self.at))
        stub = self.target.stub
        with contextlib.ExitStack() as open_files:
            pages = None
            with contextlib.suppress(OSError):
                pages = open_files.enter_context(open_remote(stub, f"/proc/{self.process.pid}/pagemap"))
            memory = _StubMemory(self.target, pages, layout.prefix)
            try:
                contents = contents_of(request, lambda path: read_remote(stub, path), memory)
            except OSError:
                contents = self._found(request, [registers for _, registers in states])
            return write_contents(contents, memory, output)

    def _states(self, layout: CoreProcessor) -> Iterator[tuple[ThreadState, Registers]]:
        """Iterate over the threads, the one that has hit first, and their registers."""
        yield self._state(layout, self.thread, self.registers), self.registers
        for thread in self.target.stub.threads():
            if thread != self.thread:
                registers = self.target.registers(thread)
                yield self._state(layout, thread, registers), registers

    def _state(self, layout: CoreProcessor, thread: ThreadId | None, registers: Registers) -> ThreadState:
        def value(name: str) -> int | None:
            return registers[name] if name in registers else None  # noqa: SIM401 - it has no get

        more = tuple(
            Note(kind, image_of(fields, layout.order, value))
            for kind, fields in layout.more
            if any(name in registers for field in fields for name in field.names)
        )
        tid = self.process.pid if thread is None else thread.thread
        return ThreadState(max(tid, 1), image_of(layout.general, layout.order, value), more)

    def _found(self, request: CoreRequest, registers: list[Registers]) -> CoreContents:
        """Return what can be known without files: what is loaded, and the memory to which something points."""
        layout = request.processor
        found = FoundMemory(self.target, layout.word_size)
        for number, (header, path) in enumerate(self.process.files_in_memory()):
            end = found.add_file(header, path)
            if not number:
                heap = end
        found.add_around(self.process.linker_entries())
        for each in registers:
            found.add_stack(each[self.processor.sp])
        found.add_around([heap])
        for each in registers:
            names = [name for field in layout.general for name in field.names]
            found.add_around(each[name] for name in (*names, *_BASES) if name in each)
        whole = CoreProcess(
            processor=layout,
            pid=request.pid,
            parent=0,
            group=0,
            session=0,
            uid=self.process.uid,
            gid=0,
            name=self.process.name,
            arguments=os.fsencode(self.process.program),
            auxv=self.target.stub.read_object("auxv") or b"",
            signal_info=request.signal_info,
        )
        threads = [CoreThread(each.tid, each.registers, each.more) for each in request.threads]
        return CoreContents(whole, threads, found.files, [CorePart(each, False) for each in found.segments])


class _StubMemory:
    """The memory of a target; ``pages`` tells which pages exist, in an order of bytes, if the stub shows that."""

    def __init__(self, target: StubTarget, pages: RemoteFile | None, order: str) -> None:
        self._target, self._pages, self._order = target, pages, order

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of memory; fewer if they cannot all be read."""
        return self._target.read_anew(address, size)

    def has_any(self, start: int, size: int) -> bool:
        """Return whether one of the pages exists, or may."""
        if self._pages is None:
            return True
        count = size // PAGE_SIZE
        try:
            return page_exists(self._pages.read_at(start // PAGE_SIZE * 8, 8 * count), count, self._order)
        except OSError:
            return True
