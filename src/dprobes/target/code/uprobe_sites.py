"""
Treatment of an x86 instruction by the kernel's uprobes: emulated, stepped out of line, refused, or broken.

The kernel cannot execute an instruction that a uprobe's breakpoint replaces. It emulates a few instructions. For others
it single-steps a copy out of line (XOL), which takes a debug exception and about twenty times as long. The kernel
checks only opcode bytes, and so mistakes some vector instructions for jumps. The tables follow ``uprobe_init_insn``,
``branch_setup_xol_ops``, ``push_setup_xol_ops`` and ``arch_uprobe_analyze_insn`` in ``arch/x86/kernel/uprobes.c``.

The tables were made with Linux 6.18. ``tests/integration/ebpf/test_uprobe_sites.py`` compares them with the running
kernel. Where kernels differ, the result is the one that is safe for all.

The functions are pure: they depend on bytes only.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.target.code.function_exits import CallFrames
from dprobes.target.code.machine_code import MAX_LENGTH, instructions_between, unprobeable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from iced_x86 import Instruction

    from dprobes.target.code.machine_code import DecodedInstruction
    from dprobes.target.probed_module import Module

__all__ = [
    "UprobeClass",
    "cheap_sites",
    "has_no_effect",
    "is_replaced_by_call",
    "may_fault",
    "refusal",
    "uprobe_class",
]


def may_fault(raw: bytes, bits: int) -> bool:
    """
    Return False if the instruction ``raw`` cannot raise a fault that causes a signal.

    True means that it may. For example, every vector instruction counts as one that may fault. ``bits`` is 32 or 64.
    """
    from iced_x86 import Decoder

    return _examiner()(Decoder(bits, raw).decode())


@cache
def _examiner() -> Callable[[Instruction], bool]:
    from iced_x86 import CpuidFeature, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, RegisterExt

    factory = InstructionInfoFactory()
    faulting = {
        Mnemonic.DIV, Mnemonic.IDIV, Mnemonic.AAM, Mnemonic.BOUND, Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2,
        Mnemonic.INVALID, Mnemonic.HLT,
    }  # fmt: skip
    # Addresses that are only computed, as by lea and long nops, are not accessed.
    untouched = (OpAccess.NONE, OpAccess.NO_MEM_ACCESS)

    def examine(instruction: Instruction) -> bool:
        if instruction.mnemonic in faulting or instruction.is_privileged:
            return True
        operands = range(instruction.op_count)
        registers = [instruction.op_register(n) for n in operands if instruction.op_kind(n) == OpKind.REGISTER]
        if any(map(RegisterExt.is_vector_register, registers)) or CpuidFeature.FPU in instruction.cpuid_features():
            return True
        return any(memory.access not in untouched for memory in factory.info(instruction).used_memory())

    return examine


class UprobeClass(Enum):
    """The ways in which the kernel treats an instruction that carries a uprobe."""

    EMULATED = "emulated"
    STEPPED = "single-stepped"
    REFUSED = "refused"
    """The kernel sets no breakpoint: it returns ENOTSUPP (524), or no error if the file is mapped later."""
    BROKEN = "broken"
    """The kernel sets the breakpoint, but the behaviour of the probed process changes."""


def _opcodes(text: str) -> frozenset[int]:
    """Return the bytes in a list of hexadecimal numbers and ranges."""
    found: set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        found.update(range(int(first, 16), int(last or first, 16) + 1))
    return frozenset(found)


_LEGACY_PREFIXES = _opcodes("26 2e 36 3e 64-67 f0 f2 f3")
_VECTOR_PREFIX_SIZES = {0x62: 4, 0xC4: 3, 0xC5: 2}
_BAD_PREFIXES = {0xF0: "lock", 0x26: "es", 0x2E: "cs", 0x36: "ss", 0x3E: "ds"}
"""
Prefixes that ``is_prefix_bad`` refuses.

