"""
Instructions of a module: decoding, boundaries, and possible places of probepoints.

Instructions of x86 are decoded by iced-x86, others by ``foreign_instructions``. This module works on the file, never on
a running process.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left
from enum import Enum
from functools import cache, partial
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.errors import TargetError
from dprobes.target.probed_module import FunctionCode, InstructionStarts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from iced_x86 import Instruction

    from dprobes.target.probed_module import Module

__all__ = [
    "MAX_LENGTH",
    "Boundary",
    "BoundaryCheck",
    "DecodedInstruction",
    "check_boundary",
    "decode",
    "decode_at",
    "disassemble",
    "disassemble_around",
    "first_instructions",
    "instruction_at",
    "instruction_starts",
    "instructions_between",
    "is_x86",
    "prepare_decoder",
    "registers_written",
    "unprobeable",
]

# The decoder (iced-x86), imported without its forty modules of names. The package's ``__init__`` imports a module for
# each of its enumerations, which takes four times as long as loading the machine code that decodes; a run needs two of
# them. So the package object is made here from its machine code, and its other modules are imported at their first use.
# For other importers it is the same package.


_PACKAGE = "iced_x86"
_MACHINE_CODE = f"{_PACKAGE}._iced_x86_py"

_MEMORY = 16 << 20
"""Memory in bytes that must be free before the import. The decoder's library and its tables take 13 MiB."""


def prepare_decoder() -> None:
    """
    Make ``from iced_x86 import ...`` import only the given names.

    Raise ``MemoryError`` if there is too little memory, because the decoder's Rust code would abort the process.
    """
    if _PACKAGE in sys.modules:
        return
    try:
        mmap.mmap(-1, _MEMORY).close()  # the pages are not touched, which would take milliseconds
    except OSError:
        raise MemoryError from None
    spec = PathFinder.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return  # its importer gets the error
    package = _Package(_PACKAGE)
    package.__spec__, package.__loader__ = spec, spec.loader
    package.__path__ = spec.submodule_search_locations
    package.__file__, package.__package__ = spec.origin, _PACKAGE
    sys.modules[_PACKAGE] = package
    try:
        import_module(_MACHINE_CODE)
    except BaseException:
        del sys.modules[_PACKAGE]
        raise


class _Package(ModuleType):
    """The package ``iced_x86``, whose modules and other names are imported at their first use."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._whole(name)
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found: Any = import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError:
            # The machine code has attributes with the names of modules, too, which hide the modules.
            found = getattr(sys.modules[_MACHINE_CODE], name, None)
        if found is None:
            return self._whole(name)
        setattr(self, name, found)
        return found

    def _whole(self, name: str) -> Any:
        """Execute the package's ``__init__`` after all, and return the value of a name."""
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


MAX_LENGTH = 15
"""Maximum size of an instruction in bytes (Intel SDM volume 2, 2.3.11)."""
_CHUNK = 4096  # bytes decoded at once
_BITS = {"i386": 32, "x86_64": 64}
_BAD = "(bad)"

_UNPROBEABLE = {
    **dict.fromkeys(("int3", "brk", "ebreak", "c.ebreak", "trap"), "it is a breakpoint instruction itself"),
    "int1": "it raises a debug exception itself",
    "int": "it is a software interrupt",
    "into": "it may raise a software interrupt",
    "fwait": "it only waits for a pending floating-point exception",
    _BAD: "it is not a valid instruction",
}


class DecodedInstruction(NamedTuple):
    """
    Instruction of a module, with its link address and file offset.

    ``text`` is in lower case, for x86 in Intel syntax. ``opcode_byte`` is the first byte, even if that is a prefix. An
    invalid instruction has the mnemonic ``(bad)``.
    """

    address: int
    length: int
    raw: bytes
    text: str
    opcode_byte: int
    mnemonic: str
    offset: int


class Boundary(Enum):
    """The position of a file offset: at the start of an instruction, inside one, or unknown."""

    ON_BOUNDARY = "on boundary"
    INSIDE = "inside"
    UNKNOWN = "unknown"


class BoundaryCheck(NamedTuple):
    """
    The position of a file offset relative to the instructions around it.

    ``before`` and ``after`` are the file offsets of the instruction around it and of the next. Both are None unless the
    offset is inside an instruction.
    """

    status: Boundary
    before: int | None = None
    after: int | None = None


