"""An offset in a module's file as a place for a probepoint: code, at the start of an instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple
from dprobes.target.code.instructions import Boundary, DecodedInstruction, check_boundary, decode_at

if TYPE_CHECKING:
    from dprobes.target.location import Module

__all__ = ["ProbedInstruction", "instruction_at"]


class ProbedInstruction(NamedTuple):
    """
    Hold the instruction at a place.

    ``certain`` is False where nothing tells whether an instruction starts there, or that there is code at all.
    """

    decoded: DecodedInstruction
    certain: bool


def instruction_at(module: Module, offset: int) -> ProbedInstruction:
    """Return the instruction at a file offset; raise ``TargetError`` if it is no place where one starts."""
    if not module.elf.is_executable_offset(offset):
        raise _not_code(module, offset)
    if not module.is_known_code(offset):
        decoded = decode_at(module, offset)
        _refuse_padding(module, decoded)
        return ProbedInstruction(decoded, certain=False)
    boundary = check_boundary(module, offset)
    if boundary.status is Boundary.INSIDE:
        raise TargetError(
            f"offset {offset:#x} is inside an instruction of '{module.path}'",
            hint=f"instructions start at {boundary.before:#x} and {boundary.after:#x}",
        )
    decoded = decode_at(module, offset)
    certain = boundary.status is Boundary.ON_BOUNDARY or decoded.address == module.elf.entry
    if not certain:
        _refuse_padding(module, decoded)
    return ProbedInstruction(decoded, certain)


def _not_code(module: Module, offset: int) -> TargetError:
    meant = module.elf.file_offset(offset)
    hint = None
    if meant is not None and module.elf.is_executable_offset(meant):
        hint = f"{offset:#x} is a link address; its file offset is {meant:#x}"
    return TargetError(f"offset {offset:#x} is not in the code of '{module.path}'", hint=hint)


def _refuse_padding(module: Module, decoded: DecodedInstruction) -> None:
    """Raise if a function starts within the bytes that decode as one instruction: they are padding before it."""
    for distance in range(1, decoded.length):
        symbol = module.symbol_at(decoded.offset + distance)
        if symbol is not None and symbol[1] == 0:
            raise TargetError(
                f"offset {decoded.offset:#x} of '{module.path}' is between functions, not in one",
                hint=f"'{symbol[0]}' starts at {decoded.offset + distance:#x}",
            )
