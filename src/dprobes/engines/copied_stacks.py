"""
Unwinding of user-space call stacks from copies: registers, and the memory from the stack pointer on.

A stack is unwound as soon as its copy is read, when the process probably still exists. The stack is read from the copy,
mappings and unwind tables from the process. For a process that has ended, the files that it had mapped are read
instead. Older kernels (6.1) still open /proc/PID/mem of a zombie. Its empty /proc/PID/maps shows that it has no memory.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Literal

from dprobes.errors import TargetError
from dprobes.platform.linux.thread_stack import COLUMNS_OF, logged_stack
from dprobes.rpn.instruction_set import USER_FRAMES_MAX, StackEnd
from dprobes.target.process_maps import mappings_of
from dprobes.target.unwind.stack_memory import FileSpace, MappedFiles, ProcessSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.target.process_images import ProcessImage, ProcessImages
    from dprobes.target.process_maps import Mapping

__all__ = ["CopiedStacks"]

_PROCESSES_MAX = 64
"""Maximum number of processes in the cache, and of ended processes in a second one."""

_FRESH = 1.0
"""Age in seconds above which a process's mappings are read again."""

_CUT = frozenset((StackEnd.NO_TABLE, StackEnd.BAD_TABLE, StackEnd.UNREADABLE))
"""Reasons for an incomplete stack that also occur if the process ends during the unwinding."""


class _Process:
    """Process whose stacks are unwound from copies. ``copy`` has the bytes of its memory from the address ``sp`` on."""

    def __init__(self, pid: int, word_size: Literal[4, 8], files: MappedFiles) -> None:
        self.memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        self._pid = pid
        self.space = ProcessSpace(word_size, self._read, self._mappings, partial(files.frames_at, pid))
        self.sp = 0
        self.copy = b""
        self.looked = time.monotonic()

    def _read(self, address: int, size: int) -> bytes:
        start = address - self.sp
        if 0 <= start <= len(self.copy) - size:
            return self.copy[start : start + size]
        if not self.space.is_of_file(address):
            raise TargetError(f"{size} bytes at {address:#x} are not in the copy of the stack")
        try:
            data = os.pread(self.memory, size, address)
        except (OSError, OverflowError, ValueError):
            data = b""
        if len(data) < size:
            raise TargetError(f"{size} bytes at {address:#x} cannot be read")
        return data

    def _mappings(self) -> list[Mapping]:
        return mappings_of(self._pid)

    def close(self) -> None:
        os.close(self.memory)


class CopiedStacks:
    """
    Unwinder of copied stacks, with a cache of their processes.

    ``images`` has the mappings of processes that have ended. If it is None, the stacks of these processes have one
    frame. ``look`` updates ``images``.
    """

    def __init__(self, images: ProcessImages | None = None, look: Callable[[], None] | None = None) -> None:
        self._images = images
        self._look = look
        self._files = MappedFiles()
        self._ended: OrderedDict[ProcessImage, FileSpace] = OrderedDict()
        self._processes: OrderedDict[int, _Process] = OrderedDict()

    def close(self) -> None:
        """Close the files and descriptors that are open for the processes whose stacks were unwound."""
        while self._processes:
            self._processes.popitem()[1].close()

    def follow(
        self,
        pid: int,
        word_size: Literal[4, 8],
        registers: dict[int, int],
        copy: bytes,
        frames: int = USER_FRAMES_MAX,
    ) -> tuple[int, ...]:
        """
        Return up to ``frames`` addresses of a call stack, innermost first. An incomplete one ends with a ``StackEnd``.

        ``registers`` has values by DWARF number. ``copy`` is the memory from the stack pointer on.
        """
        columns = COLUMNS_OF[word_size]
        try:
            process = self._process(pid, word_size)
            process.sp, process.copy = registers[columns.sp], copy
            if time.monotonic() - process.looked > _FRESH:
                process.space.forget()
                process.looked = time.monotonic()
            stack = tuple(logged_stack(process.space, registers, frames))
            if stack[-1] not in _CUT or (process.space.is_known and process.space.is_alive()):
                return stack
            # The process has ended meanwhile: its tables or mappings could not be read completely.
        except (TargetError, OSError):
            pass
        self._forget(pid)
        return self._follow_ended(pid, word_size, registers, copy, frames)

    def _follow_ended(
        self, pid: int, word_size: Literal[4, 8], registers: dict[int, int], copy: bytes, frames: int
    ) -> tuple[int, ...]:
        """Return the frames of a process that has ended, from the files that it had mapped (pc and GONE if unknown)."""
        columns = COLUMNS_OF[word_size]
        pc, sp = registers[columns.pc], registers[columns.sp]
        if self._look is not None:
            self._look()
        image = self._images.covering(pid, pc) if self._images is not None else None
        if image is None:
            return pc, StackEnd.GONE

        def read_stack(address: int, size: int) -> bytes:
            start = address - sp
            if not 0 <= start <= len(copy) - size:
                raise TargetError(f"{size} bytes at {address:#x} are not in the copy of the stack")
            return copy[start : start + size]

        space = self._ended.get(image)
        if space is None:
            while len(self._ended) >= _PROCESSES_MAX:
                self._ended.popitem(last=False)
            space = self._ended[image] = FileSpace(word_size, image, self._files)
        space.read_stack = read_stack
        return tuple(logged_stack(space, registers, frames))

    def _process(self, pid: int, word_size: Literal[4, 8]) -> _Process:
        process = self._processes.get(pid)
        if process is not None and process.space.word_size == word_size and process.space.is_alive():
            return process
        self._forget(pid)
        while len(self._processes) >= _PROCESSES_MAX:
            self._processes.popitem(last=False)[1].close()
        process = self._processes[pid] = _Process(pid, word_size, self._files)
        return process

    def _forget(self, pid: int) -> None:
        if (process := self._processes.pop(pid, None)) is not None:
            process.close()
