"""
Accesses of x86-64 instructions to memory, apart from the stack: operand, size and direction of each.

The address of most accesses is the sum of registers and a displacement, so that one instruction (``lea``) computes it.
A repeated string instruction accesses several elements from ``rsi`` or ``rdi`` on. All other instructions have a reason
why their address cannot be compared with a range: ``OtherMemory`` is the list of these reasons.
"""

from __future__ import annotations

from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dprobes.target.code.machine_code import prepare_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from iced_x86 import Instruction

__all__ = ["MemoryAccess", "OtherMemory", "StringAccess", "accesses_in", "memory_access"]

_BITS = 64
_DISPLACEMENT_MAX = (1 << 31) - (1 << 12)
"""Maximum displacement of an operand to which the size of a frame can be added."""


class OtherMemory(Enum):
    """Reason why the memory of an instruction is not compared with a range; the value is a noun phrase."""

    STACK = "instructions whose operand is on the stack"
    THREAD = "instructions that access memory of the thread (fs, gs)"
    SCATTERED = "instructions that access several places (gather, scatter)"
    MASKED = "instructions that access elements by a mask"
    BIT = "instructions that access the bit with a number"
    NARROW = "instructions with addresses of 32 bits"
    UNKNOWN = "instructions whose operand has no fixed size or no usual address (xsave, xlatb)"


class MemoryAccess(NamedTuple):
    """
    Access to ``size`` bytes at the sum of registers, given by their names, and a displacement.

    An empty name stands for no register. With ``is_relative``, the displacement is a link address of the module.
    """

    base: str
    index_register: str
    scale: int
    displacement: int
    is_relative: bool
    size: int
    reads: bool
    writes: bool

    def address(self, register: Callable[[str], int], bias: int) -> int:
        """Return the address, from the values of registers and the load bias of the module."""
        found = self.displacement + (bias if self.is_relative else 0)
        if self.base:
            found += register(self.base)
        if self.index_register:
            found += register(self.index_register) * self.scale
        return found & (1 << _BITS) - 1


class StringAccess(NamedTuple):
    """
    Access of a string instruction to elements of ``size`` bytes, from ``rsi`` on if it ``reads_source``.

    It reads or writes elements from ``rdi`` on with ``reads_target`` and ``writes_target``. With ``repeats``, ``rcx``
    is the number of elements, or the greatest possible one with ``may_stop``.
    """

    size: int
    reads_source: bool
    reads_target: bool
    writes_target: bool
    repeats: bool
    may_stop: bool


_STRINGS = {
    "movs": (True, False, True),
    "cmps": (True, True, False),
    "lods": (True, False, False),
    "scas": (False, True, False),
    "stos": (False, False, True),
    "outs": (True, False, False),
    "ins": (False, False, True),
}
"""String instructions: whether they read from rsi, read from rdi, and write to rdi."""

_SUFFIXES = {"b": 1, "w": 2, "d": 4, "q": 8}

_BIT_STRINGS = ("bt", "bts", "btr", "btc")

_SECOND_MEMORY = ("movdir64b", "enqcmd", "enqcmds")
"""Instructions that also write to memory at the address in their register operand."""


@lru_cache(1 << 14)
def memory_access(raw: bytes, address: int) -> MemoryAccess | StringAccess | OtherMemory | None:
    """Return the access of the instruction at a link address, or why it has no address; None: it accesses nothing."""
    prepare_decoder()
    from iced_x86 import Decoder

    return _access_of(Decoder(_BITS, raw, ip=address).decode())


def accesses_in(code: bytes, address: int) -> Iterator[tuple[int, bytes, MemoryAccess | StringAccess | OtherMemory]]:
    """Iterate over the instructions of code that access memory: link address, bytes and access of each."""
    prepare_decoder()
    from iced_x86 import Decoder
    from iced_x86 import Instruction as Decoded

    decoder, instruction = Decoder(_BITS, code, ip=address), Decoded()
    decode = decoder.decode_out
    while decoder.can_decode:
        decode(instruction)
        found = _access_of(instruction)
        if found is not None:
            position = decoder.position - instruction.len
            yield instruction.ip, code[position : decoder.position], found


def _access_of(instruction: Instruction) -> MemoryAccess | StringAccess | OtherMemory | None:
    numbers = _numbers()
    kinds = [instruction.op_kind(number) for number in range(instruction.op_count)]
    if numbers.memory not in kinds:
        return None if numbers.strings.isdisjoint(kinds) else _string_access(instruction)
    code = instruction.code
    if (directions := numbers.directions.get(code)) is None:
        directions = numbers.directions[code] = _directions(instruction, kinds)
    reads, writes = directions
    if not reads and not writes:
        return None  # lea, nop, prefetch
    if (reason := _obstacle(instruction, kinds)) is not None:
        return reason
    is_relative = instruction.is_ip_rel_memory_operand
    displacement = instruction.ip_rel_memory_address if is_relative else instruction.memory_displacement
    displacement -= displacement >> 63 << 64
    form = (code, instruction.is_broadcast)  # a broadcast reads one element
    if (size := numbers.sizes.get(form)) is None:
        from iced_x86 import MemorySizeExt

        size = numbers.sizes[form] = MemorySizeExt.size(instruction.memory_size)
    if not size or (not is_relative and not -_DISPLACEMENT_MAX <= displacement < _DISPLACEMENT_MAX):
        return OtherMemory.UNKNOWN
    base = "" if is_relative else numbers.names[instruction.memory_base]
    index = numbers.names[instruction.memory_index]
    if any(len(each) > 0 and each not in _GENERAL for each in (base, index)):
        return OtherMemory.NARROW if base.startswith("e") or index.startswith("e") else OtherMemory.UNKNOWN
    return MemoryAccess(base, index, instruction.memory_index_scale, displacement, is_relative, size, reads, writes)


