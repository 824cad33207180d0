"""
Instructions of real files as probepoints: all of a program's own, or a random choice of a library's.

A place has the first byte of its instruction, so that nothing is inserted if the code differs. Only places that an
engine refuses are omitted (``accepted``).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, NamedTuple

from iced_x86 import Decoder, Mnemonic

from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from integration.support import Result

__all__ = ["Place", "accepted", "all_places", "places_in", "random_places", "source_of"]

_IN_A_FUNCTION = 4
"""The maximum number of places in one function in a random choice."""

_NEVER = frozenset((
    Mnemonic.INVALID, Mnemonic.INT, Mnemonic.INT1, Mnemonic.INT3, Mnemonic.INTO, Mnemonic.WAIT, Mnemonic.NOP,
    Mnemonic.UD2, Mnemonic.HLT,
))  # fmt: skip
"""Instructions that no engine can probe, and the padding between functions."""

_ENDS = frozenset((Mnemonic.INVALID, Mnemonic.UD2))
_ERROR = re.compile(r"\.rpn:(\d+):\d+: error: ", re.MULTILINE)


class Place(NamedTuple):
    """An instruction: its offset in the file, first byte, link address, and True if it has a repeat prefix."""

    offset: int
    opcode: int
    address: int
    repeats: bool


def all_places(path: Path) -> list[Place]:
    """Return all instructions of a file's .text section that can be probed."""
    elf = ElfFile.open(path)
    text = next(section for section in elf.sections if section.name == ".text")
    return list(_decoded(elf, text.address, text.size))


def places_in(path: Path, functions: Iterable[tuple[int, int]]) -> list[Place]:
    """Return the instructions of functions, given by address and size, that can be probed."""
    elf = ElfFile.open(path)
    return [place for start, size in functions for place in _decoded(elf, start, size)]


def random_places(path: Path, count: int, random: Random) -> list[Place]:
    """Return random instructions of the functions that a file's unwind table describes, a few of each."""
    elf = ElfFile.open(path)
    described = zip(elf.frames.starts, elf.frames.descriptions, strict=True)
    functions = [(start, _range(elf, description)) for start, description in described]
    random.shuffle(functions)
    found: list[Place] = []
    for start, size in functions:
        if len(found) >= count:
            break
        places = list(_decoded(elf, start, size))
        found += random.sample(places, min(len(places), _IN_A_FUNCTION))
    return sorted(set(found[:count]))


def _range(elf: ElfFile, description: int) -> int:
    # Length, pointer to the common part, start, size: compilers for x86 write numbers of 4 bytes (LSB 5.0, 10.6.1.2).
    return int(struct.unpack("<I", elf.read(description + 12, 4))[0])


def _decoded(elf: ElfFile, start: int, size: int) -> Iterator[Place]:
    offset = elf.file_offset(start)
    if offset is None or not elf.is_executable_offset(offset):
        return
    data = elf.read(start, size)
    for instruction in Decoder(64 if elf.word_size == 8 else 32, data, ip=start):
        if instruction.mnemonic not in _NEVER:
            at = instruction.ip - start
            repeats = instruction.has_rep_prefix or instruction.has_repne_prefix
            yield Place(offset + at, data[at], instruction.ip, repeats)


def source_of(path: Path, places: Sequence[Place], more: str = "") -> str:
    """
    Return a program with a probepoint at each place, on a line of its own; its minor code is the place's index.

    ``more`` are further statements of each definition.
    """
    lines = [f'name = "{path}"']
    for n, place in enumerate(places):
        lines.append(f"offset = {place.offset:#x}; opcode = {place.opcode:#x}; minor = {n}; {more} abort")
    return "\n".join(lines) + "\n"


def accepted(
    path: Path, places: Sequence[Place], more: str, run: Callable[[str], Result]
) -> tuple[list[Place], Result]:
    """
    Run a program without the places that the engine refuses; return the remaining places and the result.

    ``run`` executes a program's source. ``more`` are further statements of each definition.
    """
    taken = list(places)
    while True:
        result = run(source_of(path, taken, more))
        refused = {int(line) - 2 for line in _ERROR.findall(result.stderr)}
        if result.status != 2 or not refused:
            return taken, result
        taken = [place for n, place in enumerate(taken) if n not in refused]
