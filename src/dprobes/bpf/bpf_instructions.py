"""
Subset of the eBPF instruction set that dprobes uses, in one table for encoder, assembler and disassembler.

The numbers are those of the kernel's Documentation/bpf/standardization/instruction-set.rst (RFC 9669) and of ``enum
bpf_func_id`` in include/uapi/linux/bpf.h. An instruction has 64 bits::

     0       8   12   16              32                              64
    | opcode | dst | src |   offset     |           immediate          |

The low three bits of the opcode are its class. In arithmetic and jump classes, the other five bits are an operation,
and a bit that is set if the second operand is a register. In load and store classes, they are a size and a mode.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "CALL",
    "EXISTS",
    "EXIT",
    "INSN_SIZE",
    "LOOPS_MAX",
    "NO_OVERWRITE",
    "OVERWRITE",
    "WIDE_LOAD",
    "Alu",
    "Atomic",
    "CallKind",
    "Class",
    "Helper",
    "Insn",
    "Jump",
    "LoadImmediate",
    "Mode",
    "Register",
    "RingOutput",
    "Size",
    "X",
    "decode",
    "encode",
]


class Register(Enum):
    """
    Registers of eBPF. They are not integers, because integers are immediates.

    A call takes its arguments in R1-R5, returns in R0, and preserves only R6-R9. R10 is the end of the stack frame.
    """

    R0 = 0
    R1 = 1
    R2 = 2
    R3 = 3
    R4 = 4
    R5 = 5
    R6 = 6
    R7 = 7
    R8 = 8
    R9 = 9
    R10 = 10


class Class(IntEnum):
    """The instruction classes of eBPF: the lowest three bits of an opcode (BPF_LD, BPF_ALU64, …)."""

    LD = 0
    LDX = 1
    ST = 2
    STX = 3
    ALU = 4
    JMP = 5
    JMP32 = 6
    ALU64 = 7


X = 0x08
"""The bit of an arithmetic or jump opcode that selects the source register, not the immediate, as second operand."""


class Alu(IntEnum):
    """Arithmetic operations. Division and shift to the right are unsigned."""

    ADD = 0x00
    SUB = 0x10
    MUL = 0x20
    DIV = 0x30
    OR = 0x40
    AND = 0x50
    LSH = 0x60
    RSH = 0x70
    NEG = 0x80
    MOD = 0x90
    XOR = 0xA0
    MOV = 0xB0
    ARSH = 0xC0


class Jump(IntEnum):
    """Operations of the jump classes. Those with S compare signed numbers."""

    JA = 0x00
    JEQ = 0x10
    JGT = 0x20
    JGE = 0x30
    JSET = 0x40
    JNE = 0x50
    JSGT = 0x60
    JSGE = 0x70
    CALL = 0x80
    EXIT = 0x90
    JLT = 0xA0
    JLE = 0xB0
    JSLT = 0xC0
    JSLE = 0xD0
    MAY_GOTO = 0xE0
    """
    A jump that is taken once a hidden counter has counted 2**23 executions, or after 250 ms.

    Source: kernel commit 011832b97b31.
    """


class Size(IntEnum):
    """The sizes of memory accesses in an opcode (BPF_W, BPF_H, BPF_B, BPF_DW)."""

    W = 0x00
    H = 0x08
    B = 0x10
    DW = 0x18

    @property
    def bytes(self) -> int:
        """The number of bytes."""
        return _BYTES[self]

    @classmethod
    def of(cls, count: int) -> Size:
        """Return the size of ``count`` bytes: 1, 2, 4 or 8."""
        return {1: cls.B, 2: cls.H, 4: cls.W, 8: cls.DW}[count]


class Mode(IntEnum):
    """The modes of memory accesses in an opcode (BPF_IMM, BPF_MEM, BPF_ATOMIC, …)."""

    IMM = 0x00
    MEM = 0x60
    ATOMIC = 0xC0


class Atomic(IntEnum):
    """Atomic operations, which are encoded in the immediate. FETCH copies the old value to the source register."""

    ADD = 0x00
    OR = 0x40
    AND = 0x50
    XOR = 0xA0
    FETCH = 0x01
    XCHG = 0xE1
    CMPXCHG = 0xF1


class LoadImmediate(IntEnum):
    """The values of the source field of a 64-bit load: the meanings of its immediate."""

    NUMBER = 0
    MAP = 1
    MAP_VALUE = 2
    FUNCTION = 4


LOOPS_MAX = 1 << 23
"""Maximum number of iterations of ``bpf_loop`` and number iterators (BPF_MAX_LOOPS)."""


class RingOutput(IntEnum):
    """Flags of RINGBUF_OUTPUT. Without a flag, the kernel wakes a reader that has read all earlier entries."""

    NO_WAKEUP = 1
    FORCE_WAKEUP = 2


OVERWRITE, NO_OVERWRITE = 0, 1
"""Flags of MAP_UPDATE_ELEM. The second one leaves an existing key unchanged (BPF_NOEXIST)."""

EXISTS = -17
"""
The result of MAP_UPDATE_ELEM with NO_OVERWRITE for an existing key (-EEXIST), of which only the low 32 bits are valid.

