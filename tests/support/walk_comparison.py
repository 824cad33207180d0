"""
A script for gdb: comparisons of unwound call stacks with gdb's, at random instructions of a program.

The variables ``SEED``, ``STOPS``, ``WORD_SIZE`` are set before. The result is printed as JSON after ``FOUND``.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Literal

import gdb

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.process_maps import Mapping, parse_maps, read_maps
from dprobes.target.unwind.stack_memory import MappedFiles, ProcessSpace
from dprobes.target.unwind.stack_walk import COLUMNS, walk

if TYPE_CHECKING:
    from dprobes.target.unwind.frame_tables import FileFrames

NAMES = {
    8: ("rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16)), "rip"),
    4: ("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "eip"),
}


def compare(seed: int, stops: int, word_size: Literal[4, 8], longest: int) -> None:
    """
    Print the number of equal stacks, the reasons for which ours ended, and the first different ones.

    ``stops`` is the number of comparisons, ``longest`` the maximum number of instructions between two.
    """
    inferior = gdb.selected_inferior()
    columns = COLUMNS["x86_64" if word_size == 8 else "i386"]

    def read(address: int, size: int) -> bytes:
        try:
            return bytes(inferior.read_memory(address, size))
        except (gdb.MemoryError, gdb.error, OverflowError) as error:
            raise TargetError(str(error)) from None

    files = MappedFiles()

    def frames_of(mapping: Mapping) -> FileFrames | None:
        return files.frames_at(inferior.pid, mapping)

    space = ProcessSpace(word_size, read, lambda: parse_maps(read_maps(inferior.pid)), frames_of)
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    differing: list[object] = []
    depths: Counter[int] = Counter()
    for _ in range(stops):
        gdb.execute(f"stepi {chance.randrange(1, longest)}", to_string=True)
        if not inferior.pid:
            break
        frames, frame = [], gdb.newest_frame()
        registers = {
            number: int(frame.read_register(name)) & ((1 << 8 * word_size) - 1)
            for number, name in enumerate(NAMES[word_size])
        }
        while frame is not None:
            if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
                frames.append(frame.pc())
            frame = frame.older()
        if len(frames) > 1 and frames[-1] == 0:
            frames.pop()  # of a goroutine: nothing called its first function
        space.forget()
        found = walk(space, columns, registers, 500)
        ends[found.end.name] += 1
        depths[len(found.addresses)] += 1
        ours = list(found.addresses)
        # Where there is no table, gdb guesses on: what we found must be right as far as it goes.
        expected = frames if found.end is StackEnd.OUTERMOST else frames[: len(ours)]
        if ours != expected:
            differing.append(
                [found.end.name, list(map(hex, ours)), list(map(hex, frames)), str(gdb.newest_frame().name())]
            )
    print("FOUND " + json.dumps({"ends": ends, "differing": differing, "depths": depths}))
