"""
Exits of a function: its return instructions, and the jumps that may be tail calls.

The code of a function is the range of its symbol or frame description, and the cold parts that the compiler moved
elsewhere. A jump out of the function is a tail call if only the return address is on the stack; the unwind table
describes the stack there. Cases that cannot be decided are errors, because a missed return would be worse than no
probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.code.machine_code import instructions_between, is_x86

if TYPE_CHECKING:
    from iced_x86 import Instruction

    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.probed_module import Module
    from dprobes.target.unwind.exception_frames import FrameAddress
    from dprobes.target.unwind.frame_tables import CodeRules

__all__ = ["CallFrames", "Exit", "ExitKind", "Exits", "function_exits"]


class CallFrames:
    """Call frames of one file, from its unwind table. Malformed entries count as missing."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._tables: dict[int, CodeRules | None] = {}

    def is_at_entry(self, address: int) -> bool | None:
        """
        Return whether the return address is on top of the stack at ``address``, as at the start of a function.

        Return None if the file has no unwind table for it.
        """
        from dprobes.target.unwind.stack_walk import COLUMNS  # needed by few programs

        frame = self.frame_address(address)
        columns = COLUMNS.get(self._elf.machine)
        if frame is None or frame.register is None or columns is None:
            return None
        return frame.register == columns.sp and frame.offset == self._elf.word_size

    def frame_address(self, address: int) -> FrameAddress | None:
        """Return the rule for the canonical frame address at a link address, or None if no unwind table covers it."""
        description = self._elf.frames.description_of(self._elf, address)
        if description is None:
            return None
        if description not in self._tables:
            from dprobes.target.unwind.frame_tables import code_rules

            self._tables[description] = code_rules(self._elf, description)
        rules = self._tables[description]
        row = rules.row_at(address) if rules is not None else None
        return None if row is None else row.frame


class ExitKind(Enum):
    """Way in which control leaves a function: a return, or a jump out of it."""

    RETURN = "return"
    JUMP = "jump"
    """A jump, which leaves the function only if its target is outside."""


class Exit(NamedTuple):
    """Instruction that leaves a function, with its link address and its file offset."""

    kind: ExitKind
    address: int
    offset: int
    raw: bytes


class Exits(NamedTuple):
    """
    Exits of a function, and the ranges of link addresses (end excluded) of its code.

    ``goes_back`` is True if the function jumps to its first instruction, which is then executed without a call.
    ``are_known`` is False for processors on which functions return through a register: their exits are found at run
    time.
    """

    exits: tuple[Exit, ...]
    ranges: tuple[tuple[int, int], ...]
    goes_back: bool = False
    are_known: bool = True

    @property
    def are_missing(self) -> bool:
        """True if the function never returns."""
        return self.are_known and not self.exits


def function_exits(module: Module, frames: CallFrames, address: int, size: int) -> Exits:
    """
    Return the exits of the function at a link address. ``size`` is the size of its symbol in bytes, or 0.

    If they cannot be determined, raise ``TargetError`` with a clause whose subject is "it".
    """
    end = address + size
    if not is_x86(module):
        return Exits((), ((address, end),), are_known=False)
    if not size:
        extent = module.elf.frames.extent(module.elf, address)
        if extent is None or extent[0] != address:
            raise TargetError("its size is not known")
        end = extent[1]
    return _Search(module, frames, address, end).run()