Before Linux kernel commit d7ba4cc900bf ("bpf: return long from bpf_map_ops funcs") (in v6.4), the function that the
verifier calls in place of the helper returned an int.
"""


class CallKind(IntEnum):
    """The values of the source field of a call: the meanings of its immediate."""

    HELPER = 0
    LOCAL = 1
    KFUNC = 2


class Helper(IntEnum):
    """Helper functions of the kernel, with the names of bpf-helpers(7) without ``bpf_``."""

    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    MAP_DELETE_ELEM = 3
    KTIME_GET_NS = 5
    GET_SMP_PROCESSOR_ID = 8
    GET_CURRENT_PID_TGID = 14
    GET_CURRENT_UID_GID = 15
    GET_CURRENT_COMM = 16
    GET_CURRENT_TASK = 35
    PROBE_WRITE_USER = 36
    PERF_EVENT_READ_VALUE = 55
    OVERRIDE_RETURN = 58
    GET_STACK = 67
    GET_CURRENT_CGROUP_ID = 80
    SEND_SIGNAL = 109
    PROBE_READ_USER = 112
    PROBE_READ_KERNEL = 113
    PROBE_READ_USER_STR = 114
    PROBE_READ_KERNEL_STR = 115
    GET_NS_CURRENT_PID_TGID = 120
    GET_CURRENT_ANCESTOR_CGROUP_ID = 123
    RINGBUF_OUTPUT = 130
    COPY_FROM_USER = 148
    GET_CURRENT_TASK_BTF = 158
    GET_FUNC_IP = 173
    GET_ATTACH_COOKIE = 174
    TASK_PT_REGS = 175
    FIND_VMA = 180
    LOOP = 181
    COPY_FROM_USER_TASK = 191


# One eBPF instruction, to bytes and back.


_LAYOUT = struct.Struct("<BBhi")
INSN_SIZE = _LAYOUT.size

WIDE_LOAD = Class.LD | 0x18
"""The opcode of the 64-bit load (``lddw``), the only instruction of two slots: the second holds the upper half."""

CALL, EXIT = Class.JMP | Jump.CALL, Class.JMP | Jump.EXIT
"""The opcodes of calls and returns."""

_CLASS, _OPERATION, _SIZE = 0x07, 0xF0, 0x18
_BYTES: dict[int, int] = {Size.B: 1, Size.H: 2, Size.W: 4, Size.DW: 8}


class Insn(NamedTuple):
    """
    Instruction slot; ``off`` and ``imm`` are signed.

    The second slot of a 64-bit load is an instruction with opcode 0.
    """

    opcode: int
    dst: int = 0
    src: int = 0
    off: int = 0
    imm: int = 0

    @property
    def kind(self) -> int:
        """The class of the opcode."""
        return self.opcode & _CLASS

    @property
    def operation(self) -> int:
        """The operation of an arithmetic or jump opcode: ``Alu`` or ``Jump``."""
        return self.opcode & _OPERATION

    @property
    def has_register(self) -> bool:
        """True if the second operand of arithmetic or a jump is a register."""
        return bool(self.opcode & X)

    @property
    def size(self) -> int:
        """The size in bytes of the memory access of a load or store."""
        return _BYTES[self.opcode & _SIZE]

    @property
    def is_map_reference(self) -> bool:
        """True for the first slot of a load of a map, or of an address in one."""
        return self.opcode == WIDE_LOAD and self.src in (LoadImmediate.MAP, LoadImmediate.MAP_VALUE)

    @property
    def is_local_call(self) -> bool:
        """True for a call of a function of the program."""
        return self.opcode == CALL and self.src == CallKind.LOCAL

    @property
    def is_function_reference(self) -> bool:
        """True for a call of a function of the program, or the first slot of a load of the address of one."""
        return self.is_local_call or (self.opcode == WIDE_LOAD and self.src == LoadImmediate.FUNCTION)


def encode(instructions: Iterable[Insn]) -> bytes:
    """Return the bytes of instructions, for a little endian machine."""
    pack = _LAYOUT.pack
    return b"".join([pack(opcode, dst | src << 4, off, imm) for opcode, dst, src, off, imm in instructions])


def decode(data: bytes) -> Iterator[Insn]:
    """Iterate over the instruction slots in ``data``, whose length is a multiple of ``INSN_SIZE``."""
    for opcode, registers, off, imm in _LAYOUT.iter_unpack(data):
        yield Insn(opcode, registers & 0xF, registers >> 4, off, imm)
