"""
Trials: code before a handler that checks whether the probed instruction will complete.

A record describes an instruction that has completed, but a handler in the process writes the record before the
instruction is executed. So the trial tests what could prevent completion: it accesses the memory that the instruction
will access, and executes a division, whose result it discards. If a trial fails, the thread stops, and the tracer runs
the handler. A trial may also fail for an instruction that would complete.
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.bpf_instructions import Class, Helper, Jump
from dprobes.platform.x86.instruction_relocation import copy_of
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.patch_placer import Placer, Shared
from dprobes.platform.x86.patches.patch_plans import Method, Refusal
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.instruction_set import Group, OperandKind
from dprobes.rpn.keyed_tables import KeyKind, TableKind, table_of
from dprobes.rpn.program_needs import USER_STACKS, entry_instructions, executed_instructions
from dprobes.rpn.rpn_program import calls_extensions
from dprobes.target.code.function_exits import ExitKind
from dprobes.target.process_maps import Growth, Mapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from iced_x86 import Instruction, UsedMemory

    from dprobes.arch import Architecture
    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.native.generated_code import ProcessFacts
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.keyed_tables import Table
    from dprobes.rpn.rpn_program import Instruction as ProgramInstruction
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "Access",
    "Eligibility",
    "HandlerTraits",
    "Trial",
    "always_completes",
    "asks_for_thread",
    "note_of",
    "obstacle_in_process",
    "obstacle_to_module",
    "obstacle_to_program",
    "probe_notes",
    "trial_before",
    "trial_of",
]

# Instructions that always complete, except at the end of the stack: only they have a handler without a trial.


_PLAIN = (
    "mov", "movzx", "movsx", "movsxd", "lea", "add", "sub", "cmp", "test", "and", "or", "xor", "inc", "dec", "neg",
    "not", "push", "pop", "call", "jmp", "ret", "leave", "nop", "endbr64", "shl", "shr", "sar", "imul",
)  # fmt: skip
"""Instructions that can only fault because of their memory operand."""


def always_completes(raw: bytes) -> bool:
    """
    Return True if a 64-bit instruction cannot fault, apart from a stack overflow.

    Such an instruction accesses only the stack and fixed addresses in its own module, and raises no other exception.
    """
    from iced_x86 import Decoder, FlowControl, InstructionInfoFactory, OpKind, Register, RegisterExt

    copy = copy_of(raw, 8)
    if copy is not None and copy.cannot_fault:
        return True
    instruction = Decoder(64, raw).decode()
    is_branch = instruction.flow_control in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH)
    if (not is_branch and instruction.mnemonic not in _plain_mnemonics()) or instruction.is_privileged:
        return False
    registers = (n for n in range(instruction.op_count) if instruction.op_kind(n) == OpKind.REGISTER)
    if any(RegisterExt.is_segment_register(instruction.op_register(n)) for n in registers):
        return False
    own = Register.NONE if instruction.is_ip_rel_memory_operand else Register.RSP  # iced has computed its address
    for memory in InstructionInfoFactory().info(instruction).used_memory():
        is_plain = int(memory.index) == Register.NONE and int(memory.segment) not in (Register.FS, Register.GS)
        if int(memory.base) not in (Register.RSP, own) or not is_plain:
            return False
    return True


@cache
def _plain_mnemonics() -> frozenset[int]:
    from iced_x86 import Mnemonic

    return frozenset(getattr(Mnemonic, name.upper()) for name in _PLAIN)


_GENERAL = (
    "INTEL8086", "INTEL186", "INTEL386", "INTEL486", "X64", "CMOV", "CX8", "CMPXCHG16B", "BMI1", "BMI2", "POPCNT",
    "LZCNT", "ADX", "MOVBE", "MULTIBYTENOP", "PAUSE", "PREFETCHW",
)  # fmt: skip
_VECTOR = {
    "SSE": "sse", "SSE2": "sse2", "SSE3": "pni", "SSSE3": "ssse3", "SSE4_1": "sse4_1", "SSE4_2": "sse4_2",
    "AES": "aes", "PCLMULQDQ": "pclmulqdq", "SHA": "sha_ni", "GFNI": "gfni", "VAES": "vaes",
    "VPCLMULQDQ": "vpclmulqdq", "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "AVX512F": "avx512f",
    "AVX512VL": "avx512vl", "AVX512BW": "avx512bw", "AVX512DQ": "avx512dq", "AVX512CD": "avx512cd",
    "AVX512_VBMI": "avx512vbmi", "AVX512_VBMI2": "avx512_vbmi2", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BITALG": "avx512_bitalg", "AVX512_VPOPCNTDQ": "avx512_vpopcntdq", "AVX512_IFMA": "avx512ifma",
}  # fmt: skip
"""Features of iced whose instructions may be tried, with the processor's flag in /proc/cpuinfo."""

