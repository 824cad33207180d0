"""
The operations of handlers on x86-64, one by one, as the kernel's JIT writes them.

The registers of eBPF are mapped to the same registers as by the kernel's JIT (arch/x86/net/bpf_jit_comp.c). So
arguments, the result and the registers that calls preserve are those of C (System V ABI, section 3.2).

The frame of a trampoline is below the red zone, and begins with a ``struct pt_regs``. Handlers use no vector registers
and no string instructions, and change only the arithmetic flags. Unless a handler reads or writes the flags, LAHF and
SETO save them, which take a quarter of the time of PUSHFQ and POPFQ.
"""

# ruff: noqa: ARG002 - all processors have the same operations

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Atomic, Class, Jump, Mode
from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.native.handler_analysis import footprint, frame_size
from dprobes.native.process_page import HAS_ENDED
from dprobes.native.virtual_assembler import ContextLayout, MemoryWord, SystemCall, Touched, VirtualRegister
from dprobes.native.x86.x86_assembler import Condition, Gpr, Memory, Operation, Shift, X86Assembler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.bpf.bpf_instructions import Insn
    from dprobes.native.generated_code import Surroundings
    from dprobes.native.virtual_assembler import Label, Operand

__all__ = ["FRAME_SIZE", "SPARE_WORD", "STACK_NEEDED", "X86Operations", "gpr", "saved_at"]

_REGISTERS = (
    Gpr.RAX, Gpr.RDI, Gpr.RSI, Gpr.RDX, Gpr.RCX, Gpr.R8, Gpr.RBX, Gpr.R13, Gpr.R14, Gpr.R15, Gpr.RBP, Gpr.R10, Gpr.R11,
)  # fmt: skip
_RESULT, _CONTEXT, _FRAME, _SCRATCH_1, _SCRATCH_2 = Gpr.RAX, Gpr.RDI, Gpr.RBP, Gpr.R10, Gpr.R11

_OPERATIONS = {
    Alu.ADD: Operation.ADD,
    Alu.SUB: Operation.SUB,
    Alu.OR: Operation.OR,
    Alu.AND: Operation.AND,
    Alu.XOR: Operation.XOR,
}
_SHIFTS = {Alu.LSH: Shift.SHL, Alu.RSH: Shift.SHR, Alu.ARSH: Shift.SAR}
_CONDITIONS = {
    Jump.JEQ: Condition.E,
    Jump.JNE: Condition.NE,
    Jump.JGT: Condition.A,
    Jump.JGE: Condition.AE,
    Jump.JLT: Condition.B,
    Jump.JLE: Condition.BE,
    Jump.JSGT: Condition.G,
    Jump.JSGE: Condition.GE,
    Jump.JSLT: Condition.L,
    Jump.JSLE: Condition.LE,
    Jump.JSET: Condition.NE,
}
_ATOMICS = {
    Atomic.ADD: Operation.ADD,
    Atomic.OR: Operation.OR,
    Atomic.AND: Operation.AND,
    Atomic.XOR: Operation.XOR,
}
_SIZE = 0x18

_SYSTEM_CALLS = {SystemCall.GETPID: 39, SystemCall.GETTID: 186, SystemCall.TGKILL: 234}
"""The numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)."""
_CPU_NODE_SELECTOR = 0x7B
"""The segment whose limit is the value that RDPID reads (GDT_ENTRY_CPUNODE in arch/x86/include/asm/segment.h)."""
_CPU_MASK = 0xFFF
_LSL_EAX_EAX = b"\x0f\x03\xc0"

_RED_ZONE = 128
"""Size in bytes of the red zone below the stack pointer (System V ABI, section 3.2.2)."""
SPARE_WORD = 168
"""Frame offset in bytes of a word for temporary use, after ``struct pt_regs``."""
FRAME_SIZE = _RED_ZONE + SPARE_WORD + 8
"""Distance in bytes from the probed program's stack pointer down to the trampoline's frame."""

STACK_NEEDED = 1024
"""Maximum size in bytes of the stack that a handler needs, with the frame."""

_NAMES = {
    Gpr.RAX: "eax", Gpr.RCX: "ecx", Gpr.RDX: "edx", Gpr.RBX: "ebx", Gpr.RBP: "ebp", Gpr.RSI: "esi", Gpr.RDI: "edi",
    Gpr.R8: "r8", Gpr.R9: "r9", Gpr.R10: "r10", Gpr.R11: "r11", Gpr.R12: "r12", Gpr.R13: "r13", Gpr.R14: "r14",
    Gpr.R15: "r15",
}  # fmt: skip
_USER_CS, _USER_SS = 0x33, 0x2B
"""Selectors of 64-bit processes (arch/x86/include/asm/segment.h)."""

