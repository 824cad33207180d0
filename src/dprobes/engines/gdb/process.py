"""The process behind a stub: who it is, and where the files are that it has loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.gdb.loadedfiles import process_image
from dprobes.engines.gdb.processors import check_description
from dprobes.engines.gdb.stopreplies import Stopped
from dprobes.errors import EngineError
from dprobes.target.elf.functiondescriptors import FunctionDescriptors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.gdb.loadedfiles import LoadedFile
    from dprobes.engines.gdb.processors import StubProcessor
    from dprobes.engines.gdb.stopreplies import ThreadId
    from dprobes.engines.gdb.target import StubTarget
    from dprobes.resolve.probepoints import ResolvedModule

__all__ = ["StubProcess"]

_START_PATIENCE = 30.0
"""Seconds within which a program that has been started has to come to its entry."""
_NAME_MAX = 15
"""Bytes of the name of a thread (TASK_COMM_LEN)."""


class StubProcess:
    """
    A process that stands still; a program that has not begun is let run to its entry.

    ``program`` is the path of its program, "" if the stub does not tell. ``linker_place`` is where the dynamic linker
    stops for debuggers, None in a program without one. Raise ``EngineError`` if the ``target`` is no process of Linux,
    or of another processor than the module.
    """

    def __init__(self, target: StubTarget, processor: StubProcessor, resolved: ResolvedModule) -> None:
        self._target, self._processor, self._resolved = target, processor, resolved
        self._endpoint = target.stub.name
        self._check_processor()
        reply = target.reason()
        if not isinstance(reply, Stopped):
            target.is_over = True
            raise EngineError(f"there is no program behind the stub {self._endpoint}: it has ended")
        thread = reply.thread or target.stub.current_thread()
        target.process = 0 if thread is None else thread.process
        has_descriptors = FunctionDescriptors.of(resolved.module.elf) is not None
        image = process_image(target, resolved.architecture.word_size, has_descriptors=has_descriptors)
        if image is None:
            raise EngineError(f"the stub {self._endpoint} does not stand for a process of Linux")
        self._image = image
        self.uid = image.uid
        self.pid = self._pid_of(thread)
        path = target.stub.read_object("exec-file", f"{target.process:x}") or os.fsencode(image.path)
        self.program = os.fsdecode(path)
        self.name = (os.path.basename(path) or os.fsencode(resolved.module.elf.path.name))[:_NAME_MAX]
        if image.debug_place is not None and image.linker_breakpoint(target) is None:
            self._run_to_entry(thread)
        self.linker_place = image.linker_breakpoint(target)

    def _check_processor(self) -> None:
        described = self._target.description.architecture
        if described and described not in self._processor.descriptions:
            raise EngineError(
                f"the stub {self._endpoint} stands for a processor '{described}', "
                f"'{self._resolved.module.elf.path}' is for {self._resolved.architecture.name}"
            )
        check_description(self._target.description, self._processor, self._endpoint)

    def _pid_of(self, thread: ThreadId | None) -> int:
        """Return the process id; QEMU says 1 for any process, and names threads as the kernel does."""
        if thread is None:
            return 0
        return thread.process if thread.process > 1 else min(each.thread for each in self._target.stub.threads())

    def _run_to_entry(self, thread: ThreadId | None) -> None:
        """Let the dynamic linker do its work: what it has not loaded cannot be probed."""
        entry = self._image.code_of(self._target, self._image.entry) or 0
        self.insert(entry)
        self._target.resume()
        reply = self._target.await_stop(_START_PATIENCE)
        if reply is None:
            self._target.stop()
        if reply is not None and not isinstance(reply, Stopped):
            self._target.is_over = True
        else:
            self._target.remove(entry, len(self._processor.breakpoint))
        if not isinstance(reply, Stopped):
            raise EngineError(f"the program behind the stub {self._endpoint} has not come to its entry {entry:#x}")
        registers = self._target.registers(reply.thread or thread)
        if registers[self._processor.pc] == entry + self._processor.moved:
            registers[self._processor.pc] = entry
            self._target.write_back(reply.thread or thread, registers)

    def insert(self, address: int) -> None:
        """Insert a breakpoint of the engine's own; raise ``EngineError`` if that cannot be done."""
        if not self._target.insert(address, len(self._processor.breakpoint), self._processor.breakpoint):
            raise EngineError(f"the stub {self._endpoint} inserts no breakpoint at {address:#x}")

    def headers(self) -> tuple[int, ...]:
        """Return where the ELF headers of what is loaded are."""
        return self._image.headers(self._target)

    def files_in_memory(self) -> Iterator[tuple[int, str]]:
        """Iterate over the ELF headers of what is loaded and the paths of the files, the program first."""
        yield self._image.header, self.program
        for file in self._image.loaded_files(self._target):
            if file.path:
                yield file.bias, file.path

    def linker_entries(self) -> Iterator[int]:
        """Iterate over where the dynamic linker keeps what it says of the files."""
        return (at for at, _, _ in self._image.linker_entries(self._target))

    def loaded_files(self) -> tuple[LoadedFile, ...]:
        """Return what is loaded now; nothing if something is about to go."""
        return () if self._image.is_unloading(self._target) else self._image.loaded_files(self._target)

    def bias_of_module(self, files: Iterable[LoadedFile]) -> int | None:
        """Return how far the module is above its link addresses, None if it is not among the loaded files."""
        elf = self._resolved.module.elf
        for loaded in files:
            if loaded.path and os.path.basename(loaded.path) == elf.path.name:
                return loaded.bias
            if not loaded.path and elf.entry and loaded.bias + elf.entry == self._image.entry:
                return loaded.bias
        return None
