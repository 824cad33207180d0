"""
An assembler for the A64 instructions of which generated code consists.

::

    asm = A64Assembler(address)
    done = asm.label()
    asm.load(Gpr.X7, Memory(Gpr.X0, 112))
    asm.compare(Gpr.X7, 0)
    asm.jump_if(Condition.EQ, done)
    asm.place(done)
    asm.ret()
    code = asm.assemble()

All instructions have 32 bits (Arm ARM, chapter C4); most of those here are laid out as::

     31   30                      21   20-16   15-10   9-5   4-0
    | sf | opcode                    |  Rm   |  imm  | Rn  | Rd |

``sf`` selects 64 bits, and is set in ``wide`` instructions; the others clear the upper half of Rd. Register 31 is the
stack pointer or zero, depending on the instruction.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

from dprobes.errors import NotSupportedError
from dprobes.native.virtual_assembler import LabeledCode

if TYPE_CHECKING:
    from dprobes.native.virtual_assembler import Label

__all__ = ["A64Assembler", "Condition", "Gpr", "Memory", "Operation", "Shift", "SystemRegister"]


class Gpr(enum.IntEnum):
    """The general registers; SP and ZR have the same number, 31."""

    X0, X1, X2, X3, X4, X5, X6, X7 = range(8)
    X8, X9, X10, X11, X12, X13, X14, X15 = range(8, 16)
    X16, X17, X18, X19, X20, X21, X22, X23 = range(16, 24)
    X24, X25, X26, X27, X28, X29, X30 = range(24, 31)
    SP = 31
    ZR = 31


class Condition(enum.IntEnum):
    """The conditions of branches; HS, LO, HI and LS compare unsigned numbers."""

    EQ = 0
    NE = 1
    HS = 2
    LO = 3
    MI = 4
    PL = 5
    HI = 8
    LS = 9
    GE = 10
    LT = 11
    GT = 12
    LE = 13


class Operation(enum.IntEnum):
    """The opcodes of the 32-bit forms of operations on two registers."""

    ADD = 0x0B00_0000
    SUB = 0x4B00_0000
    SUBS = 0x6B00_0000
    AND = 0x0A00_0000
    ORR = 0x2A00_0000
    EOR = 0x4A00_0000
    ANDS = 0x6A00_0000
    MUL = 0x1B00_7C00
    """MADD with the zero register as addend."""
    UDIV = 0x1AC0_0800
    """Unsigned division; division by zero gives 0."""
    LSLV = 0x1AC0_2000
    LSRV = 0x1AC0_2400
    ASRV = 0x1AC0_2800
    """LSLV, LSRV and ASRV shift by the low 6 bits of a register, or by 5 if the shift is not wide."""


class Shift(enum.Enum):
    """Shifts of a register by a constant number of bits."""

    LSL = "lsl"
    LSR = "lsr"
    ASR = "asr"


class SystemRegister(enum.IntEnum):
    """The fields of MRS and MSR that select a register: op0, op1, CRn, CRm, op2 in bits 19 to 5."""

    NZCV = 0x5A10 << 5
    TPIDR_EL0 = 0x5E82 << 5
    """The thread pointer."""
    CNTVCT_EL0 = 0x5F02 << 5
    """The virtual counter of the generic timer."""


class Memory(NamedTuple):
    """Memory operand: the address in a register plus a displacement in bytes."""

    base: Gpr
    displacement: int = 0


_WIDE = 1 << 31
_FLAG_SETTING = (Operation.SUBS, Operation.ANDS)
_IMMEDIATE = {Operation.ADD: 0x1100_0000, Operation.SUB: 0x5100_0000, Operation.SUBS: 0x7100_0000}
"""The operations that have a form with an immediate of 12 bits, which may be shifted by 12."""
_IMMEDIATE_BITS = 12
_MOVN, _MOVZ, _MOVK = 0x9280_0000, 0xD280_0000, 0xF280_0000
_MASK_16, _MASK_64 = 0xFFFF, (1 << 64) - 1
_CHUNKS = range(0, 64, 16)

_SIZE_BITS = {1: 0, 2: 1 << 30, 4: 2 << 30, 8: 3 << 30}
_LOAD, _STORE = 0x3940_0000, 0x3900_0000
_LOAD_UNSCALED, _STORE_UNSCALED = 0x3840_0000, 0x3800_0000
_LOAD_INDEXED, _STORE_INDEXED = 0x3860_6800, 0x3820_6800
_LOAD_ACQUIRE, _STORE_RELEASE = 0x08DF_FC00, 0x089F_FC00
_LOAD_EXCLUSIVE, _STORE_EXCLUSIVE = 0x085F_FC00, 0x0800_FC00
_UNSCALED = range(-256, 256)

_UBFM, _SBFM = 0x5300_0000, 0x1300_0000
_WIDE_BITFIELD = _WIDE | 1 << 22
_MSUB, _UMULH, _SMULH, _EXTR = 0x1B00_8000, 0x9BC0_7C00, 0x9B40_7C00, 0x93C0_0000
_B, _BL, _B_IF, _TBZ, _BR, _RET = 0x1400_0000, 0x9400_0000, 0x5400_0000, 0x3600_0000, 0xD61F_0000, 0xD65F_03C0
_SVC, _DMB_ISH, _ISB, _MRS, _MSR = 0xD400_0001, 0xD503_3BBF, 0xD503_3FDF, 0xD530_0000, 0xD510_0000
_WORD = struct.Struct("<I")

_NEAR, _FAR = 19, 26
"""Widths in bits of a branch's distance: of a conditional branch, and of an unconditional one."""


