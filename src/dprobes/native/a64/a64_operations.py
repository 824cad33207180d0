"""
The operations of handlers on AArch64, one by one, as the kernel's JIT writes them.

The registers of eBPF are mapped to the same registers as by the kernel's JIT (arch/arm64/net/bpf_jit_comp.c). Handlers
see memory in the processor's order. Routines run on several threads at the same time, and are written for x86-64, whose
stores become visible in order. So here their stores have release semantics, and their loads acquire semantics.

The frame of a trampoline begins with a ``struct user_pt_regs`` (arch/arm64/include/uapi/asm/ptrace.h). There is no red
zone below the stack pointer (AAPCS64, section 6.4.5.1). User-space code can use only the flags NZCV::

    0 regs[31] │ 248 sp │ 256 pc │ 264 pstate, NZCV in its bits 31 to 28
"""

# ruff: noqa: ARG002 - all processors have the same operations

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Jump
from dprobes.native.a64.a64_assembler import A64Assembler, Condition, Gpr, Memory, Operation, Shift, SystemRegister
from dprobes.native.ebpf_translator import Translator
from dprobes.native.handler_analysis import footprint, frame_size
from dprobes.native.process_page import HAS_ENDED
from dprobes.native.virtual_assembler import ContextLayout, MemoryWord, SystemCall, Touched, VirtualRegister

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.native.generated_code import Surroundings
    from dprobes.native.virtual_assembler import Label, Operand

__all__ = ["A64Operations", "gpr"]

_REGISTERS = (
    Gpr.X7, Gpr.X0, Gpr.X1, Gpr.X2, Gpr.X3, Gpr.X4, Gpr.X19, Gpr.X20, Gpr.X21, Gpr.X22, Gpr.X25, Gpr.X9, Gpr.X10,
)  # fmt: skip
_RESULT, _CONTEXT, _FRAME = Gpr.X7, Gpr.X0, Gpr.X25
_ADDRESS, _OLD, _NEW, _SPARE = Gpr.X9, Gpr.X10, Gpr.X11, Gpr.X17
"""Registers that an operation may change. X16 is the assembler's scratch register, and lives only in one operation."""
_FREE = Gpr.X16
_CALL_CHANGED = frozenset({*_REGISTERS[:6], Gpr.X8, _ADDRESS, _OLD, _NEW, _FREE, _SPARE, Gpr.X30})
"""Registers that routines may change: arguments, the result, and those without an eBPF register."""

_OPERATIONS = {
    Alu.ADD: Operation.ADD,
    Alu.SUB: Operation.SUB,
    Alu.OR: Operation.ORR,
    Alu.AND: Operation.AND,
    Alu.XOR: Operation.EOR,
    Alu.MUL: Operation.MUL,
    Alu.DIV: Operation.UDIV,
    Alu.LSH: Operation.LSLV,
    Alu.RSH: Operation.LSRV,
    Alu.ARSH: Operation.ASRV,
}
_SHIFTS = {Alu.LSH: Shift.LSL, Alu.RSH: Shift.LSR, Alu.ARSH: Shift.ASR}
_CONDITIONS = {
    Jump.JEQ: Condition.EQ,
    Jump.JNE: Condition.NE,
    Jump.JGT: Condition.HI,
    Jump.JGE: Condition.HS,
    Jump.JLT: Condition.LO,
    Jump.JLE: Condition.LS,
    Jump.JSGT: Condition.GT,
    Jump.JSGE: Condition.GE,
    Jump.JSLT: Condition.LT,
    Jump.JSLE: Condition.LE,
    Jump.JSET: Condition.NE,
}
_ATOMICS = {
    Atomic.ADD: Operation.ADD,
    Atomic.OR: Operation.ORR,
    Atomic.AND: Operation.AND,
    Atomic.XOR: Operation.EOR,
}

