"""The memory that an instruction of x86 writes, computed from its bytes and the registers before it."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.linux.ptrace_calls import Register

if TYPE_CHECKING:
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["written_memory"]

_GENERAL = ("AX", "BX", "CX", "DX", "SI", "DI", "BP", "SP")
_INDICES = {
    **{f"R{name}": int(Register[f"R{name}"]) for name in _GENERAL},
    **{f"R{number}": int(Register[f"R{number}"]) for number in range(8, 16)},
}
_SEGMENTS = {"FS": int(Register.FS_BASE), "GS": int(Register.GS_BASE)}


class _Operand(NamedTuple):
    """Written operand: indices of its registers (-1 for none), and its size in bytes."""

    segment: int
    base: int
    other: int
    scale: int
    displacement: int
    mask: int
    size: int


def written_memory(raw: bytes, registers: RegisterWords, word_size: int) -> list[tuple[int, int]] | None:
    """
    Return (address, size) of each range of memory that the instruction at the start of ``raw`` will write.

    ``registers`` are the values before it is executed. For a repeated string instruction, the range is one element.
    Return None if the ranges cannot be computed: the instruction is unknown, has a mask, scatters, or saves a state of
    variable size.
    """
    pc = registers[Register.RIP]
    operands = _operands(raw, pc, word_size)
    if operands is None:
        return None
    last = (1 << 8 * word_size) - 1
    found = []
    for segment, base, index, scale, displacement, mask, size in operands:
        address = displacement
        if base >= 0:
            address += registers[base] & mask
        if index >= 0:
            address += (registers[index] & mask) * scale
        address &= mask
        if segment >= 0:
            address += registers[segment]
        found.append((address & last, size))
    return found


@lru_cache(maxsize=4096)
def _operands(raw: bytes, pc: int, word_size: int) -> tuple[_Operand, ...] | None:
    from dprobes.target.code.machine_code import prepare_decoder

    prepare_decoder()
    from iced_x86 import Decoder, InstructionInfoFactory, MemorySizeExt, OpAccess

    instruction = Decoder(8 * word_size, raw, ip=pc).decode()
    if instruction.is_invalid or instruction.op_mask:
        return None
    instruction.has_rep_prefix = instruction.has_repne_prefix = False  # one element
    names = _names()
    writing = (OpAccess.WRITE, OpAccess.COND_WRITE, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)
    found = []
    for used in InstructionInfoFactory().info(instruction).used_memory():
        if used.access not in writing:
            continue
        size = MemorySizeExt.size(used.memory_size)
        parts = [names.get(number, "?") if number else "" for number in (used.base, used.index)]
        wide = any(name and not name.startswith("E") for name in parts) or (word_size == 8 and not any(parts))
        indices = [_INDICES.get("R" + name.lstrip("RE") if name else "", -1) for name in parts]
        is_known = all(bool(name) == (index >= 0) for name, index in zip(parts, indices, strict=True))
        if not size or used.vsib_size or not is_known:
            return None
        segment = _SEGMENTS.get(names.get(used.segment, ""), -1) if used.segment else -1
        mask = (1 << 64) - 1 if wide else (1 << 32) - 1
        base, index = indices
        found.append(_Operand(segment, base, index, used.scale, used.displacement, mask, size))
    return tuple(found)


@lru_cache(maxsize=1)
def _names() -> dict[int, str]:
    from iced_x86 import Register as Number

    return {number: name for name, number in vars(Number).items() if isinstance(number, int)}