class A64Assembler(LabeledCode):
    """
    Assembler of instructions to be executed at ``address``; ``wide`` operations work on 64 bits.

    ``changed`` has the registers that the instructions change; ``changes_flags`` is true if one changes NZCV. X16 is
    a scratch register, for numbers that do not fit into an instruction.
    """

    def __init__(self, address: int = 0) -> None:
        super().__init__(address)
        self.changed: set[Gpr] = set()
        self.changes_flags = False
        self._code: list[int] = []
        self._fixups: list[tuple[int, Label, int]] = []

    def __len__(self) -> int:
        return 4 * len(self._code)

    # Encoding

    def word(self, instruction: int) -> None:
        """Append an instruction, encoded as a number of 32 bits."""
        self._code.append(instruction)

    def raw(self, data: bytes) -> None:
        """Append ``data``, encoded instructions, to the code unchanged."""
        self._code += (instruction for (instruction,) in _WORD.iter_unpack(data))

    def _encode(self, opcode: int, dst: int, first: int = 0, second: int = 0, *, wide: bool = False) -> None:
        self.word(opcode | (_WIDE if wide else 0) | second << 16 | first << 5 | dst)

    def _set(self, opcode: int, dst: Gpr, first: int = 0, second: int = 0, *, wide: bool = False) -> None:
        """Append an instruction, and add ``dst`` to ``changed``."""
        self.changed.add(dst)
        self._encode(opcode, dst, first, second, wide=wide)

    # Moves

    def mov(self, dst: Gpr, src: Gpr, *, wide: bool = True) -> None:
        """Copy a register other than the stack pointer; without ``wide`` the upper half is cleared."""
        self._set(Operation.ORR, dst, Gpr.ZR, src, wide=wide)

    def mov_number(self, dst: Gpr, value: int) -> None:
        """Set a register to a number of 64 bits, signed or unsigned, in as few moves of 16 bits as possible."""
        value &= _MASK_64
        chunks = [value >> shift & _MASK_16 for shift in _CHUNKS]
        is_inverse = chunks.count(_MASK_16) > chunks.count(0)
        filling = _MASK_16 if is_inverse else 0
        places = [place for place, chunk in enumerate(chunks) if chunk != filling] or [0]
        first, *others = places
        start = chunks[first] ^ _MASK_16 if is_inverse else chunks[first]
        self._set((_MOVN if is_inverse else _MOVZ) | first << 21 | start << 5, dst)
        for place in others:
            self._set(_MOVK | place << 21 | chunks[place] << 5, dst)

    def load(self, dst: Gpr, memory: Memory, size: int = 8) -> None:
        """Load 1, 2, 4 or 8 bytes; the rest of the register is cleared."""
        self.changed.add(dst)
        self._access(_LOAD, _LOAD_UNSCALED, _LOAD_INDEXED, dst, memory, size)

    def store(self, memory: Memory, src: Gpr, size: int = 8) -> None:
        """Store the low 1, 2, 4 or 8 bytes of a register."""
        self._access(_STORE, _STORE_UNSCALED, _STORE_INDEXED, src, memory, size)

    def _access(self, scaled: int, unscaled: int, indexed: int, register: Gpr, memory: Memory, size: int) -> None:
        base, displacement = memory
        bits = _SIZE_BITS[size]
        if not displacement % size and 0 <= displacement // size < 1 << _IMMEDIATE_BITS:
            self.word(scaled | bits | displacement // size << 10 | base << 5 | register)
        elif displacement in _UNSCALED:
            self.word(unscaled | bits | (displacement & 0x1FF) << 12 | base << 5 | register)
        else:
            self.mov_number(Gpr.X16, displacement)
            self.word(indexed | bits | Gpr.X16 << 16 | base << 5 | register)

    # Arithmetic

    def calculate(self, operation: Operation, dst: Gpr, src: Gpr, operand: Gpr | int, *, wide: bool = True) -> None:
        """
        Append an operation on ``src`` and a register or number, with the result in ``dst``.

        Without ``wide`` it has 32 bits, and the upper half of ``dst`` is cleared. ADD and SUB of a number may use SP.
        """
        if operation in _FLAG_SETTING:
            self.changes_flags = True
        if isinstance(operand, Gpr):
            self._set(operation, dst, src, operand, wide=wide)
            return
        if operation in _IMMEDIATE and abs(operand) < 1 << _IMMEDIATE_BITS * 2:
            opposite = {Operation.ADD: Operation.SUB, Operation.SUB: Operation.ADD}
            if operand < 0 and operation in opposite:
                operation, operand = opposite[operation], -operand
            is_shifted = not operand & (1 << _IMMEDIATE_BITS) - 1 and operand > 0
            if is_shifted or 0 <= operand < 1 << _IMMEDIATE_BITS:
                number = (operand >> _IMMEDIATE_BITS | 1 << _IMMEDIATE_BITS) if is_shifted else operand
                self._set(_IMMEDIATE[operation] | number << 10, dst, src, wide=wide)
                return
        assert Gpr.SP not in (dst, src) or operation in _FLAG_SETTING, "the number is small"
        self.mov_number(Gpr.X16, operand)
        self._set(operation, dst, src, Gpr.X16, wide=wide)

    def compare(self, register: Gpr, operand: Gpr | int, *, wide: bool = True) -> None:
        """Append a comparison of a register with a register or number, which sets NZCV; 32 bits without ``wide``."""
        self.calculate(Operation.SUBS, Gpr.ZR, register, operand, wide=wide)

    def test(self, register: Gpr, operand: Gpr | int, *, wide: bool = True) -> None:
        """Append an AND of a register with a register or number, which only sets NZCV; 32 bits without ``wide``."""
        self.calculate(Operation.ANDS, Gpr.ZR, register, operand, wide=wide)

    def shift(self, shift: Shift, dst: Gpr, src: Gpr, count: int, *, wide: bool = True) -> None:
        """Set ``dst`` to ``src`` shifted by ``count`` bits: 0 to 63, or to 31 without ``wide``."""
        width = 64 if wide else 32
        opcode = (_SBFM if shift is Shift.ASR else _UBFM) | (_WIDE_BITFIELD if wide else 0)
        rotation, last = (count, width - 1) if shift is not Shift.LSL else (-count % width, width - 1 - count)
        self._set(opcode | rotation << 16 | last << 10, dst, src)

    def neg(self, dst: Gpr, src: Gpr, *, wide: bool = True) -> None:
        """Set ``dst`` to 0 minus ``src``; without ``wide`` the upper half is cleared."""
        self._set(Operation.SUB, dst, Gpr.ZR, src, wide=wide)

    def multiply_subtract(self, dst: Gpr, first: Gpr, second: Gpr, minuend: Gpr, *, wide: bool = True) -> None:
        """Set ``dst`` to ``minuend - first * second``."""
        self._set(_MSUB | minuend << 10, dst, first, second, wide=wide)

    def multiply_high(self, dst: Gpr, first: Gpr, second: Gpr, *, is_signed: bool) -> None:
        """Set ``dst`` to the upper 64 bits of the product of two registers, signed or unsigned."""
        self._set(_SMULH if is_signed else _UMULH, dst, first, second)

    def extract(self, dst: Gpr, high: Gpr, low: Gpr, count: int) -> None:
        """Set ``dst`` to the low 64 bits of ``high:low`` shifted to the right by ``count`` bits."""
        self._set(_EXTR | count << 10, dst, high, low)

    # Memory that other threads change

    def load_acquire(self, dst: Gpr, base: Gpr, size: int = 8) -> None:
        """Load with acquire semantics: the processor does no later access before the load."""
        self._set(_LOAD_ACQUIRE | _SIZE_BITS[size], dst, base)

    def store_release(self, base: Gpr, src: Gpr, size: int = 8) -> None:
        """Store with release semantics: the processor does all earlier accesses before the store."""
        self._encode(_STORE_RELEASE | _SIZE_BITS[size], src, base)

    def load_exclusive(self, dst: Gpr, base: Gpr, size: int = 8) -> None:
        """Load with acquire semantics, and monitor the address for other stores."""
        self._set(_LOAD_EXCLUSIVE | _SIZE_BITS[size], dst, base)

    def store_exclusive(self, status: Gpr, base: Gpr, src: Gpr, size: int = 8) -> None:
        """
        Store with release semantics, unless another thread has written there since ``load_exclusive``.

        ``status`` is 0 if the value was stored, else 1.
        """
        self.changed.add(status)
        self._encode(_STORE_EXCLUSIVE | _SIZE_BITS[size], src, base, status)

    def barrier(self) -> None:
        """Write a full memory barrier (DMB ISH): no access moves across it."""
        self.word(_DMB_ISH)

    # Control

    def jump(self, target: Label) -> None:
        """Append an unconditional jump (B) to a label."""
        self._fix(_B, target, _FAR)

    def jump_if(self, condition: Condition, target: Label) -> None:
        """Append a jump (B.cond) to a label that is taken if NZCV meets the condition."""
        self._fix(_B_IF | condition, target, _NEAR)

    def jump_if_bit(self, register: Gpr, bit: int, target: Label) -> None:
        """Jump to a label if bit ``bit``, 0 to 31, of a register is set; flags are unchanged."""
        self.word(_TBZ | bit << 19 | 2 << 5 | register)
        self.jump(target)

    def jump_to(self, address: int) -> None:
        """Jump to an address within 128 MiB; raise ``NotSupportedError`` if it is farther away."""
        self.word(_B | _distance(address - self.here, _FAR))

    def call_at(self, address: int) -> None:
        """Call an address within 128 MiB; raise ``NotSupportedError`` if it is farther away."""
        self.changed.add(Gpr.X30)
        self.word(_BL | _distance(address - self.here, _FAR))

    def jump_by(self, register: Gpr) -> None:
        """Jump to the address in a register."""
        self._encode(_BR, 0, register)

    def ret(self) -> None:
        """Append a return (RET) to the address in x30."""
        self.word(_RET)

    # The system

    def system_call(self) -> None:
        """Make the system call whose number is in x8; only x0 changes."""
        self.changed.add(Gpr.X0)
        self.word(_SVC)

    def read_system(self, dst: Gpr, register: SystemRegister) -> None:
        """Read a system register (MRS) into ``dst``."""
        self._set(_MRS | register, dst)

    def write_flags(self, src: Gpr) -> None:
        """Set NZCV to bits 31 to 28 of a register."""
        self._encode(_MSR | SystemRegister.NZCV, src)

    def synchronize(self) -> None:
        """Complete all earlier instructions (ISB): a later read of a counter is not done before them."""
        self.word(_ISB)

    def _fix(self, opcode: int, target: Label, bits: int) -> None:
        self._fixups.append((len(self._code), target, bits))
        self.word(opcode)

    def assemble(self) -> bytes:
        """
        Return the machine code, 4 bytes for each instruction, in little-endian byte order.

        All labels must be placed. Raise ``NotSupportedError`` if a branch cannot reach its target.
        """
        code = list(self._code)
        for at, label, bits in self._fixups:
            code[at] |= _distance(self._place_of(label) - 4 * at, bits)
        return b"".join(map(_WORD.pack, code))


def _distance(distance: int, bits: int) -> int:
    """
    Return a branch's field of ``bits`` bits, a signed number of instructions, for a distance in bytes.

    Raise ``NotSupportedError`` for a distance that does not fit.
    """
    count = distance >> 2
    if not -1 << bits - 1 <= count < 1 << bits - 1:
        raise NotSupportedError(f"a branch of AArch64 does not reach {distance:+#x} bytes")
    field = count & (1 << bits) - 1
    return field << 5 if bits == _NEAR else field