@dataclass(slots=True)
class _Search:
    module: Module
    frames: CallFrames
    start: int
    end: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    starts: set[int] = field(default_factory=set)
    jumps: list[tuple[Instruction, int, bytes]] = field(default_factory=list)

    def run(self) -> Exits:
        waiting = [(self.start, self.end)]
        decided = 0
        while waiting:
            self._decode(*waiting.pop())
            # Check all earlier jumps, because a new range may be the target of several.
            for jump in self.jumps[decided:]:
                part = self._follow(*jump)
                if part is not None and part not in self.ranges and part not in waiting:
                    waiting.append(part)
            decided = len(self.jumps)
        for instruction, _, _ in self.jumps:
            if self._target(instruction) is not None:
                self._check_target(instruction)
        exits = tuple(exit_ for _, exit_ in sorted(self.exits.items()))
        goes_back = any(self._target(instruction) == self.start for instruction, _, _ in self.jumps)
        return Exits(exits, tuple(self.ranges), goes_back)

    def _decode(self, start: int, end: int) -> None:
        from iced_x86 import FlowControl, Mnemonic

        self.ranges.append((start, end))
        falls, position = False, start
        for instruction, offset, raw in instructions_between(self.module, start, end):
            if instruction.is_invalid:
                raise TargetError("it holds data between its instructions")
            position = instruction.ip + instruction.len
            self.starts.add(instruction.ip)
            flow = instruction.flow_control
            if flow == FlowControl.NEXT:
                if instruction.mnemonic != Mnemonic.NOP:
                    falls = instruction.mnemonic != Mnemonic.HLT
                continue
            falls = flow == FlowControl.CONDITIONAL_BRANCH
            if flow == FlowControl.RETURN:
                if instruction.mnemonic != Mnemonic.RET:
                    raise TargetError("it does not return as functions do, but far or from an interrupt")
                self._add(ExitKind.RETURN, instruction, offset, raw)
            elif flow in (
                FlowControl.UNCONDITIONAL_BRANCH,
                FlowControl.CONDITIONAL_BRANCH,
                FlowControl.INDIRECT_BRANCH,
            ):
                self.jumps.append((instruction, offset, raw))
        if position != end:
            raise TargetError("its size ends inside an instruction")
        if falls:
            raise TargetError("it continues into the code after it")

    def _add(self, kind: ExitKind, instruction: Instruction, offset: int, raw: bytes) -> None:
        self.exits[instruction.ip] = Exit(kind, instruction.ip, offset, raw)

    def _target(self, instruction: Instruction) -> int | None:
        from iced_x86 import FlowControl

        return None if instruction.flow_control == FlowControl.INDIRECT_BRANCH else int(instruction.near_branch_target)

    def _contains(self, address: int) -> bool:
        return any(start <= address < end for start, end in self.ranges)

    def _follow(self, instruction: Instruction, offset: int, raw: bytes) -> tuple[int, int] | None:
        """
        Record a jump if it may leave the function.

        If it leads to a separate part of the function, return the part's range.
        """
        target = self._target(instruction)
        if target is not None and self._contains(target):
            return None
        if target is not None and (part := self._cold_part(target)) is not None:
            return part
        at_entry = self.frames.is_at_entry(instruction.ip)
        if at_entry is None:
            raise TargetError("it has a jump, and no unwind table shows whether that leaves it")
        if at_entry:
            self._add(ExitKind.JUMP, instruction, offset, raw)
            return None
        # A jump with more on the stack than the return address cannot be a tail call.
        return None if target is None else self._unnamed_part(target)

    def _cold_part(self, target: int) -> tuple[int, int] | None:
        """Return the range of this function's cold part that contains ``target``, or None if there is none."""
        symbols = self.module.symbols
        part, own = symbols.covering(target), symbols.names_at(self.start)
        if part is None or not part.size or ".cold" not in part.name or part.name.partition(".cold")[0] not in own:
            return None
        return part.address, part.address + part.size

    def _unnamed_part(self, target: int) -> tuple[int, int]:
        symbol = self.module.symbols.covering(target)
        if symbol is not None and ".cold" not in symbol.name:
            raise TargetError(f"it shares code with '{symbol.name}'")
        extent = self.module.elf.frames.extent(self.module.elf, target)
        if extent is None:
            raise TargetError("it continues in code of unknown size")
        return extent

    def _check_target(self, instruction: Instruction) -> None:
        """Raise ``TargetError`` if a jump leads into another instruction, unless it only skips a prefix of it."""
        from iced_x86 import FlowControl

        target = self._target(instruction)
        area = next((r for r in self.ranges if target is not None and r[0] <= target < r[1]), None)
        if target is None or area is None or target in self.starts:
            return
        for inner, _, _ in instructions_between(self.module, target, area[1]):
            if inner.is_invalid or inner.flow_control != FlowControl.NEXT:
                break
            if inner.ip + inner.len in self.starts or inner.ip + inner.len == area[1]:
                return
        raise TargetError("it has a jump into the middle of an instruction")