def _directions(instruction: Instruction, kinds: Sequence[int]) -> tuple[bool, bool]:
    """Return whether an instruction reads its operand in memory, and whether it writes to it."""
    from iced_x86 import InstructionInfoFactory, OpAccess

    access = InstructionInfoFactory().info(instruction).op_access(kinds.index(_numbers().memory))
    reading = (OpAccess.READ, OpAccess.COND_READ, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)
    writing = (OpAccess.WRITE, OpAccess.COND_WRITE, OpAccess.READ_WRITE, OpAccess.READ_COND_WRITE)
    return access in reading, access in writing


_GENERAL = frozenset(
    ("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{number}" for number in range(8, 16)))
)


def _obstacle(instruction: Instruction, kinds: Sequence[int]) -> OtherMemory | None:
    numbers = _numbers()
    if instruction.segment_prefix in numbers.of_thread:
        return OtherMemory.THREAD
    is_on_stack = instruction.memory_base == numbers.stack_pointer
    # ``pop`` computes the address of its operand after it has changed rsp.
    if is_on_stack and (not instruction.memory_index or instruction.mnemonic == numbers.pop):
        return OtherMemory.STACK
    if instruction.is_vsib:
        return OtherMemory.SCATTERED
    mnemonic = instruction.mnemonic
    if mnemonic in numbers.second_memory:
        return OtherMemory.UNKNOWN
    if instruction.op_mask or mnemonic in numbers.masking:
        return OtherMemory.MASKED
    if mnemonic in numbers.bit_strings and kinds[0] == numbers.memory and kinds[1] == numbers.register:
        return OtherMemory.BIT
    if instruction.memory_base == numbers.narrow_pc:
        return OtherMemory.NARROW
    return None


def _string_access(instruction: Instruction) -> StringAccess | OtherMemory:
    from iced_x86 import OpKind

    numbers = _numbers()
    narrow = (OpKind.MEMORY_SEG_SI, OpKind.MEMORY_ESDI, OpKind.MEMORY_SEG_ESI, OpKind.MEMORY_ESEDI)
    if any(instruction.op_kind(number) in narrow for number in range(instruction.op_count)):
        return OtherMemory.NARROW
    if instruction.segment_prefix in numbers.of_thread:
        return OtherMemory.THREAD
    if instruction.mnemonic in numbers.masking:
        return OtherMemory.MASKED
    name = numbers.mnemonics[instruction.mnemonic]
    directions, size = _STRINGS.get(name[:-1]), _SUFFIXES.get(name[-1:])
    if directions is None or size is None:
        return OtherMemory.UNKNOWN
    repeats = instruction.has_rep_prefix or instruction.has_repne_prefix
    return StringAccess(size, *directions, repeats, repeats and name[:-1] in ("cmps", "scas"))


class _Numbers:
    """Numbers of the decoder by which instructions are recognized, and what is known of instruction codes so far."""

    def __init__(self) -> None:
        from iced_x86 import Mnemonic, OpKind, Register

        self.memory, self.register = int(OpKind.MEMORY), int(OpKind.REGISTER)
        self.strings = frozenset(kind for name, kind in vars(OpKind).items() if name.startswith("MEMORY_"))
        self.names = {number: name.lower() for name, number in vars(Register).items() if isinstance(number, int)}
        self.names[Register.NONE] = ""
        self.mnemonics = {number: name.lower() for name, number in vars(Mnemonic).items() if isinstance(number, int)}
        self.of_thread = frozenset((int(Register.FS), int(Register.GS)))
        self.stack_pointer, self.narrow_pc = int(Register.RSP), int(Register.EIP)
        self.masking = frozenset(number for number, name in self.mnemonics.items() if "maskmov" in name)
        self.bit_strings = frozenset(number for number, name in self.mnemonics.items() if name in _BIT_STRINGS)
        self.directions: dict[int, tuple[bool, bool]] = {}
        """The directions of the operand in memory by instruction code: (reads, writes)."""
        self.second_memory = frozenset(number for number, name in self.mnemonics.items() if name in _SECOND_MEMORY)
        self.pop = int(Mnemonic.POP)
        self.sizes: dict[tuple[int, bool], int] = {}
        """The sizes of operands in memory in bytes, by instruction code, and whether one element is broadcast."""


@cache
def _numbers() -> _Numbers:
    return _Numbers()