_OTHERS = (
    "enter", "popf", "popfd", "popfq", "in", "out", "xlatb", "iret", "iretd", "iretq", "retf", "ldmxcsr", "vldmxcsr",
    "int", "int1", "into", "hlt", "salc", "cmpxchg8b",
)  # fmt: skip
_FAULTING = ("ud0", "ud1", "ud2", "int3")
_BIT_STRINGS = ("bt", "bts", "btr", "btc")
_DIVISIONS = ("div", "idiv")

_PLAIN_MOVES = ("mov", "vmov", "and", "vand", "or", "vor", "xor", "vxor", "unpck", "vunpck", "shuf", "vshuf", "stmxcsr")
"""Prefixes of the names of floating-point instructions that raise no floating-point exception."""
_COMPUTING_ENDS, _COMPUTING_STARTS = ("ps", "pd", "ss", "sd"), ("cvt", "vcvt")
_UNALIGNED = ("movups", "movupd", "movdqu", "lddqu", "pcmpestri", "pcmpestrm", "pcmpistri", "pcmpistrm")
_ALIGNED = (
    "vmovaps", "vmovapd", "vmovdqa", "vmovdqa32", "vmovdqa64", "vmovntps", "vmovntpd", "vmovntdq", "vmovntdqa",
    "cmpxchg16b",
)  # fmt: skip
_WIDE = 16
"""Minimum size in bytes of operands of SSE instructions that must be aligned."""

_UNKNOWN = "faults of its instruction cannot be predicted"


class Access(NamedTuple):
    """
    Memory that an instruction accesses: ``size`` bytes at its registers (iced's numbers) plus a displacement.

    With an ``alignment`` above 1, the instruction faults at other addresses. An access on the stack is not ``touched``
    by the trial.
    """

    base: int
    index_register: int
    scale: int
    displacement: int
    segment: int
    size: int
    stores: bool
    alignment: int
    touched: bool


class Trial(NamedTuple):
    """
    Trial of the instruction with the bytes ``raw``.

    With ``is_executed``, the trial executes the instruction itself, a division. With ``needs_masks``, all
    floating-point exceptions must be masked; with ``has_target``, the target of an indirect branch must be a canonical
    address. ``ends`` is the probepoint whose handler may end with ``skip`` or ``exit``; None: there is none.
    """

    raw: bytes
    accesses: tuple[Access, ...] = ()
    is_executed: bool = False
    needs_masks: bool = False
    has_target: bool = False
    ends: int | None = None

    @property
    def tries(self) -> bool:
        """True if the trial tests more than the stack."""
        return bool(self.accesses or self.is_executed or self.needs_masks or self.has_target)


