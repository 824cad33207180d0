"""Instructions of PowerPC: Power ISA, book I, chapter 3 (fixed-point facility)."""

from __future__ import annotations

from dprobes.target.code.effects.effect import NOTHING, Effect, Load, Store, Sum, signed

__all__ = ["power_effect"]

_NOP = 0x6000_0000  # ori r0, r0, 0


def power_effect(raw: bytes, word_size: int) -> Effect | None:
    """Return what the instruction ``raw`` does where words have so many bytes, None if that is not known."""
    word = int.from_bytes(raw, "big")
    if word == _NOP:
        return NOTHING
    register, number = f"r{word >> 21 & 31}", word >> 16 & 31
    base, immediate = f"r{number}" if number else "", signed(word, 16)
    match word >> 26:
        case 14:  # addi
            return Effect((Sum(register, base, immediate),))
        case 15:  # addis
            return Effect((Sum(register, base, immediate << 16),))
        case 31:
            return _of_registers(word)
        case 32:  # lwz
            return Effect(loads=(Load(register, base, immediate, 4),))
        case 36:  # stw
            return Effect(stores=(Store(register, base, immediate, 4),))
        case 37 if number:  # stwu
            return Effect((Sum(base, base, immediate),), (Store(register, base, immediate, 4),))
        case 58 if word_size == 8 and not word & 3:  # ld
            return Effect(loads=(Load(register, base, immediate & -4, 8),))
        case 62 if word_size == 8 and word & 3 == 0:  # std
            return Effect(stores=(Store(register, base, immediate & -4, 8),))
        case 62 if word_size == 8 and word & 3 == 1 and number:  # stdu
            return Effect((Sum(base, base, immediate & -4),), (Store(register, base, immediate & -4, 8),))
    return None


def _of_registers(word: int) -> Effect | None:
    first, second = f"r{word >> 21 & 31}", f"r{word >> 16 & 31}"
    if word & 0xFC1F_FFFF == 0x7C08_02A6:  # mflr
        return Effect((Sum(first, "lnk", 0),))
    if word & 0xFC1F_FFFF == 0x7C08_03A6:  # mtlr
        return Effect((Sum("lnk", first, 0),))
    is_move = word & 0x7FF == 444 << 1 and word >> 21 & 31 == word >> 11 & 31 != word >> 16 & 31
    return Effect((Sum(second, first, 0),)) if is_move else None  # mr; of a register to itself it sets priorities
