"""
An assembler for the x86-64 instructions of which generated code consists.

::

    asm = X86Assembler(address)
    done = asm.label()
    asm.load(Gpr.RAX, Memory(Gpr.RDI, 112))
    asm.compare(Gpr.RAX, 0)
    asm.jump_if(Condition.E, done)
    asm.place(done)
    asm.ret()
    code = asm.assemble()

An instruction is laid out as (Intel SDM volume 2, chapter 2)::

    prefixes | REX 0100WRXB | opcode | ModRM mod(2) reg(3) rm(3) | SIB | displacement | immediate

R, X and B of REX are the fourth bits of ``reg``, of an index, and of ``rm`` or a base; W selects 64 bits. A method has
the name of its instruction if that is descriptive, and otherwise a verb.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.native.code_template import CodeTemplate, Field, VaryingNumber
from dprobes.native.virtual_assembler import LabeledCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.native.virtual_assembler import Label

__all__ = ["Condition", "Gpr", "Memory", "Operation", "Shift", "X86Assembler", "dword_range"]


class Gpr(enum.IntEnum):
    """General registers, by their number in ModRM and REX."""

    RAX = 0
    RCX = 1
    RDX = 2
    RBX = 3
    RSP = 4
    RBP = 5
    RSI = 6
    RDI = 7
    R8 = 8
    R9 = 9
    R10 = 10
    R11 = 11
    R12 = 12
    R13 = 13
    R14 = 14
    R15 = 15


class Condition(enum.IntEnum):
    """The conditions of jumps; B and A compare unsigned numbers, L and G signed ones."""

    O = 0  # noqa: E741 - the processor's name
    NO = 1
    B = 2
    AE = 3
    E = 4
    NE = 5
    BE = 6
    A = 7
    S = 8
    NS = 9
    L = 12
    GE = 13
    LE = 14
    G = 15


class Operation(enum.IntEnum):
    """The operations on two operands; the value is in bits 3 to 5 of the opcode, or ``reg`` of the immediate form."""

    ADD = 0
    OR = 1
    AND = 4
    SUB = 5
    XOR = 6
    CMP = 7


class Shift(enum.IntEnum):
    """Shift instructions; the value is the field ``reg`` of ModRM."""

    SHL = 4
    SHR = 5
    SAR = 7


class Memory(NamedTuple):
    """
    Memory at a register, if any, plus a displacement.

    With ``of_thread``, the address is relative to the thread pointer (segment fs).
    """

    base: Gpr | None
    displacement: int = 0
    of_thread: bool = False


_FS = 0x64
_LOCK = 0xF0
_SIB_RSP = 0x24
_SIB_NONE = 0x25
"""SIB bytes without an index: the base is rsp or r12, or there is only a displacement."""

_BYTE, _DWORD = struct.Struct("<b"), struct.Struct("<i")
_LOADS = {1: (b"\x0f\xb6", False), 2: (b"\x0f\xb7", False), 4: (b"\x8b", False), 8: (b"\x8b", True)}
"""The opcode of the zero-extending load of a size in bytes, and whether it needs REX.W."""


def _byte_range(operation: Operation, value: int) -> tuple[int, int]:
    """
    Return the lowest and the highest number with which the instruction has the same length as with ``value``.

    ``value`` fits into an immediate of 8 bits. A comparison with 0 is another instruction.
    """
    if operation != Operation.CMP:
        return -0x80, 0x7F
    return (1, 0x7F) if value > 0 else (-0x80, -1) if value else (0, 0)


def _is_byte(value: int) -> bool:
    return -0x80 <= value < 0x80


def dword_range(value: int) -> tuple[int, int]:
    """
    Return the lowest and the highest number with which an instruction has the same length as with ``value``.

    ``value`` needs a field of 32 bits where one of 8 bits is allowed.
    """
    return (0x80, (1 << 31) - 1) if value > 0 else (-(1 << 31), -0x81)


class X86Assembler(LabeledCode):
    """Assembler of instructions to be executed at ``address``; ``wide`` operations work on 64 bits."""

    def __init__(self, address: int = 0) -> None:
        super().__init__(address)
        self._code = bytearray()
        self._fixups: list[tuple[int, Label]] = []
        self.fields: list[Field] = []
        """The fields of varying numbers."""
        self.distances: list[tuple[int, int]] = []
        """Place in the code and target address of each distance to a fixed address."""

    def __len__(self) -> int:
        return len(self._code)

    # Encoding

    def _encode(
        self,
        opcode: bytes,
        reg: int,
        rm: Gpr | Memory,
        *,
        wide: bool = True,
        prefix: int | None = None,
        is_byte: bool = False,
    ) -> None:
        """
        Append an instruction up to its displacement; an immediate may follow.

        ``is_byte``: ``reg`` is a byte register; one above rbx needs a REX prefix.
        """
        code = self._code
        is_register = isinstance(rm, Gpr)
        base = rm if isinstance(rm, Gpr) else rm.base
        if not isinstance(rm, Gpr) and rm.of_thread:
            code.append(_FS)
        if prefix is not None:
            code.append(prefix)
        rex = (8 if wide else 0) | (4 if reg & 8 else 0) | (1 if base is not None and base & 8 else 0)
        if rex or (is_byte and (reg >= Gpr.RSP or (is_register and base is not None and base >= Gpr.RSP))):
            code.append(0x40 | rex)
        code += opcode
        middle = (reg & 7) << 3
        if isinstance(rm, Gpr):
            code.append(0xC0 | middle | rm & 7)
            return
        if rm.base is None:
            code += bytes((4 | middle, _SIB_NONE)) + _DWORD.pack(rm.displacement)
            return
        low, displacement = rm.base & 7, rm.displacement
        # mod 0 with rbp or r13 would mean: relative to the instruction pointer
        mod = 0 if not displacement and low != Gpr.RBP else 1 if _is_byte(displacement) else 2
        code.append(mod << 6 | middle | low)
        if low == Gpr.RSP:
            code.append(_SIB_RSP)
        if mod:
            code += (_BYTE if mod == 1 else _DWORD).pack(displacement)

    def raw(self, data: bytes) -> None:
        """Append ``data``, encoded instructions, to the code unchanged."""
        self._code += data

    def _note(self, number: int, size: int, first: int, last: int) -> None:
        """Note the field of a varying number, which follows; its instruction is the same from ``first`` to ``last``."""
        if isinstance(number, VaryingNumber):
            place = len(self._code)
            self.fields.append(Field(place, size, number.variable, number.base, number.growth, first, last))

    # Moves

    def mov(self, dst: Gpr, src: Gpr, *, wide: bool = True) -> None:
        """Copy a register; without ``wide`` the upper half is cleared."""
        self._encode(b"\x89", src, dst, wide=wide)

    def mov_number(self, dst: Gpr, value: int) -> None:
        """Set a register to a number of 64 bits, signed or unsigned, in the shortest form; may change flags."""
        number, value = value, value & (1 << 64) - 1
        if not value:
            self._note(number, 0, 0, 0)
            self._encode(b"\x31", dst, dst, wide=False)
        elif value < 1 << 32:
            self._code += (b"\x41" if dst & 8 else b"") + bytes((0xB8 | dst & 7,))
            self._note(number, 4, 1, (1 << 32) - 1)
            self._code += value.to_bytes(4, "little")
        elif value >= (1 << 64) - (1 << 31):
            self._encode(b"\xc7", 0, dst)
            self._note(number, 4, -(1 << 31), -1)
            self._code += _DWORD.pack(value - (1 << 64))
        else:
            self._code += bytes((0x48 | dst >> 3, 0xB8 | dst & 7))
            self._note(number, 8, 1 << 32, (1 << 64) - (1 << 31) - 1)
            self._code += value.to_bytes(8, "little")

    def load(self, dst: Gpr, memory: Memory, size: int = 8) -> None:
        """Load 1, 2, 4 or 8 bytes; the rest of the register is cleared."""
        opcode, wide = _LOADS[size]
        self._encode(opcode, dst, memory, wide=wide)

    def store(self, memory: Memory, src: Gpr, size: int = 8) -> None:
        """Store the low 1, 2, 4 or 8 bytes of a register."""
        if size == 1:
            self._encode(b"\x88", src, memory, wide=False, is_byte=True)
        else:
            self._encode(b"\x89", src, memory, wide=size == 8, prefix=0x66 if size == 2 else None)

    def store_number(self, memory: Memory, value: int, size: int = 8) -> None:
        """Store a number of ``size`` bytes; for 8 it is sign-extended from 32 bits."""
        if size == 1:
            self._encode(b"\xc6", 0, memory, wide=False)
        else:
            self._encode(b"\xc7", 0, memory, wide=size == 8, prefix=0x66 if size == 2 else None)
        width = min(size, 4)
        self._note(value, width, -(1 << 31), (1 << 32) - 1)
        self._code += (value & (1 << 8 * width) - 1).to_bytes(width, "little")

    def lea(self, dst: Gpr, memory: Memory) -> None:
        """Set ``dst`` to the address of a memory operand (LEA); flags are unchanged."""
        self._encode(b"\x8d", dst, memory)

    def push(self, register: Gpr) -> None:
        """Push a 64-bit register on the stack."""
        self._code += (b"\x41" if register & 8 else b"") + bytes((0x50 | register & 7,))

    def pop(self, register: Gpr) -> None:
        """Pop the top of the stack into a 64-bit register."""
        self._code += (b"\x41" if register & 8 else b"") + bytes((0x58 | register & 7,))

    # Arithmetic

    def calculate(self, operation: Operation, dst: Gpr, src: Gpr | Memory | int, *, wide: bool = True) -> None:
        """Set ``dst`` to an operation on ``dst`` and a register, memory, or number, sign-extended from 32 bits."""
        if isinstance(src, Gpr):
            self._encode(bytes((operation << 3 | 1,)), src, dst, wide=wide)
        elif isinstance(src, Memory):
            self._encode(bytes((operation << 3 | 3,)), dst, src, wide=wide)
        elif _is_byte(src):
            self._encode(b"\x83", operation, dst, wide=wide)
            self._note(src, 1, *_byte_range(operation, src))
            self._code += _BYTE.pack(src)
        else:
            self._encode(b"\x81", operation, dst, wide=wide)
            self._note(src, 4, *dword_range(src))
            self._code += _DWORD.pack(src)

    def calculate_in(
        self, operation: Operation, memory: Memory, src: Gpr, size: int = 8, *, lock: bool = False
    ) -> None:
        """Set memory of 4 or 8 bytes to an operation on it and ``src``; with ``lock``, atomically for all CPUs."""
        self._encode(bytes((operation << 3 | 1,)), src, memory, wide=size == 8, prefix=_LOCK if lock else None)

    def compare(self, register: Gpr, operand: Gpr | int, *, wide: bool = True) -> None:
        """Append a comparison (CMP) with a register or number, which sets the flags; 32 bits without ``wide``."""
        if operand == 0 and not isinstance(operand, Gpr):
            self._note(operand, 0, 0, 0)
            self._encode(b"\x85", register, register, wide=wide)
        else:
            self.calculate(Operation.CMP, register, operand, wide=wide)

    def test(self, register: Gpr, operand: Gpr | int, *, wide: bool = True) -> None:
        """Append an AND with a register or number that only sets the flags (TEST); 32 bits without ``wide``."""
        if isinstance(operand, Gpr):
            self._encode(b"\x85", operand, register, wide=wide)
        else:
            self._encode(b"\xf7", 0, register, wide=wide)
            self._code += _DWORD.pack(operand)

    def shift(self, shift: Shift, register: Gpr, count: int, *, wide: bool = True) -> None:
        """Shift a register by ``count`` bits: 0 to 63, or to 31 without ``wide``."""
        self._encode(b"\xc1", shift, register, wide=wide)
        self._code.append(count)

    def shift_by_cl(self, shift: Shift, register: Gpr, *, wide: bool = True) -> None:
        """Shift by the low 6 bits of cl, or 5 without ``wide``."""
        self._encode(b"\xd3", shift, register, wide=wide)

    def neg(self, register: Gpr, *, wide: bool = True) -> None:
        """Set a register to 0 minus its value; without ``wide`` the upper half is cleared."""
        self._encode(b"\xf7", 3, register, wide=wide)

    def multiply(self, dst: Gpr, src: Gpr | int, *, wide: bool = True) -> None:
        """Multiply a register by another one or a number; the low half is the same for signed and unsigned numbers."""
        if isinstance(src, Gpr):
            self._encode(b"\x0f\xaf", dst, src, wide=wide)
        else:
            self._encode(b"\x69", dst, dst, wide=wide)
            self._code += _DWORD.pack(src)

    def multiply_wide(self, operand: Gpr | Memory) -> None:
        """Set rdx:rax to the signed product of rax and a register or memory."""
        self._encode(b"\xf7", 5, operand)

    def div(self, register: Gpr, *, wide: bool = True) -> None:
        """Divide rdx:rax by a register, unsigned: rax is the quotient, rdx the remainder."""
        self._encode(b"\xf7", 6, register, wide=wide)

    def shrd(self, dst: Gpr, src: Gpr, count: int) -> None:
        """Shift ``dst`` to the right by ``count`` bits; the low bits of ``src`` become its high bits."""
        self._encode(b"\x0f\xac", src, dst)
        self._code.append(count)

    # Memory that other threads change

    def exchange_add(self, memory: Memory, register: Gpr, size: int = 8) -> None:
        """Add ``register`` to memory of ``size`` bytes atomically (LOCK XADD); the register gets the old value."""
        self._encode(b"\x0f\xc1", register, memory, wide=size == 8, prefix=_LOCK)

    def exchange(self, memory: Memory, register: Gpr, size: int = 8) -> None:
        """Exchange a register and memory atomically; XCHG needs no LOCK prefix."""
        self._encode(b"\x87", register, memory, wide=size == 8)

    def compare_exchange(self, memory: Memory, register: Gpr, size: int = 8) -> None:
        """Atomically store a register if memory is equal to rax, else load memory to rax; ZF is set after a store."""
        self._encode(b"\x0f\xb1", register, memory, wide=size == 8, prefix=_LOCK)

    # Control

    def jump(self, target: Label) -> None:
        """Append an unconditional jump (JMP) to a label."""
        self._code.append(0xE9)
        self._fix(target)

    def jump_if(self, condition: Condition, target: Label) -> None:
        """Append a jump (Jcc) to a label that is taken if the flags meet the condition."""
        self._code += bytes((0x0F, 0x80 | condition))
        self._fix(target)

    def call(self, target: Label) -> None:
        """Append a call of the code at a label."""
        self._code.append(0xE8)
        self._fix(target)

    def jump_to(self, address: int) -> None:
        """Jump to an address within 2 GiB; raise OverflowError if it is farther away."""
        self._code.append(0xE9)
        self._code += self._distance(address)

    def call_at(self, address: int) -> None:
        """Call an address within 2 GiB; raise OverflowError if it is farther away."""
        self._code.append(0xE8)
        self._code += self._distance(address)

    def jump_by(self, register: Gpr) -> None:
        """Jump to the address in a register."""
        self._encode(b"\xff", 4, register, wide=False)

    def ret(self) -> None:
        """Append a return (RET) to the address at the top of the stack."""
        self._code.append(0xC3)

    def syscall(self) -> None:
        """Enter the kernel; clobbers rcx and r11."""
        self._code += b"\x0f\x05"

    def pushfq(self) -> None:
        """Push RFLAGS on the stack."""
        self._code.append(0x9C)

    def popfq(self) -> None:
        """Pop the top of the stack into RFLAGS."""
        self._code.append(0x9D)

    def rdtsc(self) -> None:
        """Load the processor's time stamp counter to edx:eax."""
        self._code += b"\x0f\x31"

    def rdpid(self, register: Gpr) -> None:
        """Load IA32_TSC_AUX, in which Linux stores the CPU's number (bits 0 to 11) and its NUMA node (above)."""
        self._encode(b"\x0f\xc7", 7, register, wide=False, prefix=0xF3)

    def _fix(self, target: Label) -> None:
        self._fixups.append((len(self._code), target))
        self._code += bytes(4)

    def _distance(self, address: int) -> bytes:
        self.distances.append((len(self._code), address))
        return (address - self.here - 4).to_bytes(4, "little", signed=True)

    def template(self, marks: Iterable[int] = ()) -> CodeTemplate:
        """Return the code as a template with the given ``marks``; all labels are placed."""
        jumps = tuple((at, self._place_of(label)) for at, label in self._fixups)
        return CodeTemplate(self.assemble(), tuple(self.fields), tuple(self.distances), jumps, tuple(marks))

    def assemble(self) -> bytes:
        """Return the bytes of the machine code; all labels must have been placed."""
        for at, label in self._fixups:
            _DWORD.pack_into(self._code, at, self._place_of(label) - at - 4)
        return bytes(self._code)