@lru_cache(1 << 14)
def trial_of(raw: bytes) -> Trial | str | None:
    """Return the trial of a 64-bit instruction; None if it needs none, or the reason if there can be none."""
    from iced_x86 import Decoder, FlowControl, InstructionInfoFactory

    instruction = Decoder(64, raw).decode()
    leaving = (FlowControl.INDIRECT_BRANCH, FlowControl.INDIRECT_CALL, FlowControl.RETURN)
    has_target = instruction.flow_control in leaving
    if not has_target and always_completes(raw):
        return None
    if (problem := _obstacle(instruction)) is not None:
        return f"{_UNKNOWN}: {problem}"
    name = _name(instruction)
    accesses = []
    for memory in InstructionInfoFactory().info(instruction).used_memory():
        found = _access(memory, instruction, name)
        if isinstance(found, str):
            return f"{_UNKNOWN}: {found}"
        if found is not None:
            accesses.append(found)
    is_executed, needs_masks = name in _DIVISIONS, _computes(instruction, name)
    if not (accesses or is_executed or needs_masks or has_target):
        return None
    return Trial(raw, () if is_executed else tuple(accesses), is_executed, needs_masks, has_target)


@cache
def _features(code: int) -> tuple[str, ...]:
    """Return iced's names of the processor features that instructions with iced's code ``code`` need."""
    from iced_x86 import CpuidFeature, Instruction

    instruction, names = Instruction(), _names(CpuidFeature)
    instruction.code = code  # type: ignore[assignment]
    return tuple(names[feature].upper() for feature in instruction.cpuid_features())


@cache
def _is_vector(code: int) -> bool:
    return not _VECTOR.keys().isdisjoint(_features(code))


def _name(instruction: Instruction) -> str:
    from iced_x86 import Mnemonic

    return _names(Mnemonic)[instruction.mnemonic]


@cache
def _names(numbers: object) -> dict[int, str]:
    """Return the names of the constants in a module of iced, by number and in lower case."""
    return {number: name.lower() for name, number in vars(numbers).items() if isinstance(number, int)}


@cache
def _abilities() -> frozenset[str]:
    """Return the feature flags of this machine's processor, from /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


_UNLISTED = "it is not in the list of known instructions"
_ABSENT = "this processor does not have it"


def _obstacle(instruction: Instruction) -> str | None:
    """Return the reason against a trial that is independent of the instruction's memory; None if there is none."""
    from iced_x86 import OpKind, RegisterExt

    if instruction.is_invalid:
        return "it is not a valid instruction"
    name = _name(instruction)
    if name in _FAULTING:
        return "it always raises a signal"
    if instruction.is_string_instruction and (instruction.has_rep_prefix or instruction.has_repne_prefix):
        return "it repeats, and may stop in the middle"
    registers = [n for n in range(instruction.op_count) if instruction.op_kind(n) == OpKind.REGISTER]
    if name in _BIT_STRINGS and instruction.op_kind(0) != OpKind.REGISTER and 1 in registers:
        return "its address depends on the number of a bit"
    features = _features(instruction.code)
    if any(feature.startswith(("FPU", "MMX")) for feature in features) or any(
        RegisterExt.is_mm(instruction.op_register(n)) for n in registers
    ):
        return "it uses the x87 unit, whose exceptions are delayed"
    if (
        name in _OTHERS
        or instruction.is_privileged
        or instruction.is_call_far_indirect
        or instruction.is_jmp_far_indirect
        or any(RegisterExt.is_segment_register(instruction.op_register(n)) for n in registers)
    ):
        return _UNLISTED
    return _obstacle_of(features)


def _obstacle_of(features: Iterable[str]) -> str | None:
    """Return the reason against trying an instruction that needs processor ``features``; None if there is none."""
    for feature in features:
        if feature in _GENERAL:
            continue
        if feature not in _VECTOR:
            return _UNLISTED
        if _VECTOR[feature] not in _abilities():
            return _ABSENT
    return None


