"""Instructions of AArch64: Arm Architecture Reference Manual, C4.1.92 (immediates) and C4.1.94 (loads and stores)."""

from __future__ import annotations

from dprobes.target.code.effects.effect import NOTHING, Effect, Load, Store, Sum, signed

__all__ = ["aarch64_effect"]

_NOP = 0xD503_201F
_PAGE = 4096
_ZERO = 31
"""The register that is 0, or the stack pointer."""
_WORD = 8


def _general(number: int) -> str:
    return "" if number == _ZERO else f"x{number}"


def _or_stack(number: int) -> str:
    return "sp" if number == _ZERO else f"x{number}"


def aarch64_effect(raw: bytes, address: int) -> Effect | None:
    """Return what the instruction ``raw`` at an address does, None if that is not known."""
    word = int.from_bytes(raw, "little")
    if word == _NOP:
        return NOTHING
    found = _sum(word, address)
    return Effect((found,)) if found is not None else _pair(word) or _single(word)


def _sum(word: int, address: int) -> Sum | None:
    destination, source = word & 31, word >> 5 & 31
    if word & 0xBF80_0000 == 0x9100_0000:  # add, sub (immediate), 64 bits
        amount = (word >> 10 & 0xFFF) << (12 if word >> 22 & 1 else 0)
        return Sum(_or_stack(destination), _or_stack(source), -amount if word >> 30 & 1 else amount)
    if word & 0x1F00_0000 == 0x1000_0000:  # adr, adrp
        offset = signed((word >> 5 & 0x7_FFFF) << 2 | word >> 29 & 3, 21)
        value = (address & -_PAGE) + offset * _PAGE if word >> 31 else address + offset
        return Sum(_general(destination), "", value)
    if word & 0xFFE0_FFE0 == 0xAA00_03E0:  # mov (register), 64 bits
        return Sum(_general(destination), _general(word >> 16 & 31), 0)
    if word & 0x1F80_0000 == 0x1280_0000 and word >> 29 & 3 in (0, 2):  # movn, movz
        is_long, shift = word >> 31, word >> 21 & 3
        if not is_long and shift > 1:
            return None
        value = (word >> 5 & 0xFFFF) << 16 * shift
        if not word >> 30 & 1:
            value = ~value & (1 << (64 if is_long else 32)) - 1
        return Sum(_general(destination), "", value)
    return None


def _pair(word: int) -> Effect | None:
    """Return what stp or ldp of two 64-bit registers does, with or without a new base."""
    if word & 0xFE00_0000 != 0xA800_0000 or not (kind := word >> 23 & 3):
        return None
    first, second, number = word & 31, word >> 10 & 31, word >> 5 & 31
    base, offset = _or_stack(number), signed(word >> 15, 7) * _WORD
    start = 0 if kind == 1 else offset
    changed = () if kind == 2 else (Sum(base, base, offset),)
    if changed and number in (first, second) and number != _ZERO:
        return None  # the manual leaves it open
    if word >> 22 & 1:
        if first == second:
            return None
        names = _general(first), _general(second)
        return Effect(changed, loads=[Load(name, base, start + _WORD * n, _WORD) for n, name in enumerate(names)])
    names = _general(first), _general(second)
    return Effect(changed, stores=[Store(name, base, start + _WORD * n, _WORD) for n, name in enumerate(names)])


def _single(word: int) -> Effect | None:
    """Return what str or ldr of a register does: at an unsigned offset, or 64 bits with a new base."""
    register, number = word & 31, word >> 5 & 31
    base = _or_stack(number)
    if word & 0xBF80_0000 == 0xB900_0000:
        size = 8 if word >> 30 & 1 else 4
        offset, changed = (word >> 10 & 0xFFF) * size, tuple[Sum, ...]()
    elif word & 0xFFA0_0400 == 0xF800_0400 and (number == _ZERO or number != register):
        size, offset = _WORD, signed(word >> 12, 9)
        changed = (Sum(base, base, offset),)
        offset = offset if word >> 11 & 1 else 0
    else:
        return None
    if word >> 22 & 1:
        return Effect(changed, loads=[Load(_general(register), base, offset, size)])
    return Effect(changed, stores=[Store(_general(register), base, offset, size)])