_LAHF, _SAHF = b"\x9f", b"\x9e"
_LOAD_EAX = b"\xa1"
"""MOV EAX from an address of eight bytes (Intel SDM volume 2, MOV)."""
_SETO_AL, _ADD_AL_7F = b"\x0f\x90\xc0", b"\x04\x7f"
_POP_AT, _PUSH_AT = b"\x8f\x84\x24", b"\xff\xb4\x24"
"""POP and PUSH of memory at rsp plus a displacement of 32 bits; rsp is its value after the POP, or before the PUSH."""


def gpr(number: int) -> Gpr:
    """Return the x86-64 register to which the virtual register ``number`` is mapped."""
    return _REGISTERS[number]


def saved_at(register: Gpr) -> Memory:
    """Return the memory in the frame where a trampoline saves a register of the probed program."""
    return Memory(Gpr.RSP, X86Operations.layout.registers[register])


class X86Operations(X86Assembler):
    """The operations of handlers as instructions of x86-64 (``VirtualAssembler``)."""

    layout = ContextLayout(
        {register: REGISTER_OFFSETS[name] for register, name in _NAMES.items()},
        range(0, SPARE_WORD, 8),
        Gpr.RAX,
        ip=REGISTER_OFFSETS["eip"],
        sp=REGISTER_OFFSETS["esp"],
        flags=REGISTER_OFFSETS["eflags"],
        frame=FRAME_SIZE,
        fixed={REGISTER_OFFSETS["cs"]: _USER_CS, REGISTER_OFFSETS["ss"]: _USER_SS},
    )
    nothing = b"\x0f\x1f\x44\x00\x00"
    """NOP of five bytes (Intel SDM volume 2, NOP)."""
    fault_place = 168
    """Offset of rip in ``ucontext_t``: after uc_flags, uc_link, uc_stack, and 16 registers."""

    # Values

    def alu(self, operation: int, dst: VirtualRegister, operand: Operand, *, wide: bool = True) -> None:
        """
        Write the operation of eBPF on ``dst`` and ``operand``, with the result in ``dst``; 32 bits without ``wide``.

        Division by zero gives 0, and a remainder by zero gives the dividend.
        """
        register = _REGISTERS[dst]
        value = _operand(operand)
        if isinstance(value, Memory):
            self.calculate(_OPERATIONS[Alu(operation)], register, value)
            return
        match operation:
            case Alu.MOV if isinstance(value, Gpr):
                self.mov(register, value, wide=wide)
            case Alu.MOV:
                self.mov_number(register, value if wide else value & 0xFFFF_FFFF)
            case Alu.NEG:
                self.neg(register, wide=wide)
            case Alu.MUL:
                self.multiply(register, value, wide=wide)
            case Alu.DIV | Alu.MOD:
                self._divide(register, value, wide=wide, is_remainder=operation == Alu.MOD)
            case Alu.LSH | Alu.RSH | Alu.ARSH if isinstance(value, Gpr):
                self._shift_by(_SHIFTS[Alu(operation)], register, value, wide=wide)
            case Alu.LSH | Alu.RSH | Alu.ARSH:
                self.shift(_SHIFTS[Alu(operation)], register, value & (63 if wide else 31), wide=wide)
            case _:
                self.calculate(_OPERATIONS[Alu(operation)], register, value, wide=wide)

    def _shift_by(self, shift: Shift, dst: Gpr, count: Gpr, *, wide: bool) -> None:
        """Shift ``dst`` by the number of bits in ``count``, through cl; rcx is preserved unless it is ``dst``."""
        if count is Gpr.RCX:
            shifted = _SCRATCH_1 if dst is Gpr.RCX else dst
            if shifted is not dst:
                self.mov(shifted, dst)
            self.shift_by_cl(shift, shifted, wide=wide)
            if shifted is not dst:
                self.mov(dst, shifted)
            return
        self.mov(_SCRATCH_2, Gpr.RCX)
        self.mov(Gpr.RCX, count)
        self.shift_by_cl(shift, _SCRATCH_2 if dst is Gpr.RCX else dst, wide=wide)
        self.mov(Gpr.RCX, _SCRATCH_2)

    def _divide(self, dst: Gpr, divisor: Gpr | int, *, wide: bool, is_remainder: bool) -> None:
        """
        Divide ``dst`` by ``divisor``, unsigned; set ``dst`` to the quotient, or with ``is_remainder`` to the remainder.

        The instruction uses rax and rdx, which are preserved unless one is ``dst``.
        """
        by_zero, done = self.label(), self.label()
        if isinstance(divisor, Gpr):
            self.mov(_SCRATCH_2, divisor, wide=wide)
        else:
            self.mov_number(_SCRATCH_2, divisor if wide else divisor & 0xFFFF_FFFF)
        self.compare(_SCRATCH_2, 0)
        self.jump_if(Condition.E, by_zero)
        kept = [register for register in (Gpr.RAX, Gpr.RDX) if register is not dst]
        for register in kept:
            self.push(register)
        if dst is not Gpr.RAX:
            self.mov(Gpr.RAX, dst)
        self.mov_number(Gpr.RDX, 0)
        self.div(_SCRATCH_2, wide=wide)
        self.mov(_SCRATCH_1, Gpr.RDX if is_remainder else Gpr.RAX, wide=wide)
        for register in reversed(kept):
            self.pop(register)
        self.mov(dst, _SCRATCH_1)
        self.jump(done)
        self.place(by_zero)
        if not is_remainder:
            self.mov_number(dst, 0)
        elif not wide:
            self.mov(dst, dst, wide=False)
        self.place(done)

    def add(self, dst: VirtualRegister, src: VirtualRegister, number: int) -> None:
        """Set ``dst`` to ``src`` plus a number by LEA, which leaves the flags unchanged."""
        self.lea(_REGISTERS[dst], Memory(_REGISTERS[src], number))

    def read(
        self, dst: VirtualRegister, base: VirtualRegister, place: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Load ``size`` bytes at ``base`` plus ``place`` into ``dst``; on x86 every load has acquire semantics."""
        self.load(_REGISTERS[dst], Memory(_REGISTERS[base], place), size)

    def write(
        self, base: VirtualRegister, place: int, src: VirtualRegister, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Store ``size`` bytes of ``src`` at ``base`` plus ``place``; on x86 every store has release semantics."""
        self.store(Memory(_REGISTERS[base], place), _REGISTERS[src], size)

    def write_number(
        self, base: VirtualRegister, place: int, value: int, size: int = 8, *, is_shared: bool = False
    ) -> None:
        """Store a number of ``size`` bytes at ``base`` plus ``place``, as an immediate."""
        self.store_number(Memory(_REGISTERS[base], place), value, size)

    def atomic(self, operation: int, base: VirtualRegister, place: int, src: VirtualRegister, size: int) -> None:
        """Write a locked instruction, or a loop if no single instruction returns the old value."""
        memory, register = Memory(_REGISTERS[base], place), _REGISTERS[src]
        match operation:
            case Atomic.XCHG:
                self.exchange(memory, register, size)
            case Atomic.CMPXCHG:
                self.compare_exchange(memory, register, size)
                if size == 4:
                    self.mov(_RESULT, _RESULT, wide=False)
            case _ if operation == Atomic.ADD | Atomic.FETCH:
                self.exchange_add(memory, register, size)
            case _ if operation & Atomic.FETCH:
                self._fetch(_ATOMICS[Atomic(operation & ~Atomic.FETCH)], memory, register, size)
            case _:
                self.calculate_in(_ATOMICS[Atomic(operation)], memory, register, size, lock=True)

    def _fetch(self, operation: Operation, memory: Memory, src: Gpr, size: int) -> None:
        """
        Write a loop of CMPXCHG that sets memory to an operation on it and ``src``, and ``src`` to the old value.

        It ends when no other thread has changed the memory between load and store.
        """
        again, wide = self.label(), size == 8
        base = memory.base
        assert base is not None
        if _RESULT in (base, src):
            self.push(kept := Gpr.R12)
            if base is _RESULT:
                self.mov(kept, base)
                memory = Memory(kept, memory.displacement)
        self.mov(_SCRATCH_2, _RESULT)
        operand = _SCRATCH_2 if src is _RESULT else src
        self.load(_RESULT, memory, size)
        self.place(again)
        self.mov(_SCRATCH_1, _RESULT)
        self.calculate(operation, _SCRATCH_1, operand, wide=wide)
        self.compare_exchange(memory, _SCRATCH_1, size)
        self.jump_if(Condition.NE, again)
        if src is not _RESULT:
            self.mov(src, _RESULT, wide=wide)
            self.mov(_RESULT, _SCRATCH_2)
        elif not wide:
            self.mov(_RESULT, _RESULT, wide=False)
        if _RESULT in (base, src):
            self.pop(Gpr.R12)

    # Control

    def branch(
        self, condition: int, register: VirtualRegister, operand: Operand, target: Label, *, wide: bool = True
    ) -> None:
        """Compare a register with an operand, and jump to ``target`` under the condition."""
        value = _operand(operand)
        if isinstance(value, Memory):
            self.calculate(Operation.CMP, _REGISTERS[register], value)
        elif condition == Jump.JSET:
            self.test(_REGISTERS[register], value, wide=wide)
        else:
            self.compare(_REGISTERS[register], value, wide=wide)
        self.jump_if(_CONDITIONS[Jump(condition)], target)

    def count_down(self, register: VirtualRegister, step: int, again: Label) -> None:
        """Subtract ``step`` from a register by SUB, which sets ZF, and jump to ``again`` if the result is not 0."""
        self.calculate(Operation.SUB, _REGISTERS[register], step)
        self.jump_if(Condition.NE, again)

    def count_pass(self, place: int, target: Label) -> None:
        """Subtract 1 from the word at R10 + ``place``, and jump to ``target`` if it was 0."""
        self.mov_number(_SCRATCH_1, 1)
        self.calculate_in(Operation.SUB, Memory(_FRAME, place), _SCRATCH_1)
        self.jump_if(Condition.S, target)

    def jump_far(self, address: int) -> None:
        """Load an address into rax, and jump to it."""
        self.mov_number(_RESULT, address)
        self.jump_by(_RESULT)

    # Operations that depend on the processor

    def read_cpu(self, around: Surroundings) -> None:
        """Read the CPU's number from IA32_TSC_AUX by RDPID, or from the limit of Linux's CPU segment by LSL."""
        if around.has_rdpid:
            self.rdpid(_RESULT)
        else:
            self.mov_number(_RESULT, _CPU_NODE_SELECTOR)
            self.raw(_LSL_EAX_EAX)
        self.calculate(Operation.AND, _RESULT, _CPU_MASK, wide=False)

    def read_thread(self, dst: VirtualRegister, place: int) -> None:
        """Load 4 bytes at fs:``place``, relative to the thread pointer, into ``dst``."""
        self.load(_REGISTERS[dst], Memory(None, place, of_thread=True), 4)

    def read_thread_pointer(self, dst: VirtualRegister) -> None:
        """Load the word at fs:0: the thread pointer itself ("ELF Handling For Thread-Local Storage", 4.4.6)."""
        self.load(_REGISTERS[dst], Memory(None, 0, of_thread=True))

    def read_counter(self) -> None:
        """Read the time stamp counter by RDTSC into R0, 64 bits; clobbers rdx."""
        self.rdtsc()
        self.shift(Shift.SHL, Gpr.RDX, 32)
        self.calculate(Operation.OR, _RESULT, Gpr.RDX)

    def scale(self, base: VirtualRegister, place: int) -> None:
        """Set rax to its signed product with the word at ``base`` plus ``place``, of 128 bits, divided by 2**32."""
        self.multiply_wide(Memory(_REGISTERS[base], place))
        self.shrd(_RESULT, Gpr.RDX, 32)

    def enter_kernel(self, call: SystemCall) -> None:
        """Make a system call, which keeps all registers except rax, rcx and r11 (arch/x86/entry/entry_64.S)."""
        self.mov_number(_RESULT, _SYSTEM_CALLS[call])
        self.syscall()

    # Functions

    def open_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """Allocate the frame, and push the registers of ``kept`` below it."""
        if frame:
            self.push(_FRAME)
            self.mov(_FRAME, Gpr.RSP)
            self.move_stack(-frame)
        for register in kept:
            self.push(_REGISTERS[register])

    def close_function(self, kept: Sequence[VirtualRegister], frame: int) -> None:
        """Free the frame, restore the registers ``kept``, and return to the caller."""
        for register in reversed(kept):
            self.pop(_REGISTERS[register])
        if frame:
            self.calculate(Operation.ADD, Gpr.RSP, frame)
            self.pop(_FRAME)
        self.ret()

    # Trampolines

    def touched_by(self, assembled: Assembled, around: Surroundings) -> Touched:
        """Return the registers to which the code's eBPF registers are mapped, and rax; flags must always be saved."""
        registers = {_REGISTERS[number] for number in footprint(assembled).registers}
        registers = registers - {_FRAME} | {_RESULT} | ({_FRAME} if frame_size(assembled) else set())
        if any(_takes_scratch(insn) for insn in assembled.code):
            registers |= {_SCRATCH_1, _SCRATCH_2}
        return Touched(frozenset(registers), flags=True)

    def move_stack(self, distance: int) -> None:
        """Add ``distance`` bytes to the stack pointer by LEA, which leaves the flags unchanged."""
        self.lea(Gpr.RSP, Memory(Gpr.RSP, distance))

    def save(self, register: int) -> None:
        """Store a general register at its place in the frame of a trampoline."""
        self.store(saved_at(Gpr(register)), Gpr(register))

    def restore(self, register: int) -> None:
        """Load a general register from its place in the frame of a trampoline."""
        self.load(Gpr(register), saved_at(Gpr(register)))

    def save_flags(self, *, is_whole: bool) -> None:
        """Store all flags with PUSHFQ, or the arithmetic ones with LAHF and SETO."""
        if is_whole:
            self.pushfq()
            self.raw(_POP_AT + self.layout.flags.to_bytes(4, "little"))
        else:
            self.raw(_LAHF + _SETO_AL)
            self.store(Memory(Gpr.RSP, self.layout.flags), Gpr.RAX)

    def restore_flags(self, *, is_whole: bool) -> None:
        """Set all flags with POPFQ, or OF with an addition that overflows, and the other arithmetic ones with SAHF."""
        if is_whole:
            self.raw(_PUSH_AT + self.layout.flags.to_bytes(4, "little"))
            self.popfq()
        else:
            self.load(Gpr.RAX, Memory(Gpr.RSP, self.layout.flags))
            self.raw(_ADD_AL_7F + _SAHF)

    def save_number(self, place: int, number: int) -> None:
        """Store a number at the offset ``place`` of the frame, as an immediate; rip, through rax."""
        if place == self.layout.ip:
            self.mov_number(Gpr.RAX, number)
            self.store(Memory(Gpr.RSP, place), Gpr.RAX)
        else:
            self.store_number(Memory(Gpr.RSP, place), number)

    def save_stack_pointer(self) -> None:
        """Store the probed program's stack pointer in the frame: the stack pointer plus the frame's size."""
        self.lea(Gpr.RAX, Memory(Gpr.RSP, FRAME_SIZE))
        self.store(Memory(Gpr.RSP, self.layout.sp), Gpr.RAX)

    def branch_if_ended(self, life_mark: int, target: Label) -> None:
        """
        Load the life mark at the address ``life_mark`` into eax, and jump to ``target`` if the tool has ended.

        MOV of eax has a form with an address of eight bytes.
        """
        self.raw(_LOAD_EAX + life_mark.to_bytes(8, "little"))
        self.test(Gpr.RAX, HAS_ENDED, wide=False)
        self.jump_if(Condition.NE, target)

    def branch_if_set(self, place: int, target: Label) -> None:
        """Load the word at the offset ``place`` of the frame, and jump to ``target`` if it is not 0."""
        self.load(Gpr.RAX, Memory(Gpr.RSP, place))
        self.compare(Gpr.RAX, 0)
        self.jump_if(Condition.NE, target)

    def open_handler(self, frame: int, *, has_context: bool) -> None:
        """With ``has_context``, copy the stack pointer to R1; unless ``frame`` is 0, to R10, and allocate the frame."""
        if has_context:
            self.mov(_CONTEXT, Gpr.RSP)
        if frame:
            self.mov(_FRAME, Gpr.RSP)
            self.move_stack(-frame)

    def close_handler(self, frame: int) -> None:
        """Free the ``frame`` bytes of a handler by setting the stack pointer to R10."""
        if frame:
            self.mov(Gpr.RSP, _FRAME)

    def jump_code(self, start: int, end: int) -> bytes:
        """Return the instruction JMP rel32 from the address ``start`` to ``end``, 5 bytes."""
        code = X86Assembler(start)
        code.jump_to(end)
        return code.assemble()


def _operand(operand: Operand) -> Gpr | Memory | int:
    if isinstance(operand, VirtualRegister):
        return _REGISTERS[operand]
    return Memory(_REGISTERS[operand.base], operand.place) if isinstance(operand, MemoryWord) else operand


def _takes_scratch(insn: Insn) -> bool:
    """Return whether the translation of an instruction may change S1 or S2."""
    if insn.kind in (Class.ALU, Class.ALU64):
        is_shift = insn.operation in (Alu.LSH, Alu.RSH, Alu.ARSH)
        return insn.operation in (Alu.DIV, Alu.MOD) or (is_shift and insn.has_register)
    if insn.kind in (Class.JMP, Class.JMP32):
        return insn.operation in (Jump.CALL, Jump.MAY_GOTO)
    return insn.opcode & ~_SIZE == Class.STX | Mode.ATOMIC and bool(insn.imm & Atomic.FETCH)