def _access(memory: UsedMemory, instruction: Instruction, name: str) -> Access | str | None:
    """
    Return the access to memory that a trial tests for the operand ``memory`` of an instruction.

    ``name`` is its mnemonic. None: the access always completes. A string is the reason why it cannot be tested.
    """
    from iced_x86 import CodeSize, MemorySizeExt, OpAccess, Register

    if memory.access == OpAccess.NO_MEM_ACCESS:
        return None
    base, index = int(memory.base), int(memory.index)
    if instruction.is_ip_rel_memory_operand and base == Register.NONE:
        return None  # memory of the module at a fixed distance is mapped, and aligned
    if instruction.is_vsib:
        return "its memory is at several places"
    if memory.address_size != CodeSize.CODE64:
        return "its address has 32 bits"
    displacement = memory.displacement - (memory.displacement >> 63 << 64)
    size = MemorySizeExt.size(memory.memory_size)
    if not size or not -(1 << 31) <= displacement < (1 << 31) - 4096:
        return "no single instruction computes its address"
    segment = int(memory.segment)
    if segment not in (Register.FS, Register.GS):
        segment = int(Register.NONE)
    on_stack = base == Register.RSP and index == Register.NONE and segment == Register.NONE
    alignment = size if _is_aligned(instruction, name, size) else 1
    if on_stack and alignment == 1:
        return None
    if alignment > 1 and segment != Register.NONE:
        return "no single instruction computes its address"
    reads = (OpAccess.READ, OpAccess.COND_READ)
    stores = memory.access not in reads
    return Access(base, index, memory.scale, displacement, segment, size, stores, alignment, not on_stack)


def _is_aligned(instruction: Instruction, name: str, size: int) -> bool:
    """Return True if an instruction faults unless its memory begins at a multiple of its size."""
    from iced_x86 import EncodingKind

    if name in _ALIGNED:
        return True
    is_legacy = instruction.encoding == EncodingKind.LEGACY
    return _is_vector(instruction.code) and is_legacy and size >= _WIDE and name not in _UNALIGNED


def _computes(instruction: Instruction, name: str) -> bool:
    """Return True if an instruction may raise a floating-point exception."""
    computes = name.endswith(_COMPUTING_ENDS) or name.startswith(_COMPUTING_STARTS)
    return _is_vector(instruction.code) and computes and not name.startswith(_PLAIN_MOVES)


_PROCESSOR = "x86_64"

_DIVERTING = ("exit <code>", "skip")
_ENDING = ("remove", "exit <code>")
"""Instructions after which a probepoint has no more hits."""
_NAMING = ("push uid", "push comm", "match comm, <text>", "match commn, <text>")


def obstacle_to_program(program: Program) -> str | None:
    """Return the reason why no handler of a program can run in the process; None if there is none."""
    if calls_extensions(program):
        return "the program calls extensions"
    return None


def obstacle_to_module(architecture: Architecture) -> str | None:
    """Return the reason why no handler can run in a module of an architecture; None if there is none."""
    if architecture.name != _PROCESSOR:
        return f"jumps are made for {_PROCESSOR}, not for {architecture.name}"
    if architecture.convention == "Go":
        return "stacks of goroutines may have no room for its handler"
    return None


class HandlerTraits(NamedTuple):
    """
    Properties of a handler that decide whether and how it runs in the process.

    It ``writes`` if it changes registers or memory of the program, and ``diverts`` if it may end so that the probed
    instruction is not executed. With ``is_ending``, its probepoint may have no more hits afterwards.
    """

    obstacle: str | None
    writes: bool
    diverts: bool
    is_ending: bool