In 64-bit code the segment prefixes have no effect, except for notrack and branch hints.
"""

# Opcodes that good_insns_64 and good_insns_32 leave out. All of the 0f map is good.
_BAD_64 = _opcodes("06 07 0e 16 17 1e 1f 27 2f 37 3f 60-62 6c-6f 82 9a cc-cf d4-d6 e4-e7 ea ec-ef f1 f4 fa fb")
_BAD_32 = _opcodes("07 17 1f 6c-6f cc-cf e4-e7 ec-ef f1 f4 fa fb")

_BRANCHES = _opcodes("70-7f e8 e9 eb")
_NEAR_CONDITIONAL = _opcodes("80-8f")
"""Opcodes of conditional jumps with a 32-bit displacement, after the byte 0f."""
_PUSH_REGISTER = _opcodes("50-57")
_NOP, _PUSHF, _POPF, _MOV_TO_SEGMENT, _GROUP_5 = 0x90, 0x9C, 0x9D, 0x8E, 0xFF
_RETURNS = _opcodes("c2 c3 ca cb")
_STRING = _opcodes("a4-a7 aa-af")
_GROUP_15, _XRSTOR = 0xAE, 5
_AMX = _opcodes("49 4b 5c 5e 6c 6d")
"""Opcodes in map 2 of VEX, where no other instructions have them."""
_SYSTEM_CALLS = _opcodes("05 34")
"""Opcodes of ``syscall`` and ``sysenter``, after the byte 0f."""
_FMA4 = _opcodes("48 49 5c-5f 68-6f 78-7f")
"""Opcodes in map 3 of VEX, where no other instructions have them."""
_SSE4A = _opcodes("78 79")
"""Opcodes after 0f, with the prefix 66 or f2."""

_TAKEN_FOR_JUMP = "the kernel mistakes it for a jump and does not execute it"
_TAKEN_FOR_NOP = "the kernel mistakes it for a nop and does not execute it"


_STEPPED_FOR_EVER = "the kernel steps it for ever in a process that may not use the state of AMX"
"""
Problem with an instruction that uses the state of AMX in a process without permission for AMX.

