"""
Instructions that the tracer carries out itself instead of letting the thread step over them.

A step costs two more stops of the thread, and the breakpoint must be away meanwhile. The instructions at which probes
are mostly placed only move numbers between registers and the stack, or jump. What a probe's instruction is, is decided
once for each site (``plan``, in the module beside this one) and carried out at each hit.

An emulation is a tuple: its ``Action``, the length of the instruction, and operands. Registers are numbers of
``syscalls.Register``, a size is that of the program's word, and distances count from the end of the instruction.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

from dprobes.engines.linux.ptracecalls import Register

if TYPE_CHECKING:
    import ctypes

__all__ = ["Action", "StackMemory", "emulate", "is_emulated", "uses_return_addresses"]

_RIP, _RSP, _RBP, _EFLAGS = int(Register.RIP), int(Register.RSP), int(Register.RBP), int(Register.EFLAGS)
_RCX = int(Register.RCX)
_MASKS = {8: (1 << 64) - 1, 4: (1 << 32) - 1}

# Bits of EFLAGS (Intel SDM, volume 1, 3.4.3).
_CARRY, _PARITY, _ADJUST, _ZERO, _SIGN, _OVERFLOW = 0x001, 0x004, 0x010, 0x040, 0x080, 0x800
_ARITHMETIC = _CARRY | _PARITY | _ADJUST | _ZERO | _SIGN | _OVERFLOW

_NEVER_PUSHED = 0x30000
"""The resume and virtual-8086 flags, which pushf clears in the image (Intel SDM, volume 2, PUSHF)."""


class Action(enum.IntEnum):
    """Name what is done at a site after the handler ran."""

    STEP = 0
    """Let the thread execute the original instruction: (STEP, length)."""
    REPEAT = 1
    """Let the repeated string instruction run to its end: (REPEAT, length)."""
    SYSTEM_CALL = 2
    """Let the thread enter the kernel: (SYSTEM_CALL, length)."""
    SKIP = 3
    """Go on behind the instruction: (SKIP, length)."""
    PUSH = 4
    """Push a register: (PUSH, length, register, size)."""
    MOVE = 5
    """Copy a register: (MOVE, length, destination, source, mask)."""
    RETURN = 6
    """Return, dropping bytes of arguments: (RETURN, length, size, dropped)."""
    POP = 7
    """Pop a register: (POP, length, register, size)."""
    LEAVE = 8
    """Take a stack frame down: (LEAVE, length, size)."""
    ADDRESS = 9
    """Compute an address (lea): (ADDRESS, length, destination, base or -1, index or -1, scale, displacement, mask)."""
    ADJUST = 10
    """Add a number to the stack pointer, or subtract it: (ADJUST, length, number, subtract, size)."""
    JUMP = 11
    """Jump: (JUMP, length, distance, size)."""
    BRANCH = 12
    """Jump on a condition: (BRANCH, length, distance, size, condition)."""
    CALL = 13
    """Call: (CALL, length, distance, size)."""
    JUMP_REGISTER = 14
    """Jump to the address in a register: (JUMP_REGISTER, length, register, size)."""
    CALL_REGISTER = 15
    """Call the address in a register: (CALL_REGISTER, length, register, size)."""
    PUSH_FLAGS = 16
    """Push the flags: (PUSH_FLAGS, length, bytes pushed, size)."""
    LOOP = 17
    """Count down and jump: (LOOP, length, distance, size, mask of the counter, zero flag that is wanted or None)."""
    BRANCH_ZERO = 18
    """Jump if the counter is zero (jcxz): (BRANCH_ZERO, length, distance, size, mask of the counter)."""


class StackMemory(Protocol):
    """Give the emulation access to the thread's stack; both calls raise OSError where the memory is not accessible."""

    def read_word(self, address: int, size: int) -> int:
        """Return a little-endian word of ``size`` bytes."""

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store a little-endian word of ``size`` bytes."""


def is_emulated(emulation: tuple[Any, ...]) -> bool:
    """Return whether an instruction is carried out by the tracer, without a step."""
    return bool(emulation[0] >= Action.SKIP)


def uses_return_addresses(emulation: tuple[Any, ...]) -> bool:
    """Return whether an instruction pushes or pops a return address, which a shadow stack would have to follow."""
    return emulation[0] in (Action.RETURN, Action.CALL, Action.CALL_REGISTER)


def emulate(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    """
    Carry out an instruction on ``registers``, which stand at its start; return whether it was done.

    False means that the thread must step: the emulation is a stepped one, or memory was not accessible, in which case
    the step brings the fault about. Nothing has been changed then.
    """
    action = _ACTIONS.get(emulation[0])
    if action is None:
        return False
    try:
        return action(emulation, registers, memory)
    except OSError:
        return False


# Each of these reads memory before it changes a register, and returns False if it must be stepped after all.


def _skip(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    registers[_RIP] += emulation[1]
    return True


def _push(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, source, size = emulation
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[source])
    registers[_RSP] = top
    registers[_RIP] += length
    return True


def _pop(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, destination, size = emulation
    value = memory.read_word(registers[_RSP], size)
    registers[_RSP] = registers[_RSP] + size & _MASKS[size]
    registers[destination] = value  # last: the destination may be the stack pointer
    registers[_RIP] += length
    return True


def _move(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, destination, source, mask = emulation
    registers[destination] = registers[source] & mask
    registers[_RIP] += length
    return True


def _leave(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, size = emulation
    frame = registers[_RBP] & _MASKS[size]
    registers[_RBP], registers[_RSP] = memory.read_word(frame, size), frame + size & _MASKS[size]
    registers[_RIP] += length
    return True


def _address(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, destination, base, index, scale, displacement, mask = emulation
    value = displacement
    if base >= 0:
        value += registers[base]
    if index >= 0:
        value += registers[index] * scale
    registers[destination] = value & mask
    registers[_RIP] += length
    return True


def _adjust(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, number, subtract, size = emulation
    mask = _MASKS[size]
    before, number = registers[_RSP] & mask, number & mask
    after = (before - number if subtract else before + number) & mask
    registers[_RSP] = after
    sign = 1 << 8 * size - 1
    flags = 0
    if (number > before) if subtract else (after < before):
        flags |= _CARRY
    if (after & 0xFF).bit_count() % 2 == 0:
        flags |= _PARITY
    if (before ^ number ^ after) & 0x10:
        flags |= _ADJUST
    if not after:
        flags |= _ZERO
    if after & sign:
        flags |= _SIGN
    # Overflow: the operands' signs call for another sign of the result.
    if (before ^ (number if subtract else after)) & (before ^ after if subtract else number ^ after) & sign:
        flags |= _OVERFLOW
    registers[_EFLAGS] = registers[_EFLAGS] & ~_ARITHMETIC | flags
    registers[_RIP] += length
    return True


def _jump(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    registers[_RIP] = registers[_RIP] + emulation[1] + emulation[2] & _MASKS[emulation[3]]
    return True


def _branch(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    if _holds(emulation[4], registers[_EFLAGS]):
        return _jump(emulation, registers, memory)
    return _skip(emulation, registers, memory)


def _holds(condition: int, flags: int) -> bool:
    """Return whether a condition code holds (Intel SDM, volume 1, appendix B); odd codes negate the even ones."""
    less = bool(flags & _SIGN) != bool(flags & _OVERFLOW)
    match condition >> 1:
        case 0:
            holds = bool(flags & _OVERFLOW)
        case 1:
            holds = bool(flags & _CARRY)
        case 2:
            holds = bool(flags & _ZERO)
        case 3:
            holds = bool(flags & (_CARRY | _ZERO))
        case 4:
            holds = bool(flags & _SIGN)
        case 5:
            holds = bool(flags & _PARITY)
        case 6:
            holds = less
        case _:
            holds = less or bool(flags & _ZERO)
    return holds != bool(condition & 1)


def _call(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, _, size = emulation
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[_RIP] + length)
    registers[_RSP] = top
    return _jump(emulation, registers, memory)


def _jump_register(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    target = registers[emulation[2]] & _MASKS[emulation[3]]
    if target >> 47:
        return False  # not canonical: the processor raises a fault at the jump itself
    registers[_RIP] = target
    return True


def _call_register(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, source, size = emulation
    target = registers[source] & _MASKS[size]
    if target >> 47:
        return False
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[_RIP] + length)
    registers[_RSP] = top
    registers[_RIP] = target
    return True


def _push_flags(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, length, pushed, size = emulation
    top = registers[_RSP] - pushed & _MASKS[size]
    memory.write_word(top, pushed, registers[_EFLAGS] & ~_NEVER_PUSHED)
    registers[_RSP] = top
    registers[_RIP] += length
    return True


def _loop(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, _, _, _size, mask, wanted = emulation
    count = registers[_RCX] - 1 & mask
    # A 32-bit counter clears the upper half of the register, a 16-bit one leaves the rest alone.
    registers[_RCX] = registers[_RCX] & ~mask | count if mask == 0xFFFF else count
    if count and (wanted is None or bool(registers[_EFLAGS] & _ZERO) == wanted):
        return _jump(emulation, registers, memory)
    return _skip(emulation, registers, memory)


def _branch_zero(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    if registers[_RCX] & emulation[4]:
        return _skip(emulation, registers, memory)
    return _jump(emulation, registers, memory)


def _return(emulation: tuple[Any, ...], registers: ctypes.Array[ctypes.c_ulong], memory: StackMemory) -> bool:
    _, _, size, dropped = emulation
    target = memory.read_word(registers[_RSP], size)
    if target >> 47:
        return False  # not canonical: the processor raises a fault at the return itself
    registers[_RIP] = target
    registers[_RSP] = registers[_RSP] + size + dropped & _MASKS[size]
    return True


_ACTIONS = {
    Action.SKIP: _skip,
    Action.PUSH: _push,
    Action.MOVE: _move,
    Action.RETURN: _return,
    Action.POP: _pop,
    Action.LEAVE: _leave,
    Action.ADDRESS: _address,
    Action.ADJUST: _adjust,
    Action.JUMP: _jump,
    Action.BRANCH: _branch,
    Action.CALL: _call,
    Action.JUMP_REGISTER: _jump_register,
    Action.CALL_REGISTER: _call_register,
    Action.PUSH_FLAGS: _push_flags,
    Action.LOOP: _loop,
    Action.BRANCH_ZERO: _branch_zero,
}
