"""Call stack of a stopped thread, walked from its registers and memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from dprobes.arch.x86_processors import X86_64
from dprobes.errors import TargetError, reason_of
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.process_maps import mappings_of
from dprobes.target.unwind.stack_memory import ProcessSpace
from dprobes.target.unwind.stack_walk import COLUMNS, walk

if TYPE_CHECKING:
    from collections.abc import Mapping as Values

    from dprobes.platform.linux.ptrace_calls import RegisterWords
    from dprobes.platform.linux.served_pages import ServedPages
    from dprobes.target.process_maps import Mapping
    from dprobes.target.unwind.frame_tables import FileFrames
    from dprobes.target.unwind.stack_walk import UnwindSpace

__all__ = ["COLUMNS_OF", "logged_stack", "space_of", "stack_of"]

COLUMNS_OF = {8: COLUMNS["x86_64"], 4: COLUMNS["i386"]}
"""DWARF's numbers of registers, by the size of a word."""

_WORDS = {register.name: int(word) for word in Register if (register := X86_64.register(word.name.lower())) is not None}
"""Words of ``user_regs_struct`` by the names of registers."""

_UNSAID = (StackEnd.OUTERMOST, StackEnd.LIMIT)


def space_of(tid: int, memory: int, word_size: Literal[4, 8], served: ServedPages | None = None) -> ProcessSpace:
    """
    Return the memory of a thread, open as ``/proc/TID/mem``, for the stack walk.

    ``served`` is given for the process of another user. Reads raise ``TargetError`` if not all bytes are available.
    """

    def read(address: int, size: int) -> bytes:
        if served is not None and served.first(memory, address, size) is not None:
            raise TargetError(f"{size} bytes at {address:#x} may never be there")
        try:
            data = os.pread(memory, size, address)
        except (OSError, OverflowError, ValueError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "no address"
            raise TargetError(f"{size} bytes at {address:#x} cannot be read: {reason}") from None
        if len(data) < size:
            raise TargetError(f"{size} bytes at {address:#x} are not all there")
        return data

    def frames_of(mapping: Mapping) -> FileFrames | None:
        from dprobes.target.unwind.stack_memory import MappedFiles

        if served is not None and not served.may_open(mapping):
            return None
        return MappedFiles().frames_at(tid, mapping)

    return ProcessSpace(word_size, read, lambda: mappings_of(tid), frames_of)


def stack_of(space: ProcessSpace, registers: RegisterWords, frames: int) -> list[int]:
    """
    Return up to ``frames`` addresses of a stopped thread's call stack, innermost first.

    ``registers`` are its general registers. The last item may be a ``StackEnd``, as in ``logged_stack``.
    """
    columns = COLUMNS_OF[space.word_size]
    mask = (1 << 8 * space.word_size) - 1
    values = {number: registers[_WORDS[name]] & mask for number, name in enumerate(columns.names)}
    return logged_stack(space, values, frames)


def logged_stack(space: UnwindSpace, registers: Values[int, int], frames: int) -> list[int]:
    """
    Return up to ``frames`` addresses of a call stack, innermost first, from registers by DWARF register number.

    If the walk ended before the outermost frame and before ``frames``, the last item is the reason, a ``StackEnd``.
    """
    stack = walk(space, COLUMNS_OF[space.word_size], registers, frames)
    return [*stack.addresses] if stack.end in _UNSAID else [*stack.addresses, stack.end]
