"""
Port instructions of x86 (``in``, ``out``, ``ins``, ``outs``) in code: their ports, widths and directions.

The port is an immediate operand or in the register ``dx``. Code is decoded from the start of each function, because a
byte that looks like a port instruction is usually a part of another instruction.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.target.code.machine_code import prepare_decoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from iced_x86 import Instruction

__all__ = ["PortAccess", "PortRange", "port_accesses"]

_OPCODES = re.compile(rb"[\x6c-\x6f\xe4-\xe7\xec-\xef]")
"""A byte with which the opcode of every port instruction begins."""

_NAMES = {
    "IN_{}_IMM8": (False, True),
    "IN_{}_DX": (False, False),
    "OUT_IMM8_{}": (True, True),
    "OUT_DX_{}": (True, False),
}
_REGISTERS = {"AL": 1, "AX": 2, "EAX": 4}
_STRINGS = {
    "INSB_M8_DX": (False, 1), "INSW_M16_DX": (False, 2), "INSD_M32_DX": (False, 4),
    "OUTSB_DX_M8": (True, 1), "OUTSW_DX_M16": (True, 2), "OUTSD_DX_M32": (True, 4),
}  # fmt: skip
"""String instructions by their names in iced-x86: True if the instruction is an output, and its width in bytes."""


class PortAccess(NamedTuple):
    """
    Access of a port instruction, which transfers ``width`` bytes.

    If ``port`` is None, the register ``dx`` has the port. ``count_size`` is the size in bytes of the register that
    counts repetitions (``cx``, ``ecx``, ``rcx``), or 0 for an instruction without repetition.
    """

    is_output: bool
    width: int
    port: int | None = None
    count_size: int = 0


class PortRange(NamedTuple):
    """
    I/O ports from ``first`` to ``last`` (included).

    An access touches them if one of its bytes is at one of these ports.
    """

    first: int
    last: int

    def may_be_touched(self, access: PortAccess) -> bool:
        """Return False if the access has an immediate port elsewhere, so that it cannot touch the ports."""
        return access.port is None or access.port in self.ports_of(access.width)

    def ports_of(self, width: int) -> range:
        """Return the ports at which an access of ``width`` bytes touches the range."""
        return range(max(0, self.first - width + 1), self.last + 1)


def port_accesses(code: bytes, bits: int, address: int) -> Iterator[tuple[int, bytes, PortAccess]]:
    """
    Iterate over the port instructions in code: position, bytes and access of each.

    The code must begin with an instruction, and is at ``address``. ``bits`` is the mode of the processor, 32 or 64.
    """
    if _OPCODES.search(code) is None:
        return
    prepare_decoder()
    from iced_x86 import Decoder
    from iced_x86 import Instruction as Decoded

    known = _known_codes()
    decoder, instruction = Decoder(bits, code, ip=address), Decoded()
    decode = decoder.decode_out
    while decoder.can_decode:
        decode(instruction)
        if (found := known.get(instruction.code)) is not None:
            position = decoder.position - instruction.len
            yield position, code[position : decoder.position], _access(instruction, *found)


@cache
def _known_codes() -> Mapping[int, tuple[bool, int, bool]]:
    """Return direction (True: output), width and whether the port is an immediate, by iced-x86's instruction code."""
    from iced_x86 import Code

    known = {
        getattr(Code, name.format(register)): (is_output, width, is_immediate)
        for name, (is_output, is_immediate) in _NAMES.items()
        for register, width in _REGISTERS.items()
    }
    return known | {getattr(Code, name): (is_output, width, False) for name, (is_output, width) in _STRINGS.items()}


def _access(instruction: Instruction, is_output: bool, width: int, is_immediate: bool) -> PortAccess:
    port = instruction.immediate8 if is_immediate else None
    is_repeated = instruction.has_rep_prefix or instruction.has_repne_prefix
    return PortAccess(is_output, width, port, _count_size(instruction) if is_repeated else 0)


def _count_size(instruction: Instruction) -> int:
    """Return the size in bytes of a string instruction's count, which is its address size."""
    from iced_x86 import OpKind

    sizes = {
        OpKind.MEMORY_ESDI: 2, OpKind.MEMORY_SEG_SI: 2, OpKind.MEMORY_ESEDI: 4, OpKind.MEMORY_SEG_ESI: 4,
        OpKind.MEMORY_ESRDI: 8, OpKind.MEMORY_SEG_RSI: 8,
    }  # fmt: skip
    return sizes.get(instruction.op0_kind) or sizes.get(instruction.op1_kind) or 0