Its fault (#NM) becomes a signal without a ``trap_nr`` (``handle_xfd_event`` in ``arch/x86/kernel/traps.c``). Without
this number, ``arch_uprobe_xol_was_trapped`` does not detect that the step has failed.
"""

_UNKNOWN_FORM = "not every kernel can decode it"


class _Parsed(NamedTuple):
    """
    Parts of an instruction that the kernel checks.

    ``map`` is 0 for one-byte opcodes, otherwise the escape bytes (0f, 0f 38, 0f 3a) as a number. For an instruction
    with a VEX or EVEX prefix it is 0, because the kernel treats its opcode as a one-byte opcode; ``vector_map`` is then
    the map in the prefix.
    """

    prefixes: bytes
    rex: int
    vector_map: int
    map: int
    opcode: int
    rest: bytes

    @property
    def modrm_reg(self) -> int:
        return self.rest[0] >> 3 & 7 if self.rest else 0

    @property
    def has_memory(self) -> bool:
        """True if the byte after the opcode is a ModRM byte with a memory operand."""
        return bool(self.rest) and self.rest[0] >> 6 != 3


def uprobe_class(raw: bytes, bits: int) -> UprobeClass:
    """Return the kernel's treatment of the valid instruction ``raw`` in code of 32 or 64 ``bits``."""
    parsed = _parse(raw, bits)
    if parsed is None or _kernel_refusal(parsed, bits) is not None:
        return UprobeClass.REFUSED
    if _kernel_mistake(parsed, bits) is not None:
        return UprobeClass.BROKEN
    return UprobeClass.EMULATED if _is_emulated(parsed, len(raw)) else UprobeClass.STEPPED


def refusal(decoded: DecodedInstruction, bits: int, *, at_entry: bool = False) -> str | None:
    """
    Return the reason why a uprobe cannot be placed at an instruction, or None if it can.

    The reason is a clause with the subject "it". ``at_entry`` is True for the first instruction of a function, where
    the red zone is not in use.
    """
    if (reason := unprobeable(decoded)) is not None:
        return reason
    parsed = _parse(decoded.raw, bits)
    if parsed is None:
        return _UNKNOWN_FORM
    reason = _kernel_refusal(parsed, bits) or _kernel_mistake(parsed, bits)
    if reason is None and not at_entry and is_replaced_by_call(decoded.raw, bits):
        reason = "kernels from 6.18 on put a call there, which overwrites what the function keeps below its stack"
    return reason


def is_replaced_by_call(raw: bytes, bits: int) -> bool:
    """
    Return True if kernels may replace the instruction by a call after a hit: a nop of five bytes in 64-bit code.

    The first kernels with such calls overwrite the red zone of the stack (System V ABI, x86-64, 3.2.2). Source:
    ``can_optimize`` and ``arch_uprobe_optimize``.
    """
    return bits == 64 and len(raw) == 5 and has_no_effect(raw, bits)


def has_no_effect(raw: bytes, bits: int) -> bool:
    """Return whether the instruction changes only the instruction pointer: nops, ``endbr64``, ``endbr32``."""
    parsed = _parse(raw, bits)
    if parsed is None or parsed.vector_map or 0xF0 in parsed.prefixes:
        return False
    match parsed.map, parsed.opcode:
        case 0, 0x90:  # with REX.B it is xchg r8, rax
            return not parsed.rex & 1
        case 0x0F, 0x1F:
            return parsed.modrm_reg == 0
        case 0x0F, 0x1E:
            return raw in (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb")
        case 0, 0xE9 | 0xEB:
            return not any(parsed.rest) and 0x66 not in parsed.prefixes
    return False


def _parse(raw: bytes, bits: int) -> _Parsed | None:
    """Parse an instruction. Return None if it is incomplete, or has a form that some kernels cannot decode."""
    try:
        return _taken_apart(raw, bits)
    except IndexError:
        return None


def _taken_apart(raw: bytes, bits: int) -> _Parsed | None:
    position = 0
    while raw[position] in _LEGACY_PREFIXES:
        position += 1
    prefixes, rex = raw[:position], 0
    if bits == 64 and raw[position] & 0xF0 == 0x40:
        rex = raw[position]
        position += 1
    first = raw[position]
    if first in _VECTOR_PREFIX_SIZES and (bits == 64 or raw[position + 1] >= 0xC0):
        vector_map = 1 if first == 0xC5 else raw[position + 1] & (7 if first == 0x62 else 0x1F)
        position += _VECTOR_PREFIX_SIZES[first]
        return _Parsed(prefixes, rex, vector_map, 0, raw[position], raw[position + 1 :]) if vector_map else None
    is_xop = first == 0x8F and raw[position + 1] & 0x38
    is_rex2 = first == 0xD5 and bits == 64
    if is_xop or is_rex2 or first in _LEGACY_PREFIXES:  # the last: kernels take a prefix after REX for the opcode
        return None
    opcode_map = 0
    if first == 0x0F:
        opcode_map, position = 0x0F, position + 1
        if raw[position] in (0x38, 0x3A):
            opcode_map, position = 0x0F00 | raw[position], position + 1
    return _Parsed(prefixes, rex, 0, opcode_map, raw[position], raw[position + 1 :])


def _kernel_refusal(parsed: _Parsed, bits: int) -> str | None:
    """Return the reason why the kernel refuses a breakpoint, None if it does not."""
    for prefix in parsed.prefixes:
        if prefix in _BAD_PREFIXES:
            return f"the kernel puts no uprobe on instructions with the prefix '{_BAD_PREFIXES[prefix]}'"
    has_66 = 0x66 in parsed.prefixes
    match parsed.map, parsed.opcode:
        case 0, opcode if opcode in (_BAD_64 if bits == 64 else _BAD_32):
            return "the kernel puts no uprobe on it"
        case 0, opcode if opcode == _MOV_TO_SEGMENT and parsed.modrm_reg == 2:
            return "it suspends debug exceptions, and the kernel puts no uprobe on it"
        case 0, opcode if opcode in _FMA4 and parsed.vector_map == 3:
            return _UNKNOWN_FORM
        case 0x0F, opcode if opcode in _SSE4A and (has_66 or 0xF2 in parsed.prefixes):
            return _UNKNOWN_FORM
        case 0, opcode if opcode == _NOP and has_66 and not parsed.vector_map:
            return "not every kernel puts a uprobe on it"
    if _is_branch(parsed) and has_66:
        return "the kernel puts no uprobe on jumps and calls with the prefix 66"
    return None


def _is_branch(parsed: _Parsed) -> bool:
    """Return whether the kernel treats the instruction as a jump or call with a relative target."""
    if parsed.map == 0:
        return parsed.opcode in _BRANCHES
    return parsed.map == 0x0F and parsed.opcode in _NEAR_CONDITIONAL


def _kernel_mistake(parsed: _Parsed, bits: int) -> str | None:
    """Return the problem with an instruction at which the kernel accepts a uprobe, or None if there is none."""
    if parsed.vector_map:
        return _vector_mistake(parsed)
    repeated = 0xF2 in parsed.prefixes or 0xF3 in parsed.prefixes
    match parsed.map, parsed.opcode:
        case 0x0F, opcode if opcode in _SYSTEM_CALLS:
            return "the kernel cannot step it"
        case 0x0F, opcode if opcode == _GROUP_15 and parsed.modrm_reg == _XRSTOR and parsed.has_memory:
            return _STEPPED_FOR_EVER
        case 0, opcode if opcode == _NOP and parsed.rex & 1:
            return _TAKEN_FOR_NOP
        case 0, opcode if opcode == _PUSHF:
            return "the kernel steps it, and the trap flag would show on the stack"
        case 0, opcode if opcode == _GROUP_5 and parsed.modrm_reg == 3 and bits == 64:
            return "the kernel takes its return address for a near one"
        case 0, opcode if opcode in _STRING and repeated:
            return "the kernel steps it element by element, and each would be a hit"
    return None


def _vector_mistake(parsed: _Parsed) -> str | None:
    opcode = parsed.opcode
    if parsed.vector_map == 2 and opcode in _AMX:
        return _STEPPED_FOR_EVER
    if opcode in _BRANCHES:
        return _TAKEN_FOR_JUMP
    if opcode == _NOP:
        return _TAKEN_FOR_NOP
    if opcode in _RETURNS:
        return "the kernel mistakes it for a return, and the program would continue in the page where it was stepped"
    if opcode == _POPF:
        return "the kernel mistakes it for popf and leaves the trap flag set"
    return None


def _is_emulated(parsed: _Parsed, length: int) -> bool:
    if _is_branch(parsed):
        return True
    if parsed.map != 0:
        return False
    if parsed.opcode == _NOP:
        return True
    return parsed.opcode in _PUSH_REGISTER and (length == 1 or (length == 2 and parsed.rex == 0x41))


# Faster sites next to a function's first instruction, where a uprobe takes a twentieth of the time.
# Functions often begin with an instruction without effect that kernels step (``endbr64``, long nops), followed by one
# that they emulate (``push %rbp``). A breakpoint on the second has the same hits as one on the first, unless the code
# is entered between the two. So a site is moved only if it is reached by the first instruction alone: there is no other
# symbol, no direct branch of the module, and no indirect jump of the function to it.
# The search for branches finds their bytes at every position. It can find more than there are, which only prevents a
# move, and never fewer.


_BITS = {"i386": 32, "x86_64": 64}
_PASSED = 3  # instructions without effect that may be skipped
_LANDING_MARKS = (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb")
"""``endbr64`` and ``endbr32``: where code has them, indirect jumps without notrack lead only to these."""

_NEAR_BRANCH = re.compile(rb"[\xe8\xe9]|\x0f[\x80-\x8f]")
"""Opcodes before the 32-bit displacement of a call or jump."""
_SHORT_BRANCH = re.compile(rb"[\x70-\x7f\xe0-\xe3\xeb]")
"""Opcodes before the 8-bit displacement of a jump or loop."""
_INDIRECT_JUMP = re.compile(rb"\xff[\x20-\x2f\x60-\x6f\xa0-\xaf\xe0-\xef]")
_NOTRACK = 0x3E
_DISTANCE = struct.Struct("<i")
_FEW = 8
"""Maximum number of targets for which a search for each is faster than a search for all branches."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """
    Uprobe at a function's entry that may be moved past some of the function's first instructions.

    It may move to the last one of ``boundaries``. Addresses are link addresses. ``index`` is the position of the
    instruction in the request.
    """

    index: int
    entry: int
    boundaries: tuple[int, ...]
    raw: bytes


def cheap_sites(module: Module, instructions: Sequence[DecodedInstruction]) -> list[int]:
    """
    Return, for each instruction, how many bytes forward a uprobe can move to be emulated instead of stepped.

    The distance is 0 if the uprobe must stay, if moving gains nothing, or if the instruction is not the first one of a
    function. This takes little time even for thousands of instructions.
    """
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
    """Return the subset of the link addresses ``wanted`` to which a direct branch in the module's code may lead."""
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
        # The byte after the opcode is relative to its own end: from -128 to 127 bytes.
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
    Return True if a branch in ``code`` leads to its byte ``target``.

    In 64 KiB of code, all branches to one target have the same upper half of the displacement. So these two bytes are
    searched.
    """
    # A displacement at offset p of the code is target - p - 4.
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
    """Return whether the new site is in the function and has no symbol, and no indirect jump leads to it."""
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
    """Return start and end of the function whose first instruction is at ``entry``, or None if unknown."""
    symbol = module.symbols.covering(entry)
    if symbol is not None and symbol.address == entry and symbol.size:
        return entry, entry + symbol.size
    extent = module.elf.frames.extent(module.elf, entry)
    return extent if extent is not None and extent[0] == entry and symbol is None else None


def _indirect_jumps(code: bytes, start: int, bits: int) -> list[tuple[int, bytes]] | None:
    """Return the address and bytes of each indirect jump, or None if there is data between the instructions."""
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
    Return True if an indirect jump cannot lead to the beginning of its function.

    At a function's beginning only the return address is on the stack, so a jump with more on the stack cannot lead
    there. If the function begins with a landing mark, any other indirect jump is a tail call, except a notrack jump,
    which jump tables use.
    """
    at_entry = frames.is_at_entry(address)
    if at_entry is None:
        return False
    return not at_entry or (is_marked and _NOTRACK not in raw[:2])
