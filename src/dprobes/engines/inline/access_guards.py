"""
Guards: code before a handler that compares the address of the instruction's access with a range.

::

    lea rsp, [rsp - frame]        the trampoline's frame
    mov [rsp - ..], rax           the lowest word that the handler needs
    mov [frame.rax], rax
    lahf | seto al | mov [frame.flags], rax
    mov rax, [frame.rax]          if rax is part of the address
    lea rax, [operand]
    sub rax, [lowest]
    cmp rax, count | jb +..       a hit
    restore rax and the flags | lea rsp, [rsp + frame] | jmp to the displaced instruction
    lowest: ..
    mov [frame.accessed], rax     after an adjustment by the size of the access
    restore rax and the flags     then the handler, which finds the frame open

Most executions are no hits, so they change and load as little as possible: no register besides rax, and no memory of
the tool. The range begins ``size - 1`` bytes early, because an access that begins there reaches into it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.lower.hosts.hit_thread import REGISTER_OFFSETS
from dprobes.native.x86.x86_assembler import Gpr, Memory
from dprobes.native.x86.x86_operations import FRAME_SIZE, STACK_NEEDED, X86Operations, saved_at
from dprobes.target.code.memory_accesses import MemoryAccess, memory_access

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import AccessCheck

__all__ = ["GUARD_SIZE", "OPENING_SIZE", "AccessGuard", "GuardCode", "guard_code", "guard_of"]

GUARD_SIZE = 192
"""Maximum size in bytes of the code of a guard."""

_ACCESSED = Memory(Gpr.RSP, REGISTER_OFFSETS["accessed"])
_FLAGS = Memory(Gpr.RSP, X86Operations.layout.flags)

_SUB_RAX_RIP = b"\x48\x2b\x05"  # sub rax, [rip + 32 bits]
_CMP_RAX = b"\x48\x3d"  # cmp rax, 32 bits
_JB, _JMP = b"\x72", b"\xe9"
_MASK_64 = (1 << 64) - 1


class AccessGuard(NamedTuple):
    """
    Guard of an instruction: its access, and the range of ``length`` bytes from the address ``first`` on.

    Addresses are link addresses until the guard is ``placed``. That of the range is one of processes if ``absolute``.
    """

    access: MemoryAccess
    first: int
    length: int
    absolute: bool

    def placed(self, bias: int) -> AccessGuard:
        """Return the guard for a module that is loaded with a bias; its addresses are those of the process."""
        access = self.access
        if access.is_relative:
            access = access._replace(displacement=access.displacement + bias)
        return AccessGuard(access, self.first + (0 if self.absolute else bias), self.length, absolute=True)


def guard_of(check: AccessCheck, raw: bytes) -> AccessGuard | None:
    """Return the guard for a check of the instruction with the bytes ``raw``; None if its address is not computable."""
    access = memory_access(raw, check.instruction)
    if not isinstance(access, MemoryAccess):
        return None
    return AccessGuard(access, check.first, check.length, check.absolute)


class GuardCode(NamedTuple):
    """
    Code of a guard, up to the handler without its ``OPENING_SIZE`` first bytes.

    ``touch`` is the offset of the instruction that may fault because of the stack, ``jump`` that of the distance of the
    jump to the displaced instruction, from the end of this field.
    """

    code: bytes
    touch: int
    jump: int


def guard_code(guard: AccessGuard, address: int) -> GuardCode:
    """Return the code of a guard that is placed, to be executed at an address."""
    start, touch, save = _opening()
    access, restore = guard.access, _restoring()
    code = bytearray(start + save)
    if "rax" in (access.base, access.index_register):
        code += _loading()
    code += _lea(access, address + len(code))
    early = access.size - 1
    asm = X86Operations()
    asm.lea(Gpr.RSP, Memory(Gpr.RSP, FRAME_SIZE))
    miss = restore + asm.assemble() + _JMP + bytes(4)
    literal = struct.pack("<Q", guard.first - early & _MASK_64)
    compare = _CMP_RAX + struct.pack("<i", guard.length + early) + _JB + bytes((len(miss) + len(literal),))
    code += _SUB_RAX_RIP + struct.pack("<i", len(compare) + len(miss)) + compare + miss
    jump = len(code) - 4
    code += literal
    asm = X86Operations()
    if early:
        asm.lea(Gpr.RAX, Memory(Gpr.RAX, -early))
    asm.store(_ACCESSED, Gpr.RAX)
    code += asm.assemble() + restore
    return GuardCode(bytes(code), touch, jump)


@lru_cache(maxsize=1)
def _opening() -> tuple[bytes, int, bytes]:
    """Return the code that opens the frame, the size of its first instruction, and the code that saves rax, flags."""
    asm = X86Operations()
    asm.move_stack(-FRAME_SIZE)
    touch = len(asm)
    asm.store(Memory(Gpr.RSP, FRAME_SIZE - STACK_NEEDED), Gpr.RAX)
    opened = asm.assemble()
    asm = X86Operations()
    asm.store(saved_at(Gpr.RAX), Gpr.RAX)
    asm.save_flags(is_whole=False)
    return opened, touch, asm.assemble()


OPENING_SIZE = 8
"""Size in bytes of the first instruction of a trampoline, which opens the frame: ``lea rsp, [rsp + 32 bits]``."""


@lru_cache(maxsize=1)
def _restoring() -> bytes:
    asm = X86Operations()
    asm.restore_flags(is_whole=False)
    return asm.assemble() + _loading()


@lru_cache(maxsize=1)
def _loading() -> bytes:
    asm = X86Operations()
    asm.load(Gpr.RAX, saved_at(Gpr.RAX))
    return asm.assemble()


def _lea(access: MemoryAccess, address: int) -> bytes:
    """Return the instruction at an address that computes the address of an access to rax."""
    if access.is_relative:
        distance = access.displacement - (address + 7)
        return b"\x48\x8d\x05" + struct.pack("<i", distance)  # lea rax, [rip + 32 bits]
    return _lea_of_registers(access.base, access.index_register, access.scale, access.displacement)


@lru_cache(1 << 12)
def _lea_of_registers(base: str, index: str, scale: int, displacement: int) -> bytes:
    from iced_x86 import Code, Encoder, Instruction, MemoryOperand, Register

    first, other = (getattr(Register, name.upper()) if name else Register.NONE for name in (base, index))
    if base == "rsp":
        displacement += FRAME_SIZE
    size = 1 if base and -0x80 <= displacement < 0x80 else 8
    operand = MemoryOperand(first, other, scale, displacement, size)
    encoder = Encoder(64)
    encoder.encode(Instruction.create_reg_mem(Code.LEA_R64_M, Register.RAX, operand), 0)
    return encoder.take_buffer()