class Eligibility:
    """Check of a program's probepoints for reasons against handlers in the process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._traits: dict[tuple[object, bool], HandlerTraits] = {}

    def obstacle_to(self, probe: Probepoint, content: object = None) -> str | None:
        """
        Return the reason why the handler of a probepoint cannot run in the process; None if there is none.

        Handlers with the same ``content`` do the same; None is unknown content.
        """
        program = self._program
        if not probe.is_in_code or probe.state is not ProbeState.COMPILED:
            return "it is not on an instruction"
        traits = self.traits(probe, content)
        if probe.at_return:
            has_returns = any(leaving.kind is ExitKind.RETURN for leaving in probe.code.exits.exits)
            if not has_returns and not entry_instructions(program, probe.definition):
                return "its function has no return instruction, and is left by jumps only"
        elif (found := trial_before(program, probe)) is not None:
            if isinstance(found, str):
                return found
            if traits.writes:
                return "its instruction may fault, which may depend on what its handler changes"
        return traits.obstacle

    def traits(self, probe: Probepoint, content: object = None) -> HandlerTraits:
        """Return the properties of a probepoint's handler; those of known ``content`` are found once."""
        key = content, probe.at_return
        if content is None:
            return self._traits_of(probe)
        if (found := self._traits.get(key)) is None:
            found = self._traits[key] = self._traits_of(probe)
        return found

    def _traits_of(self, probe: Probepoint) -> HandlerTraits:
        executed = list(executed_instructions(self._program, probe.definition))
        return HandlerTraits(
            self._obstacle_to_handler(probe, executed),
            any(instruction.row.writes and instruction.row.syntax != "skip" for instruction in executed),
            any(instruction.row.syntax in _DIVERTING for instruction in executed),
            any(instruction.row.syntax in _ENDING for instruction in executed),
        )

    def _obstacle_to_handler(self, probe: Probepoint, executed: Sequence[ProgramInstruction]) -> str | None:
        for instruction in executed:
            if instruction.row.syntax in _DIVERTING and probe.at_return:
                operand = "" if instruction.row.operand_kind is None else f" {instruction.operand}"
                return f"its handler ends with '{instruction.row.operator}{operand}'"
            if instruction.row.operand_kind is OperandKind.COUNTER:
                return "its handler reads a performance counter, which needs a system call"
            if instruction.row.syntax in _NAMING or _has_names(instruction, self._program):
                return "its handler reads the process name or the user id, which only the kernel knows"
        return self._obstacle_to_stacks(executed)

    def _obstacle_to_stacks(self, executed: Sequence[ProgramInstruction]) -> str | None:
        """
        Return the reason why call stacks cannot be unwound from a copy of the stack; None if they can.

        The copy is made when the handler has ended, and unwound later.
        """
        program = self._program
        tables = {i.operand for i in executed if (table := _table_of(i, program)) is not None and table.has_user_stack}
        if any(i.row.syntax in USER_STACKS for i in executed) or tables:
            for instruction in executed:
                if instruction.row.syntax == "pop lp":
                    return "its handler takes call stacks, and goes back in the log"
                if (table := _table_of(instruction, program)) and table.has_user_stack and table.kind is TableKind.LAST:
                    return "its call stacks go into a table of what came last"
                if instruction.row.writes:
                    return "its handler takes call stacks, and changes registers or memory"
        if not self._looked_at.isdisjoint(tables):
            return "its call stacks go into a table that handlers look at"
        return None

    @cached_property
    def _looked_at(self) -> frozenset[object]:
        """The tables that handlers use by other instructions than ``tally``."""
        return frozenset(
            instruction.operand
            for code in self._program.bodies()
            for instruction in code.instructions
            if instruction.row.operator != "tally" and _table_of(instruction, self._program) is not None
        )


def trial_before(program: Program, probe: Probepoint) -> Trial | str | None:
    """Return the trial before the handler of a probepoint; None if it needs none, or the reason against one."""
    if probe.at_return or program.keeps_log_on_fault(probe.definition):
        return None
    return trial_of(probe.instruction.raw)


def obstacle_in_process(assembled: Assembled, facts: ProcessFacts) -> str | None:
    """Return the reason why the code of a handler cannot run in a process; None if there is none."""
    if facts.tid_place is None and asks_for_thread(assembled):
        return "the place of thread ids in its memory is unknown"
    return None


