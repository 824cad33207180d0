"""
Instructions that the tracer emulates instead of single-stepping the thread.

A single step costs two more stops of the thread, and the breakpoint must be removed meanwhile. Most probed instructions
only move words between registers and the stack, or jump. ``plan`` decides once for each site whether to emulate; the
emulation is carried out at each hit.

An emulation is a tuple: its ``Action``, the length of the instruction in bytes, and operands. Registers are numbers of
``ptrace_calls.Register``, a size is the word size of the process, and distances count from the end of the instruction.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dprobes.platform.linux.ptrace_calls import Register

if TYPE_CHECKING:
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = [
    "Action",
    "MemoryMove",
    "StackMemory",
    "emulate",
    "is_emulated",
    "memory_move",
    "plan",
    "uses_return_addresses",
]

_RIP, _RSP, _RBP, _EFLAGS = int(Register.RIP), int(Register.RSP), int(Register.RBP), int(Register.EFLAGS)
_RCX = int(Register.RCX)
_MASKS = {8: (1 << 64) - 1, 4: (1 << 32) - 1}

# Bits of EFLAGS (Intel SDM, volume 1, 3.4.3).
_CARRY, _PARITY, _ADJUST, _ZERO, _SIGN, _OVERFLOW = 0x001, 0x004, 0x010, 0x040, 0x080, 0x800
_ARITHMETIC = _CARRY | _PARITY | _ADJUST | _ZERO | _SIGN | _OVERFLOW

_NEVER_PUSHED = 0x30000
"""The resume and virtual-8086 flags, which pushf clears in the image (Intel SDM, volume 2, PUSHF)."""


class Action(enum.IntEnum):
    """Action of the tracer for the probed instruction after the handler ran."""

    STEP = 0
    """Step of the original instruction by the thread: (STEP, length)."""
    REPEAT = 1
    """Run of a repeated string instruction to its end: (REPEAT, length)."""
    SYSTEM_CALL = 2
    """System call of the thread: (SYSTEM_CALL, length)."""
    SKIP = 3
    """No effect; continue after the instruction: (SKIP, length)."""
    PUSH = 4
    """Push a register: (PUSH, length, register, size)."""
    MOVE = 5
    """Copy a register: (MOVE, length, destination, source, mask)."""
    RETURN = 6
    """Return, dropping bytes of arguments: (RETURN, length, size, dropped)."""
    POP = 7
    """Pop a register: (POP, length, register, size)."""
    LEAVE = 8
    """Release a stack frame: (LEAVE, length, size)."""
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
    """Count down and jump: (LOOP, length, distance, size, mask of the counter, required zero flag or None)."""
    BRANCH_ZERO = 18
    """Jump if the counter is zero (jcxz): (BRANCH_ZERO, length, distance, size, mask of the counter)."""


class StackMemory(Protocol):
    """Memory of the thread; both methods raise OSError if the address is not accessible."""

    def read_word(self, address: int, size: int) -> int:
        """Return the little-endian word of ``size`` bytes at an address of the thread's memory."""

    def write_word(self, address: int, size: int, value: int) -> None:
        """Store ``value`` as a little-endian word of ``size`` bytes at an address of the thread's memory."""


def is_emulated(emulation: tuple[Any, ...]) -> bool:
    """Return True if the tracer emulates the instruction of this plan (``plan``) instead of stepping the thread."""
    return bool(emulation[0] >= Action.SKIP)


def uses_return_addresses(emulation: tuple[Any, ...]) -> bool:
    """Return True if an emulation pushes or pops a return address, which a shadow stack would have to match."""
    return emulation[0] in (Action.RETURN, Action.CALL, Action.CALL_REGISTER)


