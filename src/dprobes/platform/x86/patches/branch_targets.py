"""
Possible targets of branches in the code of a file. No target may be in the middle of a window.

Targets are the starts of functions, targets of direct branches and of jump tables, addresses in code or data, and the
landing pads of exceptions. The code is decoded from each known start to the next one. Data between functions is
decoded, too. Bytes that look like a near branch count wherever they are, because a false target only prevents a window.

The same pass finds *dead* bytes: padding after an instruction from which control does not continue there.
"""

from __future__ import annotations

import functools
import re
import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.code.machine_code import prepare_decoder
from dprobes.target.elf.relocations import code_pointers, restartable_sections
from dprobes.target.unwind.frame_tables import landing_pads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iced_x86 import ConstantOffsets, Instruction

    from dprobes.target.probed_module import Module

__all__ = [
    "CodeBytes",
    "CodeRange",
    "ControlFlow",
    "Kind",
    "ModuleCode",
    "Spans",
    "code_ranges",
    "control_flow",
    "kind_of",
    "legacy_prefixes",
    "undisplaceable",
]

_LEGACY_PREFIXES = b"\x66\x67\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65"
_OPERAND_SIZE = 0x66
_KERNEL_ENTRY = b"\xcd\x80"
"""The software interrupt for system calls, which works in 64-bit code as well."""


class Kind(NamedTuple):
    """
    Effect of an instruction on control flow.

    ``leaves`` is True if control does not continue with the following instruction, or only when a call (``calls``)
    returns. ``is_branch`` is True if it has a code address as a distance or in an operand. ``obstacle`` is the reason
    why it cannot be executed elsewhere, as a clause with the subject "it". The kind of each iced ``Code`` is computed
    once.
    """

    leaves: bool = False
    calls: bool = False
    is_branch: bool = False
    is_system_call: bool = False
    obstacle: str | None = None


@functools.cache
def kind_of(code: int) -> Kind:
    """Return the kind of the instructions with iced's code ``code``."""
    from iced_x86 import FlowControl, Instruction, Mnemonic

    instruction = Instruction()
    instruction.code = code  # type: ignore[assignment]
    flow, mnemonic = instruction.flow_control, instruction.mnemonic
    if mnemonic == Mnemonic.INVALID:
        return Kind(leaves=True, obstacle="it is not a valid instruction")
    if mnemonic == Mnemonic.SYSENTER:
        return Kind(is_system_call=True, obstacle="it enters the kernel and comes back elsewhere")
    if mnemonic in (Mnemonic.SYSCALL, Mnemonic.INT):
        return Kind(is_system_call=True)
    if flow == FlowControl.INTERRUPT:
        return Kind(obstacle="it is a software interrupt")
    if instruction.is_call_far or instruction.is_call_far_indirect:
        return Kind(leaves=True, calls=True, obstacle="it is a far call, which pushes the address of its copy")
    leaving = (
        FlowControl.UNCONDITIONAL_BRANCH, FlowControl.INDIRECT_BRANCH, FlowControl.RETURN, FlowControl.EXCEPTION,
    )  # fmt: skip
    calls = instruction.is_call_near or instruction.is_call_near_indirect
    branches = (
        FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH, FlowControl.INDIRECT_BRANCH,
        FlowControl.XBEGIN_XABORT_XEND,
    )  # fmt: skip
    return Kind(leaves=flow in leaving or calls, calls=calls, is_branch=flow in branches or calls)


def undisplaceable(instruction: Instruction, raw: bytes) -> str | None:
    """
    Return the reason why an instruction cannot be executed elsewhere, a clause with the subject "it".

    Return None if it can.
    """
    kind = kind_of(instruction.code)
    if kind.is_branch and raw[0] in _LEGACY_PREFIXES and _OPERAND_SIZE in raw[: legacy_prefixes(raw)]:
        return "it is a branch with an operand-size prefix, which processors understand differently"
    if kind.is_system_call and raw[0] == _KERNEL_ENTRY[0] and raw != _KERNEL_ENTRY:
        return "it is a software interrupt"
    return kind.obstacle


def legacy_prefixes(raw: bytes) -> int:
    """Return the number of legacy prefixes at the start of an instruction."""
    return len(raw) - len(raw.lstrip(_LEGACY_PREFIXES))


_ENTRY = struct.Struct("<i")
_ENTRIES_MAX = 1 << 16
"""Maximum number of entries of a jump table that are read."""
_NEVER = 1 << 64

_NEAR_BRANCH = re.compile(rb"[\xe8\xe9]|\x0f[\x80-\x8f]")
"""The opcodes before the 32-bit distance of a call or jump."""


