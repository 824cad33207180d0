"""
A neighbour of a function's first instruction where a uprobe costs a twentieth: the cheap site.

Functions often begin with an instruction that has no effect and that kernels step (``endbr64``, long nops), and go on
with one that they emulate (``push %rbp``). A breakpoint on the second one sees what one on the first would, unless the
code is entered between the two. So a site is moved only if nothing can get there but by way of the first instruction:
no other symbol, no direct branch of the module, and no indirect jump of the function.

The search for branches looks for their bytes wherever they may stand. It so finds more than there are, which costs
nothing but a cheap site, and never fewer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.lazypattern import lazy_pattern
from dprobes.target.code.instructions import MAX_LENGTH, instructions_between
from dprobes.target.code.uprobes import UprobeClass, has_no_effect, uprobe_class
from dprobes.target.elf.callframes import CallFrames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.code.instructions import DecodedInstruction
    from dprobes.target.location import Module

__all__ = ["cheap_site", "cheap_sites"]

_BITS = {"i386": 32, "x86_64": 64}
_PASSED = 3  # instructions without effect that are looked past
_LANDING_MARKS = (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb")
"""``endbr64`` and ``endbr32``: in code that has these, indirect jumps without notrack lead to nothing else."""

_NEAR_BRANCH = lazy_pattern(rb"[\xe8\xe9]|\x0f[\x80-\x8f]")
"""What stands before the 32-bit distance of a call or jump."""
_SHORT_BRANCH = lazy_pattern(rb"[\x70-\x7f\xe0-\xe3\xeb]")
"""What stands before the 8-bit distance of a jump or loop."""
_INDIRECT_JUMP = lazy_pattern(rb"\xff[\x20-\x2f\x60-\x6f\xa0-\xaf\xe0-\xef]")
_NOTRACK = 0x3E
_DISTANCE = struct.Struct("<i")
_FEW = 8
"""For so many targets it takes less time to look for each than for all branches."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Hold a possible move: from the link address ``entry`` over ``boundaries``, of which the last is the new site."""

    index: int
    entry: int
    boundaries: tuple[int, ...]
    raw: bytes


def cheap_site(module: Module, instruction: DecodedInstruction) -> int:
    """
    Return by how many bytes a uprobe at the instruction may move to be emulated by the kernel instead of stepped.

    0 if it has to stay, or gains nothing: also if it is not the first instruction of a function.
    """
    return cheap_sites(module, [instruction])[0]


def cheap_sites(module: Module, instructions: Sequence[DecodedInstruction]) -> list[int]:
    """Return the same for many instructions of a module; made for thousands of them."""
    bits = _BITS.get(module.elf.machine)
    moved = [0] * len(instructions)
    if bits is None:
        return moved
    candidates = [
        found for index, one in enumerate(instructions) if (found := _candidate(module, index, one, bits)) is not None
    ]
    if not candidates:
        return moved
    reached = _branch_targets(module, {target for found in candidates for target in found.boundaries})
    frames = CallFrames(module.elf)
    for found in candidates:
        if reached.isdisjoint(found.boundaries) and _is_only_way(module, frames, found):
            moved[found.index] = found.boundaries[-1] - found.entry
    return moved


def _candidate(module: Module, index: int, instruction: DecodedInstruction, bits: int) -> _Candidate | None:
    raw = instruction.raw
    if uprobe_class(raw, bits) is not UprobeClass.STEPPED or not has_no_effect(raw, bits):
        return None
    entry = instruction.address
    boundaries: list[int] = []
    for following, _, code in instructions_between(module, entry, entry + (_PASSED + 1) * MAX_LENGTH):
        if following.ip == entry:
            continue
        boundaries.append(following.ip)
        kind = uprobe_class(code, bits)
        if kind is UprobeClass.EMULATED:
            # The return address of an emulated call may be missing on a shadow stack.
            return None if following.is_call_near else _Candidate(index, entry, tuple(boundaries), raw)
        if len(boundaries) > _PASSED or kind is not UprobeClass.STEPPED or not has_no_effect(code, bits):
            return None
    return None


def _branch_targets(module: Module, wanted: set[int]) -> set[int]:
    """Return those of the link addresses that a direct branch in the module's code may lead to."""
    found: set[int] = set()
    for segment in module.elf.load_segments:
        if segment.executable:
            code = bytes(module.elf.data[segment.offset : segment.offset + segment.filesz])
            found.update(_short_branch_targets(code, segment.vaddr, wanted))
            if len(wanted) > _FEW:
                found.update(_near_branch_targets(code, segment.vaddr, wanted))
            else:
                found.update(target for target in wanted if _has_near_branch(code, target - segment.vaddr))
    return found


