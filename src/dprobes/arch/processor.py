"""Data structures of a processor description. The descriptions are in other modules of this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Architecture", "ByteOrder", "Direction", "Register", "RegisterClass", "parse_register_table"]

ByteOrder = Literal["little", "big"]


class Direction(Enum):
    """The way in which a handler accesses a register: the four columns of registers in the man page's appendices."""

    PUSH_USER = "push u"
    PUSH_CURRENT = "push r"
    POP_USER = "pop u"
    POP_CURRENT = "pop r"


class RegisterClass(Enum):
    """Classes of registers, each of which an engine supports as a whole. The values are headings in tables."""

    GENERAL = "general"
    SEGMENT = "segment"
    FLOATING_POINT = "floating point"
    CPUID = "cpuid"
    SYSTEM = "system"
    ACCESS = "checked access"


@dataclass(frozen=True, slots=True)
class Register:
    """
    Register that handlers can access, as an appendix of the man page lists it.

    ``index`` is the number in encoded RPN. ``bits`` is the width of the value, which takes ``ceil(bits / word)`` cells,
    least significant on top. A register that consists of several values (``cpuid``, ``gdtr``) has ``parts`` cells for
    every word size. ``selector_cells`` cells are popped first to select a value: a leaf of ``cpuid``, or the number of
    an ``msr``. ``memory_offset`` marks a pseudo register in memory, an argument of i386: it is the distance above the
    stack pointer in bytes.
    """

    name: str
    index: int
    bits: int
    allowed: frozenset[Direction]
    kind: RegisterClass = RegisterClass.GENERAL
    parts: int = 0
    selector_cells: int = 0
    memory_offset: int | None = None

    @property
    def is_kept_at_entry(self) -> bool:
        """True if engines save the register's value at the entry of a function for ``push entry`` at the return."""
        return self.kind is RegisterClass.GENERAL

    def may_be(self, accessed: str) -> bool:
        """Return whether a handler may access the register by "push r", "pop u", ..., or "push entry"."""
        return self.is_kept_at_entry if accessed == "push entry" else Direction(accessed) in self.allowed

    def cells(self, word_size: int) -> int:
        """Return the number of stack cells of ``word_size`` bytes that a push leaves."""
        return self.parts or -(-self.bits // (8 * word_size))


@dataclass(frozen=True)
class Architecture:
    """
    The properties of a processor that the language depends on.

    ``word_size`` is in bytes. ``unprobeable`` maps the opcode bytes that can never carry a probe to their mnemonic (man
    page, "Probe-Point Header", ``opcode``).
    """

    name: str
    word_size: Literal[4, 8]
    byte_order: ByteOrder
    registers: tuple[Register, ...]
    aliases: Mapping[str, str] = field(repr=False)
    unprobeable: Mapping[int, str] = field(repr=False)
    convention: str = "C"
    """Language whose functions take their arguments in the registers of the aliases ``arg0`` and so on."""

    @property
    def word_bits(self) -> int:
        """The width of a stack cell in bits."""
        return 8 * self.word_size

    @property
    def word_mask(self) -> int:
        """The largest value of a stack cell."""
        return (1 << self.word_bits) - 1

    @cached_property
    def _by_name(self) -> dict[str, Register]:
        table = {register.name: register for register in self.registers}
        return table | {alias: table[name] for alias, name in self.aliases.items()}

    @cached_property
    def _by_index(self) -> dict[int, Register]:
        return {register.index: register for register in self.registers}

    def register(self, which: str | int) -> Register | None:
        """
        Return the register with a name, alias or index, or None if there is none.

        Names are in lower case. The index is that of the appendix.
        """
        return self._by_name.get(which) if isinstance(which, str) else self._by_index.get(which)

    @property
    def register_names(self) -> list[str]:
        """All names that a program may use, including aliases."""
        return list(self._by_name)


_COLUMNS = (Direction.PUSH_USER, Direction.PUSH_CURRENT, Direction.POP_USER, Direction.POP_CURRENT)


def parse_register_table(text: str) -> tuple[Register, ...]:
    """
    Return the registers of a table with the appendices' columns: index (hex), name, bits, and y/n per direction.

    A name ``r<0-15>`` stands for sixteen rows with consecutive indices. ``4*32`` as width means four parts, ``+1``
    after it one selector cell. A line ``system:`` is the class of the rows below it; the first ones are general. The
    result is in the order of the indices.
    """
    registers: list[Register] = []
    kind = RegisterClass.GENERAL
    for line in text.strip().splitlines():
        if line.endswith(":"):
            kind = RegisterClass(line.strip().removesuffix(":"))
            continue
        index, name, width, letters = line.split()
        width, _, selectors = width.partition("+")
        parts, _, bits = width.rpartition("*")
        allowed = frozenset(d for d, letter in zip(_COLUMNS, letters, strict=True) if letter == "y")
        stem, _, span = name.partition("<")
        first, _, last = span.rstrip(">").partition("-")
        names = [f"{stem}{n}" for n in range(int(first), int(last) + 1)] if span else [name]
        registers += [
            Register(each, int(index, 16) + n, int(bits), allowed, kind, int(parts or 0), int(selectors or 0))
            for n, each in enumerate(names)
        ]
    return tuple(sorted(registers, key=lambda register: register.index))