class CodeRange(NamedTuple):
    """Code from the link address ``start`` to ``end`` (excluded)."""

    start: int
    end: int
    data: bytes


class Spans:
    """Set of disjoint ranges of link addresses, ends excluded, for searches by address."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        in_order = sorted(ranges)
        self._starts = [start for start, _ in in_order]
        self._ends = [end for _, end in in_order]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, address: int) -> bool:
        return self.end_at(address) > address

    def end_at(self, address: int) -> int:
        """Return the end of the range that contains an address, or the address itself if no range does."""
        i = bisect_right(self._starts, address) - 1
        return max(address, self._ends[i]) if i >= 0 else address

    def between(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Iterate over the intersections of the ranges with that from ``start`` to ``end``."""
        for i in range(max(0, bisect_right(self._starts, start) - 1), bisect_right(self._starts, end)):
            first, last = max(start, self._starts[i]), min(end, self._ends[i])
            if first < last:
                yield first, last


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """
    Control flow of a file, in link addresses: possible ``targets`` of branches, and sorted ``starts`` of functions.

    ``dead`` bytes are never executed. Code in ``vague`` ranges computes its targets, which are therefore unknown.
    Threads must not be moved out of ``restartable`` sequences (rseq).
    """

    targets: frozenset[int]
    starts: tuple[int, ...] = ()
    dead: Spans = field(default_factory=Spans)
    vague: Spans = field(default_factory=Spans)
    restartable: Spans = field(default_factory=Spans)


def code_ranges(module: Module) -> list[CodeRange]:
    """Return the executable sections of a file, or without sections its executable segments, in order."""
    elf = module.elf
    places = [(s.address, s.size) for s in elf.sections if s.executable and s.in_file]
    places = places or [(s.vaddr, s.filesz) for s in elf.load_segments if s.executable]
    return [CodeRange(start, start + size, elf.read(start, size)) for start, size in sorted(places) if size]


def control_flow(module: Module, ranges: list[CodeRange]) -> ControlFlow:
    """
    Return the control flow of a file's code as far as it is known.

    Raise ``TargetError`` if the file is not for x86-64.
    """
    if module.elf.machine != "x86_64":
        raise TargetError(f"'{module.path}' is for {module.elf.machine}, jumps to trampolines are made for x86_64")
    prepare_decoder()
    starts = {*module.elf.frames.starts, *(symbol.address for symbol in module.symbols.functions()), module.elf.entry}
    search = _Search(module, ranges, starts)
    for code in ranges:
        search.decode(code)
    search.follow()
    targets = search.targets | starts | code_pointers(module.elf) | landing_pads(module.elf)
    vague = Spans(search.vague)
    restartable = restartable_sections(module.elf)
    targets.update(abort for _, _, abort in restartable)
    return ControlFlow(
        frozenset(targets),
        tuple(sorted(starts)),
        Spans(span for span in _cut(search.dead, targets) if span[0] not in vague),
        vague,
        Spans((start, end) for start, end, _ in restartable),
    )


@dataclass(slots=True)
class _Function:
    """Decoded code from the start of a function to the next start. ``named`` has the addresses in its operands."""

    start: int
    end: int
    named: list[int]
    jumps_to_sum: bool = False
    jumps_to_register: bool = False


