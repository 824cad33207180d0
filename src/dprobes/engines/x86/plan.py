"""
What kind of instruction a site has: its bytes to an emulation (``emulate``), decided once for each site.

Only the encodings that compilers use are recognised; everything else is stepped. Encodings are those of the Intel SDM,
volume 2; ``rex`` is the REX byte of 64-bit code, or 0.
"""

from __future__ import annotations

from typing import Any

from dprobes.engines.linux.ptracecalls import Register
from dprobes.engines.x86.emulation import Action
from dprobes.lazynamedtuple import NamedTuple

__all__ = ["MemoryMove", "memory_move", "plan"]

_PREFIXES = b"\x66\xf2\xf3\xf0\x2e\x36\x3e\x26\x64\x65\x67"
_STRING_INSTRUCTIONS = b"\xa4\xa5\xa6\xa7\xaa\xab\xac\xad\xae\xaf\x6c\x6d\x6e\x6f"
_ENDBR = (b"\xf3\x0f\x1e\xfa", b"\xf3\x0f\x1e\xfb")

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_RSP = 4  # the number of the stack pointer in instructions

# The general registers in the order of their numbers in instructions (volume 2, table 2-2).
_BY_NUMBER = tuple(
    int(register)
    for register in (
        Register.RAX, Register.RCX, Register.RDX, Register.RBX, Register.RSP, Register.RBP, Register.RSI, Register.RDI,
        Register.R8, Register.R9, Register.R10, Register.R11, Register.R12, Register.R13, Register.R14, Register.R15,
    )
)  # fmt: skip


def plan(raw: bytes, word_size: int) -> tuple[Any, ...]:
    """Return the emulation of the instruction whose bytes are ``raw``, in a program with words of 4 or 8 bytes."""
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
        prefixes = b""  # "rep ret" and "bnd ret": the prefix means nothing here
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
    A move between a register and memory at a base, another register times a scale, and a displacement.

    Registers are numbered as in emulations, -1 is none.
    """

    register: int
    is_load: bool
    size: int
    base: int
    other: int
    scale: int
    displacement: int


def memory_move(raw: bytes, word_size: int) -> MemoryMove | None:
    """Return what ``mov`` of 4 or 8 bytes between a general register and memory does; None for other instructions."""
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
    """Return what an operand of the instruction's size keeps; a 32-bit result clears the upper half of a register."""
    return _MASK_64 if word_size == 8 and rex & 8 else _MASK_32


def _plan_move(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...]:
    # 89 is mov r/m, r; 8b is mov r, r/m.
    register = _BY_NUMBER[(body[1] >> 3 & 7) | (rex & 4) << 1]
    other = _BY_NUMBER[(body[1] & 7) | (rex & 1) << 3]
    destination, source = (other, register) if body[0] == 0x89 else (register, other)
    return (Action.MOVE, length, destination, source, _mask(rex, word_size))


def _plan_address(body: bytes, rex: int, word_size: int, length: int) -> tuple[Any, ...]:
    """Return the plan of ``lea``; ModRM and SIB as in volume 2, tables 2-2 and 2-3."""
    mode, low = body[1] >> 6, body[1] & 7
    destination = _BY_NUMBER[(body[1] >> 3 & 7) | (rex & 4) << 1]
    base, index, scale = -1, -1, 1
    rest = body[2:]
    if low == _RSP:
        sib, rest = rest[0], rest[1:]
        number = (sib >> 3 & 7) | (rex & 2) << 2
        if number != _RSP:
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
    if body[1] & 0xC7 != 0xC0 | _RSP or operation not in (0, 5) or rex not in ((0x48,) if word_size == 8 else (0,)):
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
    # e0 is loopne, e1 loope, e2 loop, e3 jcxz; the address size tells how wide the counter is.
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
