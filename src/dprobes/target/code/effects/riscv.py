"""Instructions of RISC-V, 64 bit: Unprivileged ISA, chapters 2 (RV32I), 5 (RV64I) and 16 (compressed)."""

from __future__ import annotations

from dprobes.target.code.effects.effect import Effect, Load, Store, Sum, signed

__all__ = ["riscv_effect"]

_STACK = "x2"
_WORD = 8


def _name(number: int) -> str:
    return f"x{number}" if number else ""


def _short(bits: int) -> str:
    return f"x{8 + (bits & 7)}"


def _gathered(word: int, *places: tuple[int, int, int]) -> int:
    """Return a number whose bits are spread: each place is where some are, how many, and where they belong."""
    return sum((word >> at & (1 << count) - 1) << to for at, count, to in places)


def riscv_effect(raw: bytes, address: int) -> Effect | None:
    """Return what the instruction ``raw`` at an address does, None if that is not known."""
    word = int.from_bytes(raw, "little")
    match word & 3:
        case 3:
            return _long(word, address)
        case 0:
            return _of_quadrant_0(word)
        case 1:
            return _of_quadrant_1(word)
    return _of_quadrant_2(word)


def _long(word: int, address: int) -> Effect | None:
    destination, base, source = _name(word >> 7 & 31), _name(word >> 15 & 31), _name(word >> 20 & 31)
    immediate, upper = signed(word >> 20, 12), signed(word & 0xFFFF_F000, 32)
    match word & 0x7F, word >> 12 & 7:
        case 0x13, 0:  # addi
            return Effect((Sum(destination, base, immediate),))
        case 0x37, _:  # lui
            return Effect((Sum(destination, "", upper),))
        case 0x17, _:  # auipc
            return Effect((Sum(destination, "", address + upper),))
        case 0x03, (2 | 3) as size:  # lw, ld
            return Effect(loads=(Load(destination, base, immediate, 1 << size, is_signed=True),))
        case 0x23, (2 | 3) as size:  # sw, sd
            offset = signed(word >> 25 << 5 | word >> 7 & 31, 12)
            return Effect(stores=(Store(source, base, offset, 1 << size),))
    return None


def _of_quadrant_0(word: int) -> Effect | None:
    register, base = _short(word >> 2), _short(word >> 7)
    of_four = _gathered(word, (10, 3, 3), (6, 1, 2), (5, 1, 6))
    of_eight = _gathered(word, (10, 3, 3), (5, 2, 6))
    match word >> 13:
        case 0 if word:  # c.addi4spn
            amount = _gathered(word, (11, 2, 4), (7, 4, 6), (6, 1, 2), (5, 1, 3))
            return Effect((Sum(register, _STACK, amount),)) if amount else None
        case 2:  # c.lw
            return Effect(loads=(Load(register, base, of_four, 4, is_signed=True),))
        case 3:  # c.ld
            return Effect(loads=(Load(register, base, of_eight, _WORD),))
        case 6:  # c.sw
            return Effect(stores=(Store(register, base, of_four, 4),))
        case 7:  # c.sd
            return Effect(stores=(Store(register, base, of_eight, _WORD),))
    return None


def _of_quadrant_1(word: int) -> Effect | None:
    number, immediate = word >> 7 & 31, signed(_gathered(word, (2, 5, 0), (12, 1, 5)), 6)
    name = _name(number)
    match word >> 13:
        case 0:  # c.addi, c.nop
            return Effect((Sum(name, name, immediate),))
        case 2:  # c.li
            return Effect((Sum(name, "", immediate),))
        case 3 if number == 2:  # c.addi16sp
            amount = signed(_gathered(word, (12, 1, 9), (6, 1, 4), (5, 1, 6), (3, 2, 7), (2, 1, 5)), 10)
            return Effect((Sum(name, name, amount),)) if amount else None
        case 3 if immediate:  # c.lui
            return Effect((Sum(name, "", immediate << 12),))
    return None


def _of_quadrant_2(word: int) -> Effect | None:
    number, source = word >> 7 & 31, word >> 2 & 31
    match word >> 13:
        case 3 if number:  # c.ldsp
            offset = _gathered(word, (12, 1, 5), (5, 2, 3), (2, 3, 6))
            return Effect(loads=(Load(_name(number), _STACK, offset, _WORD),))
        case 4 if source and not word >> 12 & 1:  # c.mv
            return Effect((Sum(_name(number), _name(source), 0),))
        case 7:  # c.sdsp
            offset = _gathered(word, (10, 3, 3), (7, 3, 6))
            return Effect(stores=(Store(_name(source), _STACK, offset, _WORD),))
    return None
