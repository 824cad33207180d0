"""
Instructions of processors other than x86: length, disassembly, and effect.

The length follows from the first bytes of an instruction by rules that no extension of the processor changes, so it is
certain. The disassembly is capstone's if capstone is installed and can decode the instruction; otherwise it is the
bytes in hexadecimal.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "FOREIGN_MACHINES",
    "LENGTH_MAX",
    "MODES",
    "NOTHING",
    "Effect",
    "Load",
    "Store",
    "Sum",
    "effect_of",
    "instruction_length",
    "instruction_text",
]

LENGTH_MAX = 6
"""Maximum size in bytes of an instruction of these processors."""


class ForeignText(NamedTuple):
    """
    Disassembly of an instruction of a processor other than x86, by capstone.

    ``text`` is the mnemonic with the operands. If capstone is not installed or does not know the instruction, the
    mnemonic is ``.insn`` and the operand its bytes.
    """

    mnemonic: str
    text: str


class _Machine(NamedTuple):
    """
    Processor with the rule for the length of its instructions, and its names in capstone.

    The length is a function of the first bytes of an instruction. ``unit`` is the alignment of instructions in bytes.
    """

    length: Callable[[bytes], int]
    unit: int
    family: str
    modes: tuple[str, ...]


def _four(_: bytes) -> int:
    return 4


def _of_riscv(data: bytes) -> int:
    # Unprivileged ISA, section 1.5: the two lowest bits are ones in all but the compressed instructions.
    return 4 if data[0] & 3 == 3 else 2


def _of_s390(data: bytes) -> int:
    # z/Architecture Principles of Operation, "Instruction Formats": the two highest bits of the first byte.
    return (2, 4, 4, 6)[data[0] >> 6]


_ZARCH = _Machine(_of_s390, 2, "CS_ARCH_SYSZ", ("CS_MODE_BIG_ENDIAN",))

_MACHINES = {
    "aarch64": _Machine(_four, 4, "CS_ARCH_ARM64", ("CS_MODE_LITTLE_ENDIAN",)),
    "riscv64": _Machine(_of_riscv, 2, "CS_ARCH_RISCV", ("CS_MODE_RISCV64", "CS_MODE_RISCVC")),
    "s390": _ZARCH,
    "s390x": _ZARCH,
    "ppc": _Machine(_four, 4, "CS_ARCH_PPC", ("CS_MODE_32", "CS_MODE_BIG_ENDIAN")),
    "ppc64": _Machine(_four, 4, "CS_ARCH_PPC", ("CS_MODE_64", "CS_MODE_BIG_ENDIAN")),
}

FOREIGN_MACHINES = tuple(_MACHINES)
"""The supported processors, as ``ElfFile.machine`` names them."""


def instruction_length(machine: str, data: bytes, address: int) -> int | None:
    """
    Return the length in bytes of the instruction at the start of ``data``.

    Return None if ``address`` is not aligned, if ``data`` ends before the instruction does, or if the bytes are zeros,
    which no processor here has as an instruction.
    """
    known = _MACHINES[machine]
    if len(data) < known.unit or address % known.unit:
        return None
    length = known.length(data)
    return length if length <= len(data) and any(data[:length]) else None


def instruction_text(machine: str, raw: bytes, address: int) -> ForeignText:
    """Return the disassembly of the instruction ``raw`` at a link address, for the processor ``machine``."""
    try:
        decoder = disassembler(machine)
    except TargetError:
        decoder = None
    found = [] if decoder is None else list(decoder.disasm_lite(raw, address, 1))
    if not found or found[0][1] != len(raw):
        mnemonic = ".insn"
        return ForeignText(mnemonic, f"{mnemonic} 0x{raw.hex()}")
    _, _, mnemonic, operands = found[0]
    return ForeignText(mnemonic, f"{mnemonic} {operands}".rstrip())


@cache
def disassembler(machine: str) -> Any:
    """
    Return capstone's disassembler for a processor (``ElfFile.machine``).

    Raise ``TargetError`` if capstone is missing.
    """
    try:
        capstone = importlib.import_module("capstone")
    except ImportError:
        raise TargetError(
            f"instructions of {machine} need capstone to be taken apart", hint="pip install 'dprobes[processors]'"
        ) from None
    known = _MACHINES[machine]
    return capstone.Cs(getattr(capstone, known.family), sum(getattr(capstone, mode) for mode in known.modes))


# The effect of one instruction on registers and memory, computed from the values before it.


class Sum(NamedTuple):
    """
    Assignment of ``base`` plus ``addend`` to a register.

    An empty ``base`` is 0; an empty ``register`` discards the result.
    """

    register: str
    base: str
    addend: int


class Store(NamedTuple):
    """
    Store of the ``size`` lowest bytes of ``register`` at ``base`` plus ``displacement``.

    An empty ``register`` is 0.
    """

    register: str
    base: str
    displacement: int
    size: int


class Load(NamedTuple):
    """Load of ``size`` bytes at ``base`` plus ``displacement``. An empty ``register`` discards the result."""

    register: str
    base: str
    displacement: int
    size: int
    is_signed: bool = False


class Effect(NamedTuple):
    """Effect of an instruction that does not branch. All sums and addresses use the values of registers before it."""

    sums: Sequence[Sum] = ()
    stores: Sequence[Store] = ()
    loads: Sequence[Load] = ()


NOTHING = Effect()


def signed(value: int, bits: int) -> int:
    """Return the number whose two's complement is the lowest ``bits`` bits of a value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