class _Search:
    def __init__(self, module: Module, ranges: list[CodeRange], starts: set[int]) -> None:
        self._elf = module.elf
        self._absolute: list[int] = []
        if not module.elf.is_pie_or_shared:
            first, last = ranges[0].start, ranges[-1].end
            self._absolute = sorted(place for code in ranges for place in _addresses_in(code, first, last))
        self._ranges = ranges
        self._starts = sorted(starts)
        self._functions: list[_Function] = []
        self._named: set[int] = set()
        self.targets: set[int] = set()
        self.dead: list[tuple[int, int]] = []
        self.vague: set[tuple[int, int]] = set()

    def decode(self, code: CodeRange) -> None:
        """Decode a range, from each start to the next one."""
        starts = self._starts[bisect_right(self._starts, code.start) : bisect_right(self._starts, code.end - 1)]
        self.targets.update(_near_branch_targets(code))
        for start, end in pairwise((code.start, *starts, code.end)):
            function = _Function(start, end, [])
            self._decode(function, code.data[start - code.start : end - code.start])
            self._named.update(function.named)
            if function.jumps_to_register:
                self._functions.append(function)

    def _decode(self, function: _Function, data: bytes) -> None:
        from iced_x86 import Decoder, FlowControl, Mnemonic, OpKind, Register

        branches = (FlowControl.CONDITIONAL_BRANCH, FlowControl.CALL, FlowControl.UNCONDITIONAL_BRANCH)
        padding, sums = (Mnemonic.NOP, Mnemonic.INT3), (Mnemonic.ADD, Mnemonic.SUB, Mnemonic.LEA)
        found, named = self.targets, function.named
        number = bisect_left(self._absolute, function.start)
        absolute = self._absolute[number] if number < len(self._absolute) else _NEVER
        dead = sum_ends = 0
        sum_register = Register.NONE
        decoder = Decoder(64, data, ip=function.start)
        for instruction in decoder:
            if dead:
                if instruction.mnemonic in padding:
                    continue
                if instruction.ip > dead:
                    self.dead.append((dead, instruction.ip))
                dead = 0
            flow = instruction.flow_control
            if flow == FlowControl.NEXT:
                if instruction.is_ip_rel_memory_operand:
                    named.append(instruction.ip_rel_memory_address)
                if instruction.mnemonic in sums:
                    sum_ends, sum_register = instruction.next_ip, instruction.op0_register
                while instruction.next_ip > absolute:
                    if _is_number(instruction, decoder.get_constant_offsets(instruction), absolute - instruction.ip):
                        start = absolute - function.start
                        named.append(int.from_bytes(data[start : start + 4], "little"))
                    number += 1
                    absolute = self._absolute[number] if number < len(self._absolute) else _NEVER
                continue
            if flow in branches:
                found.add(instruction.near_branch_target)
            elif flow == FlowControl.INDIRECT_BRANCH and instruction.op0_kind == OpKind.REGISTER:
                function.jumps_to_register = True
                is_sum = sum_ends == instruction.ip and sum_register == instruction.op0_register
                function.jumps_to_sum |= is_sum
            if kind_of(instruction.code).leaves and flow not in (FlowControl.CALL, FlowControl.INDIRECT_CALL):
                dead = 0 if instruction.is_invalid else instruction.next_ip
        if 0 < dead < function.end:
            self.dead.append((dead, function.end))

    def follow(self) -> None:
        """
        Add as targets the code addresses in operands, and the entries of jump tables.

        An entry is a 32-bit distance from the start of its table. A function that jumps to another kind of sum is
        vague.
        """
        self.targets.update(address for address in self._named if self._is_code(address))
        segments = [(s.vaddr, self._elf.read(s.vaddr, s.filesz)) for s in self._elf.load_segments]
        tables: set[int] = set()
        for start, following in pairwise([*sorted(self._named), 1 << 64]):
            for base, data in segments:
                if 0 <= start - base <= len(data) - _ENTRY.size:
                    targets = set(self._table(data, start - base, start, following))
                    self.targets |= targets
                    if targets:
                        tables.add(start)
        for function in self._functions:
            labels = [address for address in function.named if self._is_inside_function(address)]
            if labels or (function.jumps_to_sum and tables.isdisjoint(function.named)):
                parts = (self._function_around(address) for address in (function.start, *labels))
                self.vague.update((part.start, part.stop) for part in parts)

    def _table(self, data: bytes, place: int, start: int, following: int) -> Iterator[int]:
        """
        Iterate over the targets of a jump table that begins at ``place`` of ``data``.

        The table ends at an entry whose target is not code. The next named address may be the start of another table,
        or be in the middle of this one. After it, the table continues only while all targets are in one function.
        """
        within = None
        end = min(len(data) - _ENTRY.size + 1, place + _ENTRIES_MAX * _ENTRY.size)
        for position in range(place, end, _ENTRY.size):
            target = start + _ENTRY.unpack_from(data, position)[0]
            if not self._is_code(target):
                return
            within = within or self._function_around(target)
            if position - place >= following - start and target not in within:
                return
            yield target

    def _function_around(self, address: int) -> range:
        i = bisect_right(self._starts, address)
        start = self._starts[i - 1] if i else self._ranges[0].start
        return range(start, self._starts[i] if i < len(self._starts) else self._ranges[-1].end)

    def _is_inside_function(self, address: int) -> bool:
        """Return True if an address is in code, but not the start of a function."""
        i = bisect_left(self._starts, address)
        return self._is_code(address) and (i == len(self._starts) or self._starts[i] != address)

    def _is_code(self, address: int) -> bool:
        i = bisect_right(self._ranges, address, key=lambda code: code.start) - 1
        return i >= 0 and address < self._ranges[i].end


def _near_branch_targets(code: CodeRange) -> Iterator[int]:
    """Iterate over the targets of bytes that look like a near branch, if these are in the same code."""
    distance_at, data = _ENTRY.unpack_from, code.data
    for match in _NEAR_BRANCH.finditer(data, 0, max(0, len(data) - _ENTRY.size)):
        target = code.start + match.end() + _ENTRY.size + distance_at(data, match.end())[0]
        if code.start <= target < code.end:
            yield target