def _short_branch_targets(code: bytes, base: int, wanted: set[int]) -> Iterator[int]:
    for target in wanted:
        place = target - base
        # The byte behind the opcode counts from its own end on: from -128 to 127 bytes.
        for match in _SHORT_BRANCH.finditer(code, max(0, place - 129), max(0, min(place + 127, len(code) - 1))):
            if (match.end() + 1 - place + code[match.end()]) & 0xFF == 0:
                yield target
                break


def _near_branch_targets(code: bytes, base: int, wanted: set[int]) -> Iterator[int]:
    distance_at = _DISTANCE.unpack_from
    for match in _NEAR_BRANCH.finditer(code, 0, len(code) - _DISTANCE.size):
        place = match.end()
        target = base + place + 4 + distance_at(code, place)[0]
        if target in wanted:
            yield target


def _has_near_branch(code: bytes, target: int) -> bool:
    """
    Return whether a branch in ``code`` leads to its byte ``target``.

    The upper half of a distance is the same for 64 KiB of places: it is looked for as two bytes.
    """
    # At a place p the distance is target - p - 4.
    for upper in range((target - len(code) - 4) >> 16, (target >> 16) + 1):
        first, last = target - 4 - ((upper << 16) | 0xFFFF), target - 4 - (upper << 16)
        pattern = (upper & 0xFFFF).to_bytes(2, "little")
        position = code.find(pattern, max(0, first) + 2, max(0, last + 4))
        while position >= 0:
            place = position - 2
            if int.from_bytes(code[place:position], "little") == (target - place - 4) & 0xFFFF and (
                _NEAR_BRANCH.fullmatch(code, place - 1, place) or _NEAR_BRANCH.fullmatch(code, place - 2, place)
            ):
                return True
            position = code.find(pattern, position + 1, max(0, last + 4))
    return False


def _is_only_way(module: Module, frames: CallFrames, found: _Candidate) -> bool:
    """Return whether the new site lies in the function and has no name, and no indirect jump leads to it."""
    extent = _extent(module, found.entry)
    if extent is None or not found.boundaries[-1] < extent[1]:
        return False
    if any(module.symbols.names_at(boundary) for boundary in found.boundaries):
        return False
    start, end = extent
    offset = module.file_offset(start)
    code = module.elf.data[offset : offset + end - start]
    if _INDIRECT_JUMP.search(code) is None:
        return True
    jumps = _indirect_jumps(code, start, _BITS[module.elf.machine])
    is_marked = found.raw in _LANDING_MARKS
    return jumps is not None and all(_leads_elsewhere(frames, *jump, is_marked) for jump in jumps)


def _extent(module: Module, entry: int) -> tuple[int, int] | None:
    """Return where the function starts and ends whose first instruction is at ``entry``, if that is known."""
    symbol = module.symbols.covering(entry)
    if symbol is not None and symbol.address == entry and symbol.size:
        return entry, entry + symbol.size
    extent = module.elf.frames.extent(module.elf, entry)
    return extent if extent is not None and extent[0] == entry and symbol is None else None


def _indirect_jumps(code: bytes, start: int, bits: int) -> list[tuple[int, bytes]] | None:
    """Return address and bytes of each indirect jump; None if there is data between the instructions."""
    from iced_x86 import Decoder, FlowControl

    found = []
    for instruction in Decoder(bits, code, ip=start):
        if instruction.is_invalid:
            return None
        if instruction.flow_control == FlowControl.INDIRECT_BRANCH:
            place = instruction.ip - start
            found.append((instruction.ip, code[place : place + instruction.len]))
    return found


def _leads_elsewhere(frames: CallFrames, address: int, raw: bytes, is_marked: bool) -> bool:
    """
    Return whether an indirect jump cannot lead to the beginning of its function.

    There only the return address is on the stack. Where the jump has more on it, it cannot; where not, it is a tail
    call in a function with a landing mark, unless it is a notrack jump, as those through tables are.
    """
    at_entry = frames.is_at_entry(address)
    if at_entry is None:
        return False
    return not at_entry or (is_marked and _NOTRACK not in raw[:2])
