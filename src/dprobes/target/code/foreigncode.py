"""
Instructions of processors other than x86: how long each is, and how it reads.

Lengths are in the first bytes of an instruction, by rules that no extension of the processor changes, and so are
certain. The text is capstone's, where that is installed and knows the instruction; else it is the bytes.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FOREIGN_MACHINES", "LENGTH_MAX", "ForeignText", "disassembler", "instruction_length", "instruction_text"]

LENGTH_MAX = 6
"""How many bytes an instruction of these processors has at most."""


class ForeignText(NamedTuple):
    """An instruction as people read it."""

    mnemonic: str
    text: str


class _Machine(NamedTuple):
    """
    A processor: how long an instruction is that begins with some bytes, and how capstone calls it.

    ``unit`` is what all instructions are a multiple of, and where they begin.
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
"""The processors whose instructions are known here, as ``ElfFile.machine`` names them."""


def instruction_length(machine: str, data: bytes, address: int) -> int | None:
    """
    Return how long the instruction is that ``data`` begins with, None if none can be at its address.

    Zeros are an instruction of none of these processors.
    """
    known = _MACHINES[machine]
    if len(data) < known.unit or address % known.unit:
        return None
    length = known.length(data)
    return length if length <= len(data) and any(data[:length]) else None


def instruction_text(machine: str, raw: bytes, address: int) -> ForeignText:
    """Return how an instruction reads."""
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
    """Return capstone's disassembler for a processor; raise ``TargetError`` if capstone is not installed."""
    try:
        capstone = importlib.import_module("capstone")
    except ImportError:
        raise TargetError(
            f"instructions of {machine} need capstone to be taken apart", hint="pip install 'dprobes[processors]'"
        ) from None
    known = _MACHINES[machine]
    return capstone.Cs(getattr(capstone, known.family), sum(getattr(capstone, mode) for mode in known.modes))