def asks_for_thread(assembled: Assembled) -> bool:
    """Return True if a handler reads the ids of its process and thread."""
    call = Class.JMP | Jump.CALL
    return any(insn.opcode == call and insn.imm == Helper.GET_CURRENT_PID_TGID for insn in assembled.code)


def _has_names(instruction: ProgramInstruction, program: Program) -> bool:
    """Return True if an instruction uses a table that has process names as keys."""
    table = _table_of(instruction, program)
    return table is not None and any(key.kind is KeyKind.COMM for key in table.keys)


def _table_of(instruction: ProgramInstruction, program: Program) -> Table | None:
    """Return the table that an instruction operates on; None if it operates on none."""
    return table_of(instruction.operand, program.tables) if instruction.row.group is Group.TABLE else None


_ROOM = 512
"""Approximate size of a trampoline in bytes."""
_SOMEWHERE = 0x7F00_0000_0000
"""A typical load address of a library."""
_BEFORE_HEAP = 512 << 20
"""Assumed distance in bytes from an executable to its heap: up to 1 GiB, or 32 MiB before Linux 6.9."""


def probe_notes(program: Program, resolved: ResolvedModule) -> dict[int, str]:
    """Return notes on the probepoints in code, by their indices: the kind of jump, or the reason for a breakpoint."""
    probes = {number: probe for number, probe in enumerate(resolved.probepoints) if probe.is_in_code}
    whole = obstacle_to_program(program) or obstacle_to_module(resolved.architecture)
    eligibility = Eligibility(program)
    why = {number: whole or eligibility.obstacle_to(probe) for number, probe in probes.items()}
    places = {number: list(_places(probe)) for number, probe in probes.items() if why[number] is None}
    found = _methods(resolved, {place for mine in places.values() for place in mine}) if places else {}
    return {
        number: f"by a breakpoint: {why[number]}"
        if number not in places
        else note_of([found[p] for p in places[number]])
        for number in probes
    }


def _places(probe: Probepoint) -> Iterator[int]:
    """Iterate over the link addresses of the instructions that get jumps."""
    if not probe.at_return:
        yield probe.instruction.address
        return
    yield from (leaving.address for leaving in probe.code.exits.exits if leaving.kind is ExitKind.RETURN)


def _methods(resolved: ResolvedModule, places: set[int]) -> dict[int, Method | str]:
    """Return the method of the jump at each place, or the reason why there is none."""
    module = resolved.module
    segments = module.elf.load_segments
    bias = _SOMEWHERE if module.elf.is_pie_or_shared else 0
    start, end = min(s.vaddr for s in segments) + bias, max(s.vaddr + s.memsz for s in segments) + bias
    own = Mapping(start & -4096, (end + 4095) & -4096, "r-xp", 0, 0, 1, str(module.path), deleted=False)
    code = ModuleCode.of(module, bias)
    space = AddressSpace([own], own.start, own.end, growth=Growth(own.end + _BEFORE_HEAP))
    found: dict[int, Method | str] = {}
    wanted = sorted((place + bias for place in places), reverse=True)
    for place, each in zip(wanted, Placer(code, space, _ROOM).place(wanted), strict=True):
        if isinstance(each, Refusal):
            found[place - bias] = each.reason
        else:
            placement = each.placement if isinstance(each, Shared) else each
            found[place - bias] = placement.plan.method
    return found


def note_of(found: Sequence[Method | str]) -> str:
    """Return the note about the methods at all places of a probepoint."""
    reasons = [each for each in found if isinstance(each, str)]
    if reasons:
        return f"by a breakpoint: {reasons[0]}"
    methods = dict.fromkeys(each for each in found if isinstance(each, Method))
    words = " and ".join(f"a {method.value}" for method in methods)
    return f"by {words}" + (", if the addresses that it leads to are free" if Method.PUN in methods else "")