_ON_BOUNDARY = BoundaryCheck(Boundary.ON_BOUNDARY)


def is_x86(module: Module) -> bool:
    """Return True if a module is for i386 or x86-64; raise ``TargetError`` if its processor is not supported."""
    return _bits(module) is not None


def decode_at(module: Module, file_offset: int) -> DecodedInstruction:
    """Decode the instruction at a file offset, assuming that an instruction starts there."""
    return next(first_instructions(module, (file_offset,)))


def first_instructions(module: Module, file_offsets: Iterable[int]) -> Iterator[DecodedInstruction]:
    """
    Iterate over the instructions at file offsets, assuming that an instruction starts at each.

    This takes little time even for thousands of offsets. The iteration raises ``TargetError`` for an offset outside of
    code.
    """
    bits = _bits(module)
    if bits is None:
        yield from (_foreign_at(module, offset) for offset in file_offsets)
        return
    prepare_decoder()
    from iced_x86 import Decoder

    describe = _describer()
    elf = module.elf
    for offset in file_offsets:
        data = elf.data[offset : min(offset + MAX_LENGTH, _code_end(module, offset))]
        if not data:
            raise TargetError(f"'{module.path}' does not hold the instruction at offset {offset:#x}")
        instruction = Decoder(bits, data, ip=module.elf.link_address(offset) or 0).decode()
        yield describe(instruction, offset, data[: max(1, instruction.len)])


def decode(data: bytes, bits: int, address: int, offset: int = 0) -> Iterator[DecodedInstruction]:
    """Iterate over the instructions in ``data``. ``address`` and ``offset`` belong to the first one."""
    prepare_decoder()
    from iced_x86 import Decoder

    describe = _describer()
    position = 0
    for instruction in Decoder(bits, data, ip=address):
        length = max(1, instruction.len)
        yield describe(instruction, offset + position, data[position : position + length])
        position += length


def instruction_starts(module: Module, start: int, end: int) -> set[int]:
    """Return the link addresses at which instructions start, decoding from ``start`` to ``end`` (excluded)."""
    if _bits(module) is not None:
        return {instruction.ip for instruction, _, _ in instructions_between(module, start, end)}
    offset = module.elf.file_offset(start)
    if offset is None:
        return set()
    return {each - offset + start for each in _foreign_starts(module, offset, offset + end - start).starts}


def instructions_between(module: Module, start: int, end: int) -> Iterator[tuple[Instruction, int, bytes]]:
    """Iterate over the x86 instructions from link address ``start`` to ``end`` (excluded): with file offset, bytes."""
    offset = module.elf.file_offset(start)
    if offset is not None:
        for found in _instructions(module, offset):
            if found[0].ip >= end:
                return
            yield found


def registers_written(module: Module, start: int, end: int) -> frozenset[str] | None:
    """
    Return the names of the full registers that the instructions between two link addresses write.

    Return None if one of them may branch or is not valid.
    """
    from iced_x86 import FlowControl, InstructionInfoFactory, OpAccess, Register, RegisterExt

    names = {number: name.lower() for name, number in vars(Register).items() if isinstance(number, int)}
    reading = (OpAccess.NONE, OpAccess.READ, OpAccess.COND_READ, OpAccess.NO_MEM_ACCESS)
    factory = InstructionInfoFactory()
    found: set[str] = set()
    for instruction, _, _ in instructions_between(module, start, end):
        if instruction.flow_control != FlowControl.NEXT:
            return None
        for used in factory.info(instruction).used_registers():
            if used.access not in reading:
                name = names[RegisterExt.full_register(used.register)]
                found.add(f"x{name[1:]}" if name[1:3] == "mm" else name)
    return frozenset(found)


def check_boundary(module: Module, file_offset: int) -> BoundaryCheck:
    """Return the position of ``file_offset`` relative to instructions, by decoding from the start of its function."""
    function = _function_around(module, file_offset)
    preceding = None if function is None else function.last_before(file_offset)
    if preceding is None:
        return BoundaryCheck(Boundary.UNKNOWN)
    start, end = preceding
    return BoundaryCheck(Boundary.INSIDE, start, end) if end > file_offset else _ON_BOUNDARY