def _is_number(instruction: Instruction, offsets: ConstantOffsets, place: int) -> bool:
    """Return True if 32 bits at a place of an instruction are an immediate number or an absolute address."""
    if offsets.immediate_size == _ENTRY.size and offsets.immediate_offset == place:
        return True
    is_address = offsets.displacement_size == _ENTRY.size and not instruction.is_ip_rel_memory_operand
    return is_address and offsets.displacement_offset == place


def _addresses_in(code: CodeRange, first: int, last: int) -> Iterator[int]:
    """Iterate over the places in code with 32 bits that are an address from ``first`` to ``last`` (excluded)."""
    for shift in range(4):
        data = code.data[shift:]
        words = memoryview(data[: len(data) & ~3]).cast("I")
        yield from (code.start + shift + 4 * i for i, word in enumerate(words) if first <= word < last)


def _cut(dead: Iterable[tuple[int, int]], targets: set[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the ``dead`` ranges, each ended at the first possible branch target in it."""
    for start, end in sorted(dead):
        stop = next((address for address in range(start, end) if address in targets), end)
        if stop > start:
            yield start, stop


class CodeBytes:
    """
    Code of a process from a start address to an end address (excluded), with the bytes that jumps have changed.

    A byte is *written* by at most one jump. A punned jump *relies* on the bytes after it: those must not change,
    whether the file or another jump provides them.
    """

    __slots__ = ("current", "end", "original", "relied", "start", "written")

    def __init__(self, start: int, original: bytes) -> None:
        self.start = start
        self.end = start + len(original)
        self.original = original
        self.current = bytearray(original)
        self.written = bytearray(len(original))
        self.relied = bytearray(len(original))
        """
        Number of jumps that rely on each byte: at most five, its writer and the jumps at the four bytes before it.
        """

    def is_written(self, address: int, size: int) -> bool:
        """Return True if one of the bytes belongs to a jump."""
        place = address - self.start
        return any(self.written[place : place + size])

    def is_relied_on(self, address: int, size: int) -> bool:
        """Return True if a jump relies on one of the bytes."""
        place = address - self.start
        return any(self.relied[place : place + size])

    def is_free(self, address: int, size: int) -> bool:
        """Return True if no jump has written the bytes or relies on them, so that they may be overwritten."""
        return not self.is_written(address, size) and not self.is_relied_on(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Write bytes that no jump has written or relies on."""
        place = address - self.start
        self.current[place : place + len(data)] = data
        self.written[place : place + len(data)] = b"\x01" * len(data)

    def rely(self, address: int, end: int, change: int = 1) -> None:
        """
        Record that one more jump relies on the bytes up to ``end`` (excluded).

        With ``change`` -1, it is one less.
        """
        for place in range(address - self.start, end - self.start):
            self.relied[place] += change

    def restore(self, address: int, size: int) -> None:
        """Restore the original content of bytes that no jump relies on."""
        assert not self.is_relied_on(address, size)
        place = address - self.start
        self.current[place : place + size] = self.original[place : place + size]
        self.written[place : place + size] = bytes(size)


class ModuleCode:
    """
    Code of a module, mapped at its link addresses plus ``bias``, with its control flow.

    ``size`` is the size of the whole image in bytes. No code refers to an address in its module that is farther away.
    """

    def __init__(self, ranges: Iterable[CodeRange], flow: ControlFlow, bias: int, size: int) -> None:
        self.bias = bias
        self.flow = flow
        self.size = size
        self.ranges = [CodeBytes(code.start + bias, code.data) for code in ranges]
        self._starts = [code.start for code in self.ranges]

    @classmethod
    def of(cls, module: Module, bias: int) -> ModuleCode:
        """Return the code of a module that is mapped at ``bias`` bytes above its link addresses."""
        ranges, segments = code_ranges(module), module.elf.load_segments
        size = max(s.vaddr + s.memsz for s in segments) - min(s.vaddr for s in segments)
        return cls(ranges, control_flow(module, ranges), bias, size)

    def unchanged(self) -> ModuleCode:
        """Return the same code without jumps."""
        return self.mapped_at(self.bias)

    def mapped_at(self, bias: int) -> ModuleCode:
        """Return the code of the same module with another bias, without jumps."""
        ranges = [CodeRange(code.start - self.bias, code.end - self.bias, code.original) for code in self.ranges]
        return ModuleCode(ranges, self.flow, bias, self.size)

    def around(self, address: int) -> CodeBytes | None:
        """Return the range of code that contains an address, or None if none does."""
        i = bisect_right(self._starts, address) - 1
        return self.ranges[i] if i >= 0 and address < self.ranges[i].end else None
