"""
Code of trials, in the frame of a trampoline and before the handler.

::

    the stack     mov [rsp-..], rax               before all others: the lowest word that a handler needs
    a load        movzx eax, byte [..]            its first byte and its last one, or all of it at once
    a store       lock cmpxchg byte [..], al      the first byte and, if that is in another page, the last one: writes
                                                  the value already there, atomically for all threads
    alignment     lea rax, [..] | test al, 15 | je +1 | int3
    exceptions    stmxcsr [..] | .. | int3        unless all are masked
    a division    the instruction itself
    a target      shl rax, 16 | sar rax, 16 | cmp rax, .. | int3   unless the address is canonical, with 48 bits

A thread that faults or traps in this code has the registers of the probed program, except rax, the flags and the stack
pointer, which are in the frame. In the check of the stack, only the stack pointer differs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import SKIPPED
from dprobes.engines.hits.probe_hits import HANDING_OVER
from dprobes.engines.inline.handler_trials import Trial
from dprobes.engines.ptrace.site_patches import OF_64_BITS, NativeStop
from dprobes.native.code_template import Field
from dprobes.native.generated_code import NativeCode
from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, Operation, Shift, dword_range
from dprobes.native.x86.x86_operations import FRAME_SIZE, SPARE_WORD, STACK_NEEDED, saved_at
from dprobes.platform.x86.patches.displaced_code import displaced
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from iced_x86 import Instruction, MemoryOperand

    from dprobes.engines.inline.handler_trials import Access
    from dprobes.native.generated_code import CodeSwitch
    from dprobes.native.virtual_assembler import Label
    from dprobes.native.x86.x86_assembler import X86Assembler
    from dprobes.platform.x86.instruction_relocation import CodeCopy
    from dprobes.platform.x86.patches.displaced_code import DisplacedCode
    from dprobes.platform.x86.patches.patch_plans import Plan

__all__ = [
    "FIRST_ACCESS",
    "NUMBER",
    "SITE",
    "PieceCode",
    "Trampoline",
    "TrialCode",
    "make_displacing_trampoline",
    "refers_to_itself",
    "size_bound",
]

_STACK_SIZE, _MASKS_SIZE, _DIVISION_SIZE, _TARGET_SIZE = 16, 40, 32, 56
_ENDINGS_SIZE = 512
_ALIGNMENT_SIZE, _LOAD_SIZE, _STORE_SIZE = 32, 32, 72
"""Maximum sizes in bytes of the parts of the code."""

_TRAP = b"\xcc"
_STORE_MXCSR = b"\x0f\xae\x9c\x24"  # stmxcsr [rsp + 32 bits]
_MASKS = 0x1F80
"""All six exception masks in MXCSR (Intel SDM volume 1, 10.2.3)."""
_NO_ADDRESS_BITS = 16
"""Number of upper bits of a canonical address that repeat bit 47 (Intel SDM volume 1, 3.3.7)."""
_LOADS = (1, 2, 4, 8)
_BYTE_MAX = 0x80
_DWORD_RANGE = -(1 << 31), (1 << 31) - 1


NUMBER, SITE, FIRST_ACCESS = 0, 1, 2
"""Variables of templates: number of the probepoint, address of the instruction, displacements of its accesses."""


def refers_to_itself(raw: bytes) -> bool:
    """Return True if an instruction has an operand relative to its address."""
    from iced_x86 import Decoder

    return Decoder(64, raw).decode().is_ip_rel_memory_operand


class TrialCode:
    """
    Code of the trial of the instruction at ``site``; with None, only the check of the stack.

    Once the code is written, ``stops`` has the places where it may report to the tracer.
    """

    def __init__(self, trial: Trial | None, site: int) -> None:
        self._trial = trial or Trial(b"")
        self._site = site
        self.stops: list[NativeStop] = []
        self._keeps_flags = False
        self._variable = FIRST_ACCESS
        """The variable for the displacement of the present access."""

    @property
    def changed(self) -> frozenset[Gpr]:
        """The registers besides rax that the trial changes and restores."""
        return frozenset({Gpr.RDX}) if self._trial.is_executed else frozenset()

    @property
    def tries(self) -> bool:
        """True if the trial checks more than the stack."""
        return self._trial.tries

    @property
    def has_endings(self) -> bool:
        """True if the handler may end with ``skip`` or ``exit``, after which the instruction is not executed."""
        return self._trial.ends is not None

    def write_endings(self, asm: X86Assembler, restore: Callable[[], None], rest: Label) -> None:
        """
        Write the code for endings after which the instruction is not executed: a return, or a trap for the tracer.

        The kind of the ending is in rax. ``restore`` writes the code that restores registers except the stack pointer.
        Without a tracer, execution continues at ``rest``.
        """
        assert self._trial.ends is not None
        skipped = asm.label()
        asm.compare(Gpr.RAX, SKIPPED)
        asm.jump_if(Condition.E, skipped)
        for code in sorted(HANDING_OVER):
            other = asm.label()
            asm.compare(Gpr.RAX, code)
            asm.jump_if(Condition.NE, other)
            restore()
            self.stops.append(NativeStop(asm.here, self._site, True, False, False, code, self._trial.ends))
            asm.raw(_TRAP)
            asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
            asm.jump(rest)
            asm.place(other)
        asm.place(skipped)
        restore()
        asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
        asm.ret()

    def touch_stack(self, asm: X86Assembler) -> None:
        """Write the check that the stack has enough room; so far only the stack pointer has changed."""
        self.stops = [NativeStop(asm.here, self._site, is_trap=False, has_frame=False, has_flags=False)]
        asm.store(Memory(Gpr.RSP, FRAME_SIZE - STACK_NEEDED), Gpr.RAX)

    def write(self, asm: X86Assembler, *, keeps_flags: bool) -> None:
        """Write the trial after the frame is set up; with ``keeps_flags`` the frame has all flags (PUSHFQ)."""
        self._keeps_flags = keeps_flags
        if self._trial.needs_masks:
            self._look_at_masks(asm)
        for variable, access in enumerate(self._trial.accesses, FIRST_ACCESS):
            self._variable = variable
            if access.alignment > 1:
                self._look_at_alignment(asm, access)
            if access.touched and access.stores:
                self._store(asm, access)
            elif access.touched:
                self._load(asm, access)
        if self._trial.is_executed:
            self._execute(asm)
        if self._trial.has_target:
            self._look_at_target(asm)

    def _note(self, place: int, *, is_trap: bool = False) -> None:
        """Record that a thread may stop at the instruction at ``place``, by a fault or with ``is_trap`` by a trap."""
        self.stops.append(NativeStop(place, self._site, is_trap=is_trap, has_frame=True, has_flags=self._keeps_flags))

    def _trap(self, asm: X86Assembler) -> None:
        self._note(asm.here, is_trap=True)
        asm.raw(_TRAP)

    def _look_at_masks(self, asm: X86Assembler) -> None:
        fine = asm.label()
        asm.raw(_STORE_MXCSR + SPARE_WORD.to_bytes(4, "little"))
        asm.load(Gpr.RAX, Memory(Gpr.RSP, SPARE_WORD), 4)
        asm.calculate(Operation.AND, Gpr.RAX, _MASKS, wide=False)
        asm.compare(Gpr.RAX, _MASKS, wide=False)
        asm.jump_if(Condition.E, fine)
        self._trap(asm)
        asm.place(fine)

    def _look_at_alignment(self, asm: X86Assembler, access: Access) -> None:
        from iced_x86 import Code, Instruction, Register

        fine = asm.label()
        self._prepare(asm, access)
        self._put_access(asm, Instruction.create_reg_mem(Code.LEA_R64_M, Register.RAX, _operand(access)), access)
        asm.test(Gpr.RAX, access.alignment - 1, wide=False)
        asm.jump_if(Condition.E, fine)
        self._trap(asm)
        asm.place(fine)

    def _load(self, asm: X86Assembler, access: Access) -> None:
        from iced_x86 import Code, Instruction, Register

        codes = {1: Code.MOVZX_R32_RM8, 2: Code.MOVZX_R32_RM16, 4: Code.MOV_R32_RM32, 8: Code.MOV_R64_RM64}
        size = access.size if access.size in _LOADS else 1
        register = Register.RAX if size == max(_LOADS) else Register.EAX
        last = 0 if access.alignment >= access.size else access.size - size
        for at in dict.fromkeys((0, last)):
            self._prepare(asm, access)
            self._note(asm.here)
            made = Instruction.create_reg_mem(codes[size], register, _operand(access, at))
            self._put_access(asm, made, access, at)

    def _store(self, asm: X86Assembler, access: Access) -> None:
        from iced_x86 import Code, Instruction, Register

        def exchange(at: int) -> None:
            self._prepare(asm, access)
            made = Instruction.create_mem_reg(Code.CMPXCHG_RM8_R8, _operand(access, at), Register.AL)
            made.has_lock_prefix = True
            self._note(asm.here)
            self._put_access(asm, made, access, at)

        exchange(0)
        if access.alignment >= access.size:
            return
        if access.segment != Register.NONE:  # the segment's base and so the ends of pages are unknown
            exchange(access.size - 1)
            return
        done = asm.label()
        self._prepare(asm, access)
        self._put_access(asm, Instruction.create_reg_mem(Code.LEA_R64_M, Register.RAX, _operand(access)), access)
        asm.calculate(Operation.AND, Gpr.RAX, PAGE_SIZE - 1, wide=False)
        asm.compare(Gpr.RAX, PAGE_SIZE - access.size, wide=False)
        asm.jump_if(Condition.BE, done)
        exchange(access.size - 1)
        asm.place(done)

    def _execute(self, asm: X86Assembler) -> None:
        from iced_x86 import Decoder, Register

        made = Decoder(64, self._trial.raw, ip=self._site).decode()
        if made.memory_base == Register.RSP:
            made.memory_displacement += FRAME_SIZE
            made.memory_displ_size = 8
        asm.load(Gpr.RAX, saved_at(Gpr.RAX))
        self._note(asm.here)
        self._put(asm, made)
        asm.load(Gpr.RDX, saved_at(Gpr.RDX))

    def _look_at_target(self, asm: X86Assembler) -> None:
        from iced_x86 import Code, Decoder, FlowControl, Instruction, MemoryOperand, OpKind, Register

        made, fine, spare = (
            Decoder(64, self._trial.raw, ip=self._site).decode(),
            asm.label(),
            Memory(Gpr.RSP, SPARE_WORD),
        )
        asm.load(Gpr.RAX, saved_at(Gpr.RAX))
        if made.flow_control == FlowControl.RETURN:
            asm.load(Gpr.RAX, Memory(Gpr.RSP, FRAME_SIZE))
        elif made.op0_kind == OpKind.REGISTER:
            if made.op0_register == Register.RSP:
                return  # the check of the stack has shown that the address is valid
            self._put(asm, Instruction.create_reg_reg(Code.MOV_R64_RM64, Register.RAX, made.op0_register))
        else:
            displacement = made.memory_displacement - (made.memory_displacement >> 63 << 64)
            displacement += FRAME_SIZE * (made.memory_base == Register.RSP)
            where = made.memory_base, made.memory_index, made.memory_index_scale, displacement, 8
            operand = MemoryOperand(*where, False, made.segment_prefix)
            self._put(asm, Instruction.create_reg_mem(Code.MOV_R64_RM64, Register.RAX, operand))
        asm.store(spare, Gpr.RAX)
        asm.shift(Shift.SHL, Gpr.RAX, _NO_ADDRESS_BITS)
        asm.shift(Shift.SAR, Gpr.RAX, _NO_ADDRESS_BITS)
        asm.calculate(Operation.CMP, Gpr.RAX, spare)
        asm.jump_if(Condition.E, fine)
        self._trap(asm)
        asm.place(fine)

    def _prepare(self, asm: X86Assembler, access: Access) -> None:
        """Restore rax if it is part of the address; the trial has overwritten it."""
        from iced_x86 import Register

        if Register.RAX in (access.base, access.index_register):
            asm.load(Gpr.RAX, saved_at(Gpr.RAX))

    @staticmethod
    def _put(asm: X86Assembler, instruction: Instruction) -> None:
        from iced_x86 import Encoder

        encoder = Encoder(64)
        encoder.encode(instruction, asm.here)
        asm.raw(encoder.take_buffer())

    def _put_access(self, asm: X86Assembler, instruction: Instruction, access: Access, at: int = 0) -> None:
        """
        Write ``instruction``, whose operand is the byte at the offset ``at`` of an access.

        The field of its displacement is recorded, so that copies of the code can have other displacements.
        """
        from iced_x86 import Encoder, Register

        encoder = Encoder(64)
        encoder.encode(instruction, asm.here)
        offsets, base = encoder.get_constant_offsets(), _frame_distance(access) + at
        number = access.displacement + base
        size = offsets.displacement_size
        if not size:
            limits = number, number
        elif size == 1:
            limits = -_BYTE_MAX, _BYTE_MAX - 1
        else:
            limits = _DWORD_RANGE if access.base == Register.NONE else dword_range(number)
        place = len(asm) + offsets.displacement_offset
        asm.fields.append(Field(place, size, self._variable, base, 1, *limits))
        asm.raw(encoder.take_buffer())


def size_bound(trial: Trial | None) -> int:
    """Return the maximum size in bytes of the code of a trial; with None, of the check of the stack."""
    if trial is None:
        return _STACK_SIZE
    size = _STACK_SIZE + _MASKS_SIZE * trial.needs_masks + _DIVISION_SIZE * trial.is_executed
    for access in trial.accesses:
        size += _ALIGNMENT_SIZE * (access.alignment > 1) + (_STORE_SIZE if access.stores else _LOAD_SIZE)
    return size + _TARGET_SIZE * trial.has_target + (0 if trial.ends is None else _ENDINGS_SIZE)


def _frame_distance(access: Access) -> int:
    """Return the size of the frame in bytes if an access is relative to the stack pointer, else 0."""
    from iced_x86 import Register

    return FRAME_SIZE if access.base == Register.RSP else 0


def _operand(access: Access, at: int = 0) -> MemoryOperand:
    """Return the operand for byte ``at`` of an access, adjusted for the frame if relative to the stack pointer."""
    from iced_x86 import MemoryOperand, Register

    displacement = access.displacement + at + _frame_distance(access)
    is_short = access.base != Register.NONE and -_BYTE_MAX <= displacement < _BYTE_MAX
    size = 1 if is_short else 8
    return MemoryOperand(access.base, access.index_register, access.scale, displacement, size, False, access.segment)  # type: ignore[arg-type]


# The code that a jump leads to: the displaced instructions, each after its handler if it is probed.
#
# ::
#
#     handler of the first instruction │ the instruction │ the next one │ handler of the third │ the third │ jump back
#
# At addresses that 32-bit code can reach, a trap for such code is first (``OF_64_BITS``). A handler may have a trial
# before it. A thread that is stopped at a displaced instruction continues at that instruction's handler.


_END_OF_32_BITS = 1 << 32


class Trampoline(NamedTuple):
    """
    Code of a jump's target, and the relation of its addresses to the original ones.

    ``moves`` are (original address, address in the trampoline) for threads that are stopped at overwritten
    instructions. ``stops`` are the places where trials leave a hit to the breakpoint. ``switches`` are pairs of the
    address of a probed instruction and the switch of its handlers.
    """

    code: NativeCode
    moves: tuple[tuple[int, int], ...]
    copies: tuple[CodeCopy, ...]
    stops: tuple[NativeStop, ...] = ()
    switches: tuple[tuple[int, CodeSwitch], ...] = ()


class PieceCode(NamedTuple):
    """Code of a handler and the instructions after it, with its stops and switches."""

    code: bytes
    stops: list[NativeStop]
    switches: Sequence[CodeSwitch]


def make_displacing_trampoline(
    plan: Plan,
    address: int,
    sites: Collection[int],
    piece: Callable[[int, int, Callable[[int], bytes]], PieceCode],
) -> Trampoline:
    """
    Return the trampoline at ``address`` for the jump of a plan, with handlers of the instructions at ``sites``.

    ``piece`` takes the address of a handler, its site, and a function that returns the code after it for an address.
    """
    # The displaced code of a site with an ``endbr64`` begins after the ``endbr64``.
    probed = {max(site, plan.start): site for site in sites}
    end = plan.start + len(plan.raw)
    code = bytearray(OF_64_BITS if plan.start < _END_OF_32_BITS else b"")
    copies: list[CodeCopy] = []
    moves: dict[int, int] = {}
    stops: list[NativeStop] = []
    switches: list[tuple[int, CodeSwitch]] = []
    boundaries = plan.boundaries
    for first, last in pairwise(sorted({plan.start, *probed, end})):
        made = _Rest(plan.raw[first - plan.start : last - plan.start], first, goes_back=last == end)
        entry = address + len(code)
        site = probed.get(first)
        if site is None:
            code += made.copy_at(entry)
        else:
            written = piece(entry, site, made.copy_at)
            code += written.code
            stops += written.stops
            switches += [(site, switch) for switch in written.switches]
        copies += made.copy.boundaries
        for original in boundaries:
            if first <= original < last and (where := made.copy.copy_of(original)) is not None:
                moves[original] = where
        if site is not None:
            moves[first] = entry
    if plan.start in probed.values() or not any(site < plan.start for site in sites):
        moves.pop(plan.start, None)  # the jump itself is there
    else:
        moves[plan.start] = next(copy.copy for copy in copies if copy.exact)  # the probe was hit before the ``endbr64``
    made_code = NativeCode(address, bytes(code))
    return Trampoline(made_code, tuple(sorted(moves.items())), tuple(copies), tuple(stops), tuple(switches))


class _Rest:
    """Displaced instructions after a handler: their ``copy`` at the address that was asked for last."""

    def __init__(self, raw: bytes, original: int, *, goes_back: bool) -> None:
        self._raw, self._original, self._goes_back = raw, original, goes_back
        self.copy: DisplacedCode

    def copy_at(self, address: int) -> bytes:
        """Return the code of the displaced instructions for an address, and store its description in ``copy``."""
        copy = displaced(self._raw, self._original, address, goes_back=self._goes_back)
        assert copy is not None, "the trampoline is near the instruction"
        self.copy = copy
        return copy.code