# Instructions of AArch64: Arm Architecture Reference Manual, C4.1.92 (immediates) and C4.1.94 (loads and stores).


_AARCH64_NOP = 0xD503_201F
_PAGE = 4096
_ZERO = 31
"""Number of the zero register or, in some operands, of the stack pointer."""
_WORD = 8


def _general(number: int) -> str:
    return "" if number == _ZERO else f"x{number}"


def _or_stack(number: int) -> str:
    return "sp" if number == _ZERO else f"x{number}"


def aarch64_effect(raw: bytes, address: int) -> Effect | None:
    """Return the effect of an AArch64 instruction, or None if it is not supported."""
    word = int.from_bytes(raw, "little")
    if word == _AARCH64_NOP:
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
    """Return the effect of stp or ldp of two 64-bit registers, with or without writeback, or None for others."""
    if word & 0xFE00_0000 != 0xA800_0000 or not (kind := word >> 23 & 3):
        return None
    first, second, number = word & 31, word >> 10 & 31, word >> 5 & 31
    base, offset = _or_stack(number), signed(word >> 15, 7) * _WORD
    start = 0 if kind == 1 else offset
    changed = () if kind == 2 else (Sum(base, base, offset),)
    if changed and number in (first, second) and number != _ZERO:
        return None  # the manual leaves the result open
    if word >> 22 & 1:
        if first == second:
            return None
        names = _general(first), _general(second)
        return Effect(changed, loads=[Load(name, base, start + _WORD * n, _WORD) for n, name in enumerate(names)])
    names = _general(first), _general(second)
    return Effect(changed, stores=[Store(name, base, start + _WORD * n, _WORD) for n, name in enumerate(names)])


def _single(word: int) -> Effect | None:
    """Return the effect of str or ldr, with an unsigned offset, or of 64 bits with writeback, or None for others."""
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


# Instructions of PowerPC: Power ISA, book I, chapter 3 (fixed-point facility).


_POWER_NOP = 0x6000_0000  # ori r0, r0, 0


def power_effect(raw: bytes, word_size: int) -> Effect | None:
    """Return the effect of a PowerPC instruction for words of ``word_size`` bytes, or None if it is not supported."""
    word = int.from_bytes(raw, "big")
    if word == _POWER_NOP:
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


# Instructions of RISC-V, 64 bit: Unprivileged ISA, chapters 2 (RV32I), 5 (RV64I) and 16 (compressed).


_STACK = "x2"


def _name(number: int) -> str:
    return f"x{number}" if number else ""


def _short(bits: int) -> str:
    return f"x{8 + (bits & 7)}"


def _gathered(word: int, *places: tuple[int, int, int]) -> int:
    """
    Return a number from scattered bits.

    Each place is the lowest bit, the number of bits, and the bit to move them to.
    """
    return sum((word >> at & (1 << count) - 1) << to for at, count, to in places)


def riscv_effect(raw: bytes, address: int) -> Effect | None:
    """Return the effect of a RISC-V instruction, or None if it is not supported."""
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


# Instructions of zSeries: z/Architecture Principles of Operation, chapter 7 (general instructions).


def zseries_effect(raw: bytes, address: int) -> Effect | None:
    """Return the effect of an s390x instruction in 64-bit addressing mode, or None if it is not supported."""
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
    """Return the only register of an address, "" for an address without registers, or None if it has two."""
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


class Mode(NamedTuple):
    """Mode of a processor in which ``effect_of`` is correct. The processor is in it if ``register & mask == value``."""

    register: str
    mask: int
    value: int


MODES = {
    "aarch64": (Mode("pstate", 0xC00, 0),),  # BTYPE: after an indirect branch some instructions raise an exception
    "riscv64": (),
    "ppc": (),
    "ppc64": (),
    "s390x": (Mode("pswmask", 0x1_8000_0000, 0x1_8000_0000),),  # 64-bit addresses
}
"""The supported processors, and the modes that ``effect_of`` requires of each."""


def effect_of(machine: str, raw: bytes, address: int) -> Effect | None:
    """Return the effect of an instruction, or None if it is not supported."""
    match machine:
        case "aarch64":
            return aarch64_effect(raw, address)
        case "riscv64":
            return riscv_effect(raw, address)
        case "ppc" | "ppc64":
            return power_effect(raw, 8 if machine == "ppc64" else 4)
        case "s390x":
            return zseries_effect(raw, address)
    return None