def emulate(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    """
    Execute the instruction at the instruction pointer of ``registers``; return True if that was possible.

    If it is False, nothing has changed, and the thread must be single-stepped: either this instruction is not emulated,
    or memory was not accessible, and the step will cause the fault.
    """
    action = _ACTIONS.get(emulation[0])
    if action is None:
        return False
    try:
        return action(emulation, registers, memory)
    except OSError:
        return False


# Each of these functions reads memory before it changes a register, and returns False if a step is needed after all.


def _skip(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    registers[_RIP] += emulation[1]
    return True


def _push(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, source, size = emulation
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[source])
    registers[_RSP] = top
    registers[_RIP] += length
    return True


def _pop(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, destination, size = emulation
    value = memory.read_word(registers[_RSP], size)
    registers[_RSP] = registers[_RSP] + size & _MASKS[size]
    registers[destination] = value  # last: the destination may be the stack pointer
    registers[_RIP] += length
    return True


def _move(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, destination, source, mask = emulation
    registers[destination] = registers[source] & mask
    registers[_RIP] += length
    return True


def _leave(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, size = emulation
    frame = registers[_RBP] & _MASKS[size]
    registers[_RBP], registers[_RSP] = memory.read_word(frame, size), frame + size & _MASKS[size]
    registers[_RIP] += length
    return True


def _address(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, destination, base, index, scale, displacement, mask = emulation
    value = displacement
    if base >= 0:
        value += registers[base]
    if index >= 0:
        value += registers[index] * scale
    registers[destination] = value & mask
    registers[_RIP] += length
    return True


def _adjust(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
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
    # Overflow: the operands' signs require another sign of the result.
    if (before ^ (number if subtract else after)) & (before ^ after if subtract else number ^ after) & sign:
        flags |= _OVERFLOW
    registers[_EFLAGS] = registers[_EFLAGS] & ~_ARITHMETIC | flags
    registers[_RIP] += length
    return True


def _jump(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    registers[_RIP] = registers[_RIP] + emulation[1] + emulation[2] & _MASKS[emulation[3]]
    return True


def _branch(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    if _holds(emulation[4], registers[_EFLAGS]):
        return _jump(emulation, registers, memory)
    return _skip(emulation, registers, memory)


def _holds(condition: int, flags: int) -> bool:
    """
    Return True if a condition code is true for ``flags``, the value of EFLAGS. An odd code negates the even one before.

    Source: Intel SDM, volume 1, appendix B.
    """
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


def _call(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, _, size = emulation
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[_RIP] + length)
    registers[_RSP] = top
    return _jump(emulation, registers, memory)


def _jump_register(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    target = registers[emulation[2]] & _MASKS[emulation[3]]
    if target >> 47:
        return False  # not canonical: the processor raises a fault at the jump itself
    registers[_RIP] = target
    return True


def _call_register(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, source, size = emulation
    target = registers[source] & _MASKS[size]
    if target >> 47:
        return False
    top = registers[_RSP] - size & _MASKS[size]
    memory.write_word(top, size, registers[_RIP] + length)
    registers[_RSP] = top
    registers[_RIP] = target
    return True


def _push_flags(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, length, pushed, size = emulation
    top = registers[_RSP] - pushed & _MASKS[size]
    memory.write_word(top, pushed, registers[_EFLAGS] & ~_NEVER_PUSHED)
    registers[_RSP] = top
    registers[_RIP] += length
    return True


def _loop(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    _, _, _, _size, mask, wanted = emulation
    count = registers[_RCX] - 1 & mask
    # A 32-bit counter clears the upper half of the register, a 16-bit one keeps the other bits.
    registers[_RCX] = registers[_RCX] & ~mask | count if mask == 0xFFFF else count
    if count and (wanted is None or bool(registers[_EFLAGS] & _ZERO) == wanted):
        return _jump(emulation, registers, memory)
    return _skip(emulation, registers, memory)


def _branch_zero(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
    if registers[_RCX] & emulation[4]:
        return _skip(emulation, registers, memory)
    return _jump(emulation, registers, memory)


def _return(emulation: tuple[Any, ...], registers: RegisterWords, memory: StackMemory) -> bool:
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


# From the bytes of an instruction to its emulation (``emulate``), decided once for each site.
#
# Only the encodings that compilers use are recognised; everything else is stepped. Encodings are those of the Intel
# SDM, volume 2; ``rex`` is the REX byte of 64-bit code, or 0.


_PREFIXES = b"\x66\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65\x67"
_STRING_INSTRUCTIONS = b"\xa4\xa5\xa6\xa7\xaa\xab\xac\xad\xae\xaf\x6c\x6d\x6e\x6f"
_ENDBR = (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb")

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_STACK_POINTER = 4  # the number of the stack pointer in instructions

# The general registers in the order of their numbers in instructions (volume 2, table 2-2).
_BY_NUMBER = tuple(
    int(register)
    for register in (
        Register.RAX, Register.RCX, Register.RDX, Register.RBX, Register.RSP, Register.RBP, Register.RSI, Register.RDI,
        Register.R8, Register.R9, Register.R10, Register.R11, Register.R12, Register.R13, Register.R14, Register.R15,
    )
)  # fmt: skip


def plan(raw: bytes, word_size: int) -> tuple[Any, ...]:
    """
    Return the emulation of the instruction with the bytes ``raw``, for a word size of 4 or 8 bytes.

    An instruction that is not recognised gets STEP.
    """
    length = len(raw)
    body = raw.lstrip(_PREFIXES)
    prefixes = raw[: length - len(body)]
    rex = 0
    if word_size == 8 and body and 0x40 <= body[0] <= 0x4F:
        rex, body = body[0], body[1:]
    if not body:
        return (Action.STEP, length)
    if raw in _ENDBR or _is_nop(prefixes, rex, body):
        return (Action.SKIP, length)
    if body[:2] in (b"\x0f\x05", b"\x0f\x34") or body == b"\xcd\x80":
        return (Action.SYSTEM_CALL, length)
    if body == b"\x9c":
        return (Action.PUSH_FLAGS, length, 2 if b"\x66" in prefixes else word_size, word_size)
    if (b"\xf2" in prefixes or b"\xf3" in prefixes) and body[0] in _STRING_INSTRUCTIONS:
        return (Action.REPEAT, length)
    found = None
    if prefixes in (b"\xf2", b"\xf3") and body[0] in (0xC2, 0xC3):
        prefixes = b""  # "rep ret" and "bnd ret": the prefix has no effect here
    if prefixes in (b"", b"\x67") and 0xE0 <= body[0] <= 0xE3:
        return _plan_loop(body, bool(prefixes), word_size, length)
    if not prefixes:
        found = (
            _plan_data(body, rex, word_size, length)
            or _plan_indirect(body, rex, word_size, length)
            or (None if rex else _plan_control(body, word_size, length))
        )
    return found or (Action.STEP, length)


class MemoryMove(NamedTuple):
    """
    Move of ``size`` bytes between a register and memory at ``base`` + ``other`` * ``scale`` + ``displacement``.

    ``register``, ``base`` and the index register ``other`` are ``Register`` numbers, or -1 for none. If ``base`` is
    RIP, the displacement counts from the start of the instruction.
    """

    register: int
    is_load: bool
    size: int
    base: int
    other: int
    scale: int
    displacement: int


def memory_move(raw: bytes, word_size: int) -> MemoryMove | None:
    """Return the move that a ``mov`` of 4 or 8 bytes between a general register and memory makes; None for others."""
    rex = raw[0] if word_size == 8 and raw and 0x40 <= raw[0] <= 0x4F else 0
    body = raw[1:] if rex else raw
    if len(body) < 2 or body[0] not in (0x89, 0x8B) or body[1] >= 0xC0:
        return None
    _, _, register, *address, _ = _plan_address(body, rex, word_size, len(raw))
    return MemoryMove(register, body[0] == 0x8B, 8 if rex & 8 else 4, *address)


def _is_nop(prefixes: bytes, rex: int, body: bytes) -> bool:
    # 90 is a nop without rex.b (else xchg r8, rax) and without f3 (pause); 0f 1f /0 is the long form.
    if body == b"\x90":
        return not rex & 1 and b"\xf3" not in prefixes and b"\xf0" not in prefixes
    return body[:2] == b"\x0f\x1f" and len(body) > 2 and not body[2] & 0x38 and b"\xf0" not in prefixes


def _plan_data(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...] | None:
    opcode = body[0]
    if 0x50 <= opcode <= 0x5F and len(body) == 1:
        register = _BY_NUMBER[(opcode & 7) | (rex & 1) << 3]
        return (Action.PUSH if opcode < 0x58 else Action.POP, length, register, word_size)
    if opcode in (0x89, 0x8B) and len(body) == 2 and body[1] >= 0xC0:
        return _plan_move(body, rex, word_size, length)
    if opcode == 0x8D and len(body) > 1 and body[1] < 0xC0:
        return _plan_address(body, rex, word_size, length)
    if opcode in (0x81, 0x83):
        return _plan_adjust(body, rex, word_size, length)
    return None


def _mask(rex: int, word_size: int) -> int:
    """
    Return the mask of the operand size that a REX prefix selects.

    A 32-bit result clears the register's upper half.
    """
    return _MASK_64 if word_size == 8 and rex & 8 else _MASK_32


def _plan_move(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...]:
    # 89 is mov r/m, r; 8b is mov r, r/m.
    register = _BY_NUMBER[(body[1] >> 3 & 7) | (rex & 4) << 1]
    other = _BY_NUMBER[(body[1] & 7) | (rex & 1) << 3]
    destination, source = (other, register) if body[0] == 0x89 else (register, other)
    return (Action.MOVE, length, destination, source, _mask(rex, word_size))


def _plan_address(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...]:
    """Return the emulation of ``lea``. ModRM and SIB are decoded by the Intel SDM, volume 2, tables 2-2 and 2-3."""
    mode, low = body[1] >> 6, body[1] & 7
    destination = _BY_NUMBER[(body[1] >> 3 & 7) | (rex & 4) << 1]
    base, index, scale = -1, -1, 1
    rest = body[2:]
    if low == _STACK_POINTER:
        sib, rest = rest[0], rest[1:]
        number = (sib >> 3 & 7) | (rex & 2) << 2
        if number != _STACK_POINTER:
            index, scale = _BY_NUMBER[number], 1 << (sib >> 6)
        if sib & 7 != 5 or mode:
            base = _BY_NUMBER[(sib & 7) | (rex & 1) << 3]
    elif low != 5 or mode:
        base = _BY_NUMBER[low | (rex & 1) << 3]
    elif word_size == 8:
        base = int(Register.RIP)
    displacement = int.from_bytes(rest, "little", signed=True)
    if base == Register.RIP:
        displacement += length
    return (Action.ADDRESS, length, destination, base, index, scale, displacement, _mask(rex, word_size))


def _plan_adjust(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...] | None:
    # 81 and 83 /0 is add r/m, imm; /5 is sub. Only those of the stack pointer, in the program's word.
    operation = body[1] >> 3 & 7
    if (
        body[1] & 0xC7 != 0xC0 | _STACK_POINTER
        or operation not in (0, 5)
        or rex not in ((0x48,) if word_size == 8 else (0,))
    ):
        return None
    number = int.from_bytes(body[2:], "little", signed=True)
    return (Action.ADJUST, length, number, operation == 5, word_size)


def _plan_indirect(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...] | None:
    # ff /2 is call r/m, ff /4 jmp r/m; here only through a register.
    if body[0] != 0xFF or len(body) != 2 or body[1] >> 6 != 3 or body[1] >> 3 & 7 not in (2, 4):
        return None
    action = Action.CALL_REGISTER if body[1] >> 3 & 7 == 2 else Action.JUMP_REGISTER
    return (action, length, _BY_NUMBER[(body[1] & 7) | (rex & 1) << 3], word_size)


def _plan_loop(body: bytes, other_size: bool, word_size: int, length: int) -> tuple[Any, ...]:
    # e0 is loopne, e1 loope, e2 loop, e3 jcxz; the address size is the width of the counter.
    distance = int.from_bytes(body[1:], "little", signed=True)
    masks = {8: (_MASK_64, _MASK_32), 4: (_MASK_32, 0xFFFF)}
    mask = masks[word_size][other_size]
    if body[0] == 0xE3:
        return (Action.BRANCH_ZERO, length, distance, word_size, mask)
    return (Action.LOOP, length, distance, word_size, mask, (False, True, None)[body[0] - 0xE0])


def _plan_control(body: bytes, word_size: int, length: int) -> tuple[Any, ...] | None:
    opcode = body[0]
    if body == b"\xc9":
        return (Action.LEAVE, length, word_size)
    if opcode in (0xC2, 0xC3):
        return (Action.RETURN, length, word_size, int.from_bytes(body[1:], "little"))
    if opcode in (0xEB, 0xE9):
        return (Action.JUMP, length, int.from_bytes(body[1:], "little", signed=True), word_size)
    if opcode == 0xE8:
        return (Action.CALL, length, int.from_bytes(body[1:], "little", signed=True), word_size)
    if 0x70 <= opcode <= 0x7F:
        return (Action.BRANCH, length, int.from_bytes(body[1:], "little", signed=True), word_size, opcode & 15)
    if opcode == 0x0F and 0x80 <= body[1] <= 0x8F:
        return (Action.BRANCH, length, int.from_bytes(body[2:], "little", signed=True), word_size, body[1] & 15)
    return None
