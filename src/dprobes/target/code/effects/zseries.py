"""Instructions of zSeries: z/Architecture Principles of Operation, chapter 7 (general instructions)."""

from __future__ import annotations

from dprobes.target.code.effects.effect import NOTHING, Effect, Load, Store, Sum, signed

__all__ = ["zseries_effect"]

_WORD = 8


def zseries_effect(raw: bytes, address: int) -> Effect | None:
    """Return what the instruction ``raw`` at an address does, in 64-bit addressing mode; None if that is not known."""
    word = int.from_bytes(raw, "big")
    match len(raw):
        case 2:
            return NOTHING if raw[0] == 0x07 and 0 < raw[1] < 0x10 else None  # nopr, which serializes at 0,0
        case 4:
            return _of_four(word)
    return _of_six(word, address)


def _gpr(number: int) -> str:
    return f"gpr{number & 15}"


def _of_four(word: int) -> Effect | None:
    register = _gpr(word >> 20)
    if word >> 16 == 0xB904:  # lgr
        return Effect((Sum(_gpr(word >> 4), _gpr(word), 0),))
    if word >> 24 == 0x41:  # la
        base = _base(word >> 16, word >> 12)
        return None if base is None else Effect((Sum(register, base, word & 0xFFF),))
    if word & 0xFF0F_0000 == 0xA709_0000:  # lghi
        return Effect((Sum(register, "", signed(word, 16)),))
    return None


def _base(index: int, base: int) -> str | None:
    """Return the register that an address is relative to, "" for none; None if there are two."""
    index, base = index & 15, base & 15
    if index and base:
        return None
    return _gpr(index or base) if index or base else ""


def _of_six(word: int, address: int) -> Effect | None:
    first, third = word >> 36 & 15, word >> 32 & 15
    displacement = signed((word >> 8 & 0xFF) << 12 | word >> 16 & 0xFFF, 20)
    base = _base(third, word >> 28)
    match word >> 40, word & 0xFF:
        case 0xC0, _ if third == 0:  # larl
            return Effect((Sum(_gpr(first), "", address + 2 * signed(word, 32)),))
        case 0xC0, _ if third == 4 and first == 0:  # jgnop
            return NOTHING
        case 0xE3, 0x71 if base is not None:  # lay
            return Effect((Sum(_gpr(first), base, displacement),))
        case 0xE3, 0x04 if base is not None:  # lg
            return Effect(loads=(Load(_gpr(first), base, displacement, _WORD),))
        case 0xE3, 0x24 if base is not None:  # stg
            return Effect(stores=(Store(_gpr(first), base, displacement, _WORD),))
        case 0xEB, (0x04 | 0x24) as code:  # lmg, stmg
            numbers = [(first + n) & 15 for n in range(((third - first) & 15) + 1)]
            base = _base(0, word >> 28) or ""
            places = [(_gpr(number), displacement + _WORD * n) for n, number in enumerate(numbers)]
            if code == 0x04:
                return Effect(loads=[Load(name, base, at, _WORD) for name, at in places])
            return Effect(stores=[Store(name, base, at, _WORD) for name, at in places])
    return None