def disassemble(module: Module, start_offset: int, count: int) -> list[DecodedInstruction]:
    """Return ``count`` instructions from a file offset on, or fewer if the code ends before."""
    found = []
    if count > 0:
        for decoded in _decode(module, start_offset):
            found.append(decoded)
            if len(found) >= count:
                break
    return found


def disassemble_around(module: Module, file_offset: int, before: int, after: int) -> list[DecodedInstruction]:
    """
    Return the instruction that contains ``file_offset``, and the instructions around it.

    There are up to ``before`` instructions before it, from the same function, and up to ``after`` after it. If no
    function is known, the first instruction is the one at ``file_offset``.
    """
    function = _function_around(module, file_offset)
    preceding = [] if function is None else function.starts_before(file_offset) or []
    start = file_offset
    if function is not None and preceding and function.end_of(preceding[-1]) > file_offset:
        start, preceding = preceding[-1], preceding[:-1]
    first = preceding[max(0, len(preceding) - before)] if preceding and before > 0 else start
    return disassemble(module, first, min(len(preceding), max(0, before)) + 1 + max(0, after))


def unprobeable(decoded: DecodedInstruction) -> str | None:
    """
    Return the reason why an instruction cannot carry a probepoint, a clause with the subject "it".

    Return None if it can.
    """
    return _UNPROBEABLE.get(decoded.mnemonic)


def _function_around(module: Module, file_offset: int) -> FunctionCode | None:
    """Return the code of the function that covers a file offset, or None if no function is known there."""
    _bits(module)
    _code_end(module, file_offset)
    start = module.function_start(file_offset)
    offset = module.elf.file_offset(start) if start is not None else None
    if offset is None or offset > file_offset:
        return None
    if offset not in module.decoded:
        starts = _foreign_starts if _bits(module) is None else _x86_starts
        module.decoded[offset] = FunctionCode(offset, partial(starts, module))
    return module.decoded[offset]


def _x86_starts(module: Module, start: int, limit: int) -> InstructionStarts:
    """Return the instructions of x86 from file offset ``start`` on that start before ``limit``."""
    prepare_decoder()
    from iced_x86 import Code, Decoder

    bits = _bits(module)
    assert bits is not None, "the caller has made sure that it is x86"
    data = module.elf.data[start : min(limit + MAX_LENGTH, _code_end(module, start))]
    # Only the lengths are needed, so the file offset serves as the address.
    found = [(each.ip, each.code) for each in Decoder(bits, data, ip=start)]
    starts = [at for at, _ in found]
    count = bisect_left(starts, limit)
    end = starts[count] if count < len(starts) else start + len(data)
    del starts[count:]
    return InstructionStarts(starts, end, next((at for at, code in found[:count] if code == Code.INVALID), None))


def _foreign_starts(module: Module, start: int, limit: int) -> InstructionStarts:
    """Return the instructions of other processors from file offset ``start`` on that start before ``limit``."""
    from dprobes.target.code.foreign_instructions import LENGTH_MAX, instruction_length

    end, at, starts, invalid = _code_end(module, start), start, [], None
    while at < min(end, limit):
        starts.append(at)
        data = module.elf.data[at : min(end, at + LENGTH_MAX)]
        length = instruction_length(module.elf.machine, data, module.elf.link_address(at) or 0)
        if length is None and invalid is None:
            invalid = at
        at += length or 1
    return InstructionStarts(starts, at, invalid)


def _foreign_at(module: Module, offset: int) -> DecodedInstruction:
    """Return the instruction at a file offset, of a processor other than x86."""
    from dprobes.target.code.foreign_instructions import LENGTH_MAX, instruction_length, instruction_text

    data = module.elf.data[offset : min(offset + LENGTH_MAX, _code_end(module, offset))]
    if not data:
        raise TargetError(f"'{module.path}' does not hold the instruction at offset {offset:#x}")
    machine, address = module.elf.machine, module.elf.link_address(offset) or 0
    length = instruction_length(machine, data, address)
    if length is None:
        return DecodedInstruction(address, 1, data[:1], _BAD, data[0], _BAD, offset)
    mnemonic, text = instruction_text(machine, data[:length], address)
    return DecodedInstruction(address, length, data[:length], text, data[0], mnemonic, offset)