_SYSTEM_CALLS = {SystemCall.GETPID: 172, SystemCall.GETTID: 178, SystemCall.TGKILL: 131}
_GETCPU = 168
"""The numbers of system calls (include/uapi/asm-generic/unistd.h)."""
_ROOM = 16
_ALIGNMENT = 16
"""Alignment of the stack pointer in bytes (AAPCS64, section 6.4.5.1)."""
_CONTEXT_SIZE = 272


def gpr(number: int) -> Gpr:
    """Return the AArch64 register to which the virtual register ``number`` is mapped."""
    return _REGISTERS[number]


class A64Operations(A64Assembler):
    """The operations of handlers as instructions of AArch64 (``VirtualAssembler``)."""

    layout = ContextLayout(
        {register: 8 * register for register in Gpr if register is not Gpr.SP},
        range(0, _CONTEXT_SIZE, 8),
        _FREE,
        ip=256,
        sp=248,
        flags=264,
        frame=_CONTEXT_SIZE,
    )
    nothing = b"\x1f\x20\x03\xd5"
    fault_place = 440
    """
    Offset of pc in ``ucontext_t``.

    Its sigcontext is at 176, with the fault's address, 31 registers and sp before pc.
    """

    # Values

    def alu(self, operation: int, dst: VirtualRegister, operand: Operand, *, wide: bool = True) -> None:
        """
        Write the operation of eBPF on ``dst`` and ``operand``, with the result in ``dst``; 32 bits without ``wide``.

        Division by zero gives 0 here as well, and a remainder by zero gives the dividend.
        """
        register, value = _REGISTERS[dst], self._value(operand)
        match operation:
            case Alu.MOV if isinstance(value, Gpr):
                self.mov(register, value, wide=wide)
            case Alu.MOV:
                self.mov_number(register, value if wide else value & 0xFFFF_FFFF)
            case Alu.NEG:
                self.neg(register, register, wide=wide)
            case Alu.MOD:
                if not isinstance(value, Gpr):
                    self.mov_number(_SPARE, value)
                    value = _SPARE
                self.calculate(Operation.UDIV, _ADDRESS, register, value, wide=wide)
                self.multiply_subtract(register, _ADDRESS, value, register, wide=wide)
            case Alu.LSH | Alu.RSH | Alu.ARSH if not isinstance(value, Gpr):
                self.shift(_SHIFTS[Alu(operation)], register, register, value & (63 if wide else 31), wide=wide)
            case _:
                self.calculate(_OPERATIONS[Alu(operation)], register, register, value, wide=wide)

    def _value(self, operand: Operand) -> Gpr | int:
        if isinstance(operand, VirtualRegister):
            return _REGISTERS[operand]
        if not isinstance(operand, MemoryWord):
            return operand
        self.load_acquire(_SPARE, self._address(_REGISTERS[operand.base], operand.place, _SPARE))
        return _SPARE

    def _address(self, base: Gpr, displacement: int, register: Gpr = _ADDRESS) -> Gpr:
        """
        Return a register with ``base`` plus ``displacement``, which is ``base`` itself for 0.

        Loads with acquire and stores with release semantics have no displacement.
        """
        if not displacement:
            return base
        self.calculate(Operation.ADD, register, base, displacement)
        return register

    def add(self, dst: VirtualRegister, src: VirtualRegister, number: int) -> None:
        """Set ``dst`` to ``src`` plus a number."""
        self.calculate(Operation.ADD, _REGISTERS[dst], _REGISTERS[src], number)

    def read(
        self, dst: VirtualRegister, base: VirtualRegister, place: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Load ``size`` bytes at ``base`` plus ``place`` into ``dst``; with ``is_shared`` by LDAR (acquire)."""
        if is_shared:
            self.load_acquire(_REGISTERS[dst], self._address(_REGISTERS[base], place), size)
        else:
            self.load(_REGISTERS[dst], Memory(_REGISTERS[base], place), size)

    def write(
        self, base: VirtualRegister, place: int, src: VirtualRegister, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Store ``size`` bytes of ``src`` at ``base`` plus ``place``; with ``is_shared`` by STLR (release)."""
        self._store(_REGISTERS[base], place, _REGISTERS[src], size, is_shared=is_shared)

    def write_number(
        self, base: VirtualRegister, place: int, value: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Store a number of ``size`` bytes at ``base`` plus ``place``, through a scratch register."""
        register = Gpr.ZR
        if value:
            self.mov_number(register := _SPARE, value)
        self._store(_REGISTERS[base], place, register, size, is_shared=is_shared)

    def _store(self, base: Gpr, place: int, register: Gpr, size: int, *, is_shared: bool) -> None:
        if is_shared:
            self.store_release(self._address(base, place), register, size)
        else:
            self.store(Memory(base, place), register, size)

    def atomic(self, operation: int, base: VirtualRegister, place: int, src: VirtualRegister, size: int) -> None:
        """
        Write a loop of an exclusive load and an exclusive store, which all processors have.

        An operation that returns the old value is a full barrier, as in the kernel (Documentation/atomic_t.txt).
        """
        register = _REGISTERS[src]
        address = self._address(_REGISTERS[base], place)
        again, done = self.label(), self.label()
        new = register
        self.place(again)
        self.load_exclusive(_OLD, address, size)
        match operation:
            case Atomic.CMPXCHG:
                self.compare(_OLD, _RESULT, wide=size == 8)
                self.jump_if(Condition.NE, done)
            case Atomic.XCHG:
                pass
            case _:
                self.calculate(_ATOMICS[Atomic(operation & ~Atomic.FETCH)], new := _NEW, _OLD, register)
        self.store_exclusive(_SPARE, address, new, size)
        self.compare(_SPARE, 0, wide=False)
        self.jump_if(Condition.NE, again)
        self.place(done)
        if operation & Atomic.FETCH:
            self.barrier()
            self.mov(_RESULT if operation == Atomic.CMPXCHG else register, _OLD)

    # Control

    def branch(
        self, condition: int, register: VirtualRegister, operand: Operand, target: Label, *, wide: bool = True
    ) -> None:
        """Compare a register with an operand, and jump to ``target`` under the condition."""
        compare = self.test if condition == Jump.JSET else self.compare
        compare(_REGISTERS[register], self._value(operand), wide=wide)
        self.jump_if(_CONDITIONS[Jump(condition)], target)

    def count_down(self, register: VirtualRegister, step: int, again: Label) -> None:
        """Subtract ``step`` from a register by SUBS, and jump to ``again`` if the result is not 0."""
        self.calculate(Operation.SUBS, _REGISTERS[register], _REGISTERS[register], step)
        self.jump_if(Condition.NE, again)

    def count_pass(self, place: int, target: Label) -> None:
        """Subtract 1 from the word at R10 + ``place``, and jump to ``target`` if it was 0."""
        self.load(_ADDRESS, Memory(_FRAME, place))
        self.calculate(Operation.SUBS, _ADDRESS, _ADDRESS, 1)
        self.store(Memory(_FRAME, place), _ADDRESS)
        self.jump_if(Condition.MI, target)

    def call_at(self, address: int) -> None:
        """Call the routine at an address; count the registers that routines may change, and the flags, as changed."""
        super().call_at(address)
        self.changed |= _CALL_CHANGED
        self.changes_flags = True

    def jump_far(self, address: int) -> None:
        """Load an address into the register of R0, and jump to it."""
        self.mov_number(_RESULT, address)
        self.jump_by(_RESULT)

    # Operations that depend on the processor

    def read_cpu(self, around: Surroundings) -> None:
        """
        Load the CPU's number from ``cpu_id`` of the thread's struct rseq (rseq(2)), which the C library registered.

        The field is at ``cpu_place`` from the thread pointer. If that is None, call getcpu(2).
        """
        if around.cpu_place is not None:
            self.read_system(_RESULT, SystemRegister.TPIDR_EL0)
            self.load(_RESULT, Memory(_RESULT, around.cpu_place), 4)
            return
        kept = (Gpr.X0, Gpr.X1, Gpr.X2)
        self.move_stack(-_ROOM - 32)
        for place, register in enumerate(kept):
            self.store(Memory(Gpr.SP, _ROOM + 8 * place), register)
        self.calculate(Operation.ADD, Gpr.X0, Gpr.SP, 0)
        self.mov_number(Gpr.X1, 0)
        self.mov_number(Gpr.X2, 0)
        self.mov_number(Gpr.X8, _GETCPU)
        self.system_call()
        self.load(_RESULT, Memory(Gpr.SP), 4)
        for place, register in enumerate(kept):
            self.load(register, Memory(Gpr.SP, _ROOM + 8 * place))
        self.move_stack(_ROOM + 32)

    def read_thread(self, dst: VirtualRegister, place: int) -> None:
        """Load 4 bytes at the thread pointer (TPIDR_EL0) plus ``place`` into ``dst``."""
        self.read_thread_pointer(dst)
        self.load(_REGISTERS[dst], Memory(_REGISTERS[dst], place), 4)

    def read_thread_pointer(self, dst: VirtualRegister) -> None:
        """Read the thread pointer from TPIDR_EL0 into ``dst``, which never faults."""
        self.read_system(_REGISTERS[dst], SystemRegister.TPIDR_EL0)

    def read_counter(self) -> None:
        """Read the virtual counter of the generic timer, after all earlier instructions."""
        self.synchronize()
        self.read_system(_RESULT, SystemRegister.CNTVCT_EL0)

    def scale(self, base: VirtualRegister, place: int) -> None:
        """Set R0 to its signed product with the word at ``base`` plus ``place``, of 128 bits, divided by 2**32."""
        factor, high = self._value(MemoryWord(base, place)), _REGISTERS[VirtualRegister.R3]
        assert isinstance(factor, Gpr)
        self.multiply_high(high, _RESULT, factor, is_signed=True)
        self.calculate(Operation.MUL, _RESULT, _RESULT, factor)
        self.extract(_RESULT, high, _RESULT, 32)

    def enter_kernel(self, call: SystemCall) -> None:
        """Make a system call, which keeps all registers except x0 (arch/arm64/kernel/entry.S)."""
        self.mov_number(Gpr.X8, _SYSTEM_CALLS[call])
        self.system_call()
        self.mov(_RESULT, Gpr.X0)

    # Functions

    def open_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """
        Allocate ``frame`` bytes, and above them room for the registers ``kept`` and x30, which are stored there.

        ::

            sp ─► frame of eBPF │ R10 ─► saved registers, x30
        """
        saved = _saved(kept, frame)
        self.move_stack(-_room(saved, frame))
        for place, register in enumerate(saved):
            self.store(Memory(Gpr.SP, frame + 8 * place), register)
        if frame:
            self.calculate(Operation.ADD, _FRAME, Gpr.SP, frame)

    def close_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """Restore the registers that ``open_function`` has saved, free the frame, and return to the caller."""
        saved = _saved(kept, frame)
        for place, register in enumerate(saved):
            self.load(register, Memory(Gpr.SP, frame + 8 * place))
        self.move_stack(_room(saved, frame))
        self.ret()

    # Trampolines

    def touched_by(self, assembled: Assembled, around: Surroundings) -> Touched:
        """Return the registers that code changes, by translating it for this purpose only."""
        trial = type(self)(self.address)
        Translator(trial, assembled, around, trial.label()).write()
        touched = footprint(assembled, self.layout.words)
        registers = trial.changed - {Gpr.ZR} | ({_FRAME} if frame_size(assembled) else set())
        registers |= {_CONTEXT} if touched.reads or touched.writes else set()
        return Touched(frozenset(registers), trial.changes_flags)

    def move_stack(self, distance: int) -> None:
        """Add ``distance`` bytes to the stack pointer by ADD or SUB, which leave the flags unchanged."""
        self.calculate(Operation.ADD if distance > 0 else Operation.SUB, Gpr.SP, Gpr.SP, abs(distance))

    def save(self, register: int) -> None:
        """Store a general register at its place in the frame of a trampoline."""
        self.store(Memory(Gpr.SP, self.layout.registers[register]), Gpr(register))

    def restore(self, register: int) -> None:
        """Load a general register from its place in the frame of a trampoline."""
        self.load(Gpr(register), Memory(Gpr.SP, self.layout.registers[register]))

    def save_flags(self, *, is_whole: bool) -> None:
        """Store NZCV in the frame of a trampoline; AArch64 has no other flags, so ``is_whole`` is ignored."""
        self.read_system(_FREE, SystemRegister.NZCV)
        self.store(Memory(Gpr.SP, self.layout.flags), _FREE)

    def restore_flags(self, *, is_whole: bool) -> None:
        """Set NZCV from the frame of a trampoline; ``is_whole`` is ignored."""
        self.load(_FREE, Memory(Gpr.SP, self.layout.flags))
        self.write_flags(_FREE)

    def save_number(self, place: int, number: int) -> None:
        """Store a number at the offset ``place`` of the frame, through the free register."""
        self.mov_number(_FREE, number)
        self.store(Memory(Gpr.SP, place), _FREE)

    def save_stack_pointer(self) -> None:
        """Store the probed program's stack pointer in the frame: the stack pointer plus the frame's size."""
        self.calculate(Operation.ADD, _FREE, Gpr.SP, _CONTEXT_SIZE)
        self.store(Memory(Gpr.SP, self.layout.sp), _FREE)

    def branch_if_ended(self, life_mark: int, target: Label) -> None:
        """
        Load the life mark at the address ``life_mark``, and jump to ``target`` if the tool has ended.

        TBNZ tests the bit without changing the flags.
        """
        self.mov_number(_FREE, life_mark)
        self.load(_FREE, Memory(_FREE), 4)
        self.jump_if_bit(_FREE, HAS_ENDED.bit_length() - 1, target)

    def branch_if_set(self, place: int, target: Label) -> None:
        """Load the word at the offset ``place`` of the frame, and jump to ``target`` if it is not 0."""
        self.load(_FREE, Memory(Gpr.SP, place))
        self.compare(_FREE, 0)
        self.jump_if(Condition.NE, target)

    def open_handler(self, frame: int, *, has_context: bool) -> None:
        """With ``has_context``, copy the stack pointer to R1; unless ``frame`` is 0, to R10, and allocate the frame."""
        if has_context:
            self.calculate(Operation.ADD, _CONTEXT, Gpr.SP, 0)
        if frame:
            self.calculate(Operation.ADD, _FRAME, Gpr.SP, 0)
            self.move_stack(-frame)

    def close_handler(self, frame: int) -> None:
        """Free the ``frame`` bytes of a handler by setting the stack pointer to R10."""
        if frame:
            self.calculate(Operation.ADD, Gpr.SP, _FRAME, 0)

    def jump_code(self, start: int, end: int) -> bytes:
        """Return the instruction B from the address ``start`` to ``end``, 4 bytes."""
        code = A64Assembler(start)
        code.jump_to(end)
        return code.assemble()


def _saved(kept: Sequence[VirtualRegister], frame: int) -> list[Gpr]:
    """Return the registers that a function saves: those of ``kept`` and of the frame, and the return address."""
    return [*(_REGISTERS[register] for register in kept), *([_FRAME] if frame else []), Gpr.X30]


def _room(saved: Sequence[Gpr], frame: int) -> int:
    return frame + -(-8 * len(saved) // _ALIGNMENT) * _ALIGNMENT
