"""
Instructions that the tracer carries out itself instead of letting the thread step over them.

A step costs two more stops of the thread, and the breakpoint must be away meanwhile. The instructions at which probes
are mostly placed only move numbers between registers and the stack; what a probe's instruction is, is decided once per
site (``plan``, which needs a decoder) and carried out at each hit (``emulate``, which does not).

An emulation is a tuple: its ``Action``, the length of the instruction, and operands.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, Any, Protocol

from dprobes.engines.ptrace.syscalls import Register

if TYPE_CHECKING:
    import ctypes

__all__ = ["Action", "StackMemory", "emulate", "is_emulated", "plan"]

_RIP, _RSP = Register.RIP, Register.RSP
_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


class Action(enum.IntEnum):
    """Name what is done at a site after the handler ran."""

    STEP = 0
    """Single-step the original instruction: (STEP, length)."""
    REPEAT = 1
    """Single-step until the repeated string instruction is through: (REPEAT, length)."""
    PUSH_FLAGS = 2
    """Single-step, then take the trap flag out of the flags on the stack: (PUSH_FLAGS, length, bytes pushed)."""
    SYSTEM_CALL = 3
    """Let the thread enter the kernel: (SYSTEM_CALL, length)."""
    SKIP = 4
    """Go on behind the instruction: (SKIP, length)."""
    PUSH = 5
    """Push a register: (PUSH, length, register, word size)."""
    MOVE = 6
    """Copy a register: (MOVE, length, destination, source, mask)."""
    RETURN = 7
    """Return, dropping bytes of arguments: (RETURN, length, word size, dropped)."""


class StackMemory(Protocol):
    """Give the emulation access to the thread's stack; both calls raise OSError where the memory is not accessible."""

    def read_word(self, address: int, size: int) -> int:
        """Return a little-endian word of ``size`` bytes."""

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a little-endian word of ``size`` bytes."""


def emulate(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    """
    Carry out an instruction on ``registers``, which stand at its start; return whether it was done.

    False means that the thread must step: the emulation is a stepped one, or memory was not accessible, in which case
    the step brings the fault about. Nothing has been changed then.
    """
    action = emulation[0]
    if action == Action.SKIP:
        registers[_RIP] += emulation[1]
        return True
    if action == Action.PUSH:
        _, length, source, size = emulation
        top = registers[_RSP] - size & (_MASK_64 if size == 8 else _MASK_32)
        try:
            memory.write_word(top, size, registers[source])
        except OSError:
            return False
        registers[_RSP] = top
        registers[_RIP] += length
        return True
    if action == Action.MOVE:
        _, length, destination, source, mask = emulation
        registers[destination] = registers[source] & mask
        registers[_RIP] += length
        return True
    if action == Action.RETURN:
        _, _, size, dropped = emulation
        top = registers[_RSP]
        try:
            target = memory.read_word(top, size)
        except OSError:
            return False
        if target >> 47:
            return False  # not canonical: the processor raises a fault at the return itself
        registers[_RIP] = target
        registers[_RSP] = top + size + dropped & (_MASK_64 if size == 8 else _MASK_32)
        return True
    return False


# The general registers in the order of their numbers in instructions (Intel SDM, volume 2, table 2-2).
_BY_NUMBER = (
    Register.RAX, Register.RCX, Register.RDX, Register.RBX, Register.RSP, Register.RBP, Register.RSI, Register.RDI,
    Register.R8, Register.R9, Register.R10, Register.R11, Register.R12, Register.R13, Register.R14, Register.R15,
)  # fmt: skip


def plan(raw: bytes, word_size: int) -> tuple[Any, ...]:
    """
    Return the emulation of the instruction whose bytes are ``raw``, in a program with words of 4 or 8 bytes.

    Only the encodings that compilers use are recognised; everything else is stepped.
    """
    length = len(raw)
    body = raw
    prefixes = b""
    while body and body[0] in b"\x66\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65\x67":
        prefixes += body[:1]
        body = body[1:]
    rex = 0
    if word_size == 8 and body and 0x40 <= body[0] <= 0x4F:
        rex, body = body[0], body[1:]
    if not body:
        return (Action.STEP, length)
    if raw in (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb") or _is_nop(prefixes, rex, body):
        return (Action.SKIP, length)
    if body[:2] in (b"\x0f\x05", b"\x0f\x34") or body == b"\xcd\x80":
        return (Action.SYSTEM_CALL, length)
    if body[0] == 0x9C:
        return (Action.PUSH_FLAGS, length, 2 if b"\x66" in prefixes else word_size)
    if (b"\xf2" in prefixes or b"\xf3" in prefixes) and body[
        0
    ] in b"\xa4\xa5\xa6\xa7\xaa\xab\xac\xad\xae\xaf\x6c\x6d\x6e\x6f":
        return (Action.REPEAT, length)
    if prefixes:
        return (Action.STEP, length)
    if 0x50 <= body[0] <= 0x57:
        return (Action.PUSH, length, int(_BY_NUMBER[(body[0] & 7) | (rex & 1) << 3]), word_size)
    if body[0] in (0x89, 0x8B) and len(body) == 2 and body[1] >= 0xC0:
        return _plan_move(body, rex, word_size, length)
    if body == b"\xc3" and not rex:
        return (Action.RETURN, length, word_size, 0)
    if body[0] == 0xC2 and not rex:
        return (Action.RETURN, length, word_size, struct.unpack("<H", body[1:3])[0])
    return (Action.STEP, length)


def _is_nop(prefixes: bytes, rex: int, body: bytes) -> bool:
    # 90 is a nop without rex.b (else xchg r8, rax) and without f3 (pause); 0f 1f /0 is the long form.
    if body == b"\x90":
        return not rex & 1 and b"\xf3" not in prefixes and b"\xf0" not in prefixes
    return body[:2] == b"\x0f\x1f" and len(body) > 2 and not body[2] & 0x38 and b"\xf0" not in prefixes


def _plan_move(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...]:
    # 89 is mov r/m, r; 8b is mov r, r/m. A 32-bit move clears the upper half of the destination.
    register = _BY_NUMBER[(body[1] >> 3 & 7) | (rex & 4) << 1]
    other = _BY_NUMBER[(body[1] & 7) | (rex & 1) << 3]
    destination, source = (other, register) if body[0] == 0x89 else (register, other)
    wide = word_size == 8 and rex & 8
    return (Action.MOVE, length, int(destination), int(source), _MASK_64 if wide else _MASK_32)


def is_emulated(emulation: tuple[Any, ...]) -> bool:
    """Return whether an instruction is carried out by the tracer, without a step."""
    return bool(emulation[0] >= Action.SKIP)