def _decode(module: Module, start_offset: int) -> Iterator[DecodedInstruction]:
    """Iterate over the instructions from ``start_offset`` on, with their text."""
    if _bits(module) is None:
        found = _foreign_starts(module, start_offset, _code_end(module, start_offset))
        return (_foreign_at(module, offset) for offset in found.starts)
    describe = _describer()
    return (describe(*found) for found in _instructions(module, start_offset))


@cache
def _describer() -> Callable[[Instruction, int, bytes], DecodedInstruction]:
    """Return a function that describes an instruction from iced-x86, with its file offset and its bytes."""
    from iced_x86 import FormatMnemonicOptions, Formatter, FormatterSyntax

    formatter = Formatter(FormatterSyntax.INTEL)
    formatter.hex_prefix = "0x"
    formatter.hex_suffix = ""
    formatter.uppercase_hex = False
    formatter.small_hex_numbers_in_decimal = False
    formatter.branch_leading_zeros = False
    formatter.show_branch_size = False
    formatter.rip_relative_addresses = True
    formatter.space_after_operand_separator = True

    def describe(instruction: Instruction, offset: int, raw: bytes) -> DecodedInstruction:
        bad = instruction.is_invalid
        mnemonic = formatter.format_mnemonic(instruction, FormatMnemonicOptions.NO_PREFIXES)
        return DecodedInstruction(
            address=instruction.ip,
            length=len(raw),
            raw=raw,
            text=_BAD if bad else formatter.format(instruction),
            opcode_byte=raw[0],
            mnemonic=_BAD if bad else mnemonic,
            offset=offset,
        )

    return describe


def _instructions(module: Module, start_offset: int) -> Iterator[tuple[Instruction, int, bytes]]:
    """Iterate over the instructions from ``start_offset`` to the end of its segment, with file offset and bytes."""
    prepare_decoder()
    from iced_x86 import Decoder

    bits = _bits(module)
    assert bits is not None, "the caller has made sure that it is x86"
    end = _code_end(module, start_offset)
    position = start_offset
    while position < end:
        base = position
        data = module.elf.data[base : min(end, base + _CHUNK)]
        decoder = Decoder(bits, data, ip=module.elf.link_address(base) or 0)
        # The last instructions of a chunk may be cut off: they are decoded again at the start of the next one.
        limit = end if base + len(data) >= end else base + len(data) - MAX_LENGTH
        while position < limit:
            instruction = decoder.decode()
            length = max(1, instruction.len)
            yield instruction, position, data[position - base : position - base + length]
            position += length


def _bits(module: Module) -> int | None:
    """
    Return the mode of x86, or None for a processor of ``foreign_instructions``.

    Raise ``TargetError`` for any other processor.
    """
    machine = module.elf.machine
    bits = _BITS.get(machine)
    if bits is not None:
        return bits
    from dprobes.target.code.foreign_instructions import FOREIGN_MACHINES

    if machine not in FOREIGN_MACHINES:
        known = ", ".join((*_BITS, *FOREIGN_MACHINES))
        raise TargetError(f"instructions of {machine} cannot be decoded, only those of {known}")
    return None


def _code_end(module: Module, file_offset: int) -> int:
    end = module.elf.code_end(file_offset)
    if end is not None:
        return end
    raise TargetError(f"file offset 0x{file_offset:x} of '{module.path}' is not in its code")


class ProbedInstruction(NamedTuple):
    """
    The instruction at a place.

    ``certain`` is False if it is not known that an instruction starts there, or that there is code at all.
    """

    decoded: DecodedInstruction
    certain: bool


def instruction_at(module: Module, offset: int) -> ProbedInstruction:
    """
    Return the instruction at a file offset, at which a probepoint is wanted.

    Raise ``TargetError`` if no instruction can start there.
    """
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
    """Raise ``TargetError`` if a function starts inside the decoded bytes, which are padding before it then."""
    for distance in range(1, decoded.length):
        symbol = module.symbol_at(decoded.offset + distance)
        if symbol is not None and symbol[1] == 0:
            raise TargetError(
                f"offset {decoded.offset:#x} of '{module.path}' is between functions, not in one",
                hint=f"'{symbol[0]}' starts at {decoded.offset + distance:#x}",
            )
