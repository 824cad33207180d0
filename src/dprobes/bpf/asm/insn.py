"""One eBPF instruction, to bytes and back."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import CallKind, Class, Jump, LoadImmediate
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["CALL", "INSN_SIZE", "WIDE_LOAD", "Insn", "decode", "encode"]

_LAYOUT = struct.Struct("<BBhi")
INSN_SIZE = _LAYOUT.size

WIDE_LOAD = Class.LD | 0x18
"""The opcode of the 64-bit load (``lddw``), the only instruction of two slots: the second holds the upper half."""

CALL = Class.JMP | Jump.CALL
"""The opcode of calls."""


class Insn(NamedTuple):
    """
    Hold one instruction slot; ``off`` and ``imm`` are signed.

    The second slot of a 64-bit load is an instruction with opcode 0.
    """

    opcode: int
    dst: int = 0
    src: int = 0
    off: int = 0
    imm: int = 0

    @property
    def is_map_reference(self) -> bool:
        """Whether this is the first slot of a load of a map, or of an address in one."""
        return self.opcode == WIDE_LOAD and self.src in (LoadImmediate.MAP, LoadImmediate.MAP_VALUE)

    @property
    def is_local_call(self) -> bool:
        """Whether it calls a function of the program."""
        return self.opcode == CALL and self.src == CallKind.LOCAL

    @property
    def is_function_reference(self) -> bool:
        """Whether it calls a function of the program, or is the first slot of a load of the address of one."""
        return self.is_local_call or (self.opcode == WIDE_LOAD and self.src == LoadImmediate.FUNCTION)


def encode(instructions: Iterable[Insn]) -> bytes:
    """Return the bytes of instructions, for a little endian machine."""
    pack = _LAYOUT.pack
    return b"".join([pack(opcode, dst | src << 4, off, imm) for opcode, dst, src, off, imm in instructions])


def decode(data: bytes) -> Iterator[Insn]:
    """Iterate over the instruction slots in ``data``, whose length is a multiple of ``INSN_SIZE``."""
    for opcode, registers, off, imm in _LAYOUT.iter_unpack(data):
        yield Insn(opcode, registers & 0xF, registers >> 4, off, imm)
