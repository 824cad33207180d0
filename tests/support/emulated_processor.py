"""
An emulated x86-64 processor (Unicorn) with the image of a module, for comparing code with a displaced copy of it.

A *run* begins with made-up registers at an address, ends where control leaves a range, and is undone afterwards. What
it comes to is an ``Outcome``: registers, flags, vector registers, the bytes that were written, and where it went or
which fault ended it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import unicorn
from unicorn import x86_const as x86

if TYPE_CHECKING:
    from random import Random

    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["EmulatedProcessor", "Outcome", "random_registers"]

_PAGE = 0x1000
_COPIES_AWAY, _COPIES_SIZE = 0x1000_0000, 0x10000
_ARENA, _ARENA_SIZE = 0x5500_0000_0000, 0x20_0000
_STACK, _STACK_SIZE = 0x7FFF_0000_0000, 0x1_0000

_NAMES = "rax rbx rcx rdx rsi rdi rbp rsp r8 r9 r10 r11 r12 r13 r14 r15".split()  # noqa: SIM905
_GENERAL = tuple(getattr(x86, f"UC_X86_REG_{name.upper()}") for name in _NAMES)
# Of wider registers, which Unicorn does not know well, some of its instructions leave noise in the upper part.
_VECTORS = tuple(getattr(x86, f"UC_X86_REG_XMM{n}") for n in range(16))
_STATE = (*_GENERAL, x86.UC_X86_REG_EFLAGS)
_UNMAPPED_FETCHES = (unicorn.UC_ERR_FETCH_UNMAPPED, unicorn.UC_ERR_FETCH_PROT)
_STEPS_MAX = 200


class Outcome(NamedTuple):
    """
    The result of a run; ``fault`` is Unicorn's error number, 0 if control left the range.

    ``written`` are the bytes that were written, by address.
    """

    pc: int
    fault: int
    registers: tuple[int, ...]
    vectors: tuple[int, ...]
    written: dict[int, int]

    @property
    def stack_pointer(self) -> int:
        return self.registers[_NAMES.index("rsp")]


def random_registers(random: Random) -> tuple[int, ...]:
    """
    Return random general registers and flags.

    Most are valid addresses, so that few runs end in a fault.
    """
    values = []
    for name in _NAMES:
        kind = random.random()
        if name == "rsp":
            values.append(_STACK + _STACK_SIZE // 2 + 8 * random.randrange(64))
        elif kind < 0.65:
            values.append(_ARENA + _ARENA_SIZE // 4 + 16 * random.randrange(_ARENA_SIZE // 32))
        elif kind < 0.9:
            values.append(random.randrange(4))
        else:
            values.append(random.getrandbits(64))
    return (*values, 0x202 | random.getrandbits(12) & 0x8D5)


class EmulatedProcessor:
    """
    A processor with a stack, the module ``elf``, and a memory area with random contents.

    ``copies`` is the address for copies of code, in the range of a jump from the module. ``bias`` is the difference
    between addresses of the loaded module and of the file.
    """

    def __init__(self, elf: ElfFile, bias: int, random: Random) -> None:
        self._uc = unicorn.Uc(unicorn.UC_ARCH_X86, unicorn.UC_MODE_64)
        first = min(segment.vaddr for segment in elf.load_segments) & -_PAGE
        last = max(segment.vaddr + segment.memsz for segment in elf.load_segments)
        self.copies = bias + (last + _COPIES_AWAY) & -_PAGE
        self._uc.mem_map(bias + first, (last - first + _PAGE) & -_PAGE)
        for segment in elf.load_segments:
            self._uc.mem_write(bias + segment.vaddr, elf.read(segment.vaddr, segment.filesz))
        self._uc.mem_map(self.copies, _COPIES_SIZE)
        for start, size in ((_ARENA, _ARENA_SIZE), (_STACK, _STACK_SIZE)):
            self._uc.mem_map(start, size)
            self._uc.mem_write(start, random.randbytes(size))
        self._uc.reg_write(x86.UC_X86_REG_FS_BASE, _ARENA + _ARENA_SIZE // 2)
        self._vectors = tuple(random.getrandbits(128) for _ in _VECTORS)
        for vector, value in zip(_VECTORS, self._vectors, strict=True):
            self._uc.reg_write(vector, value)
        self._clean = self._uc.context_save()
        self._range = range(0)
        self._steps = 0
        self._returns_to_start = False
        self._before: dict[int, int] = {}
        self._uc.hook_add(unicorn.UC_HOOK_CODE, self._at_instruction)
        self._uc.hook_add(unicorn.UC_HOOK_MEM_WRITE, self._before_write)

    def put(self, address: int, code: bytes) -> None:
        """Write code that remains in memory in all further runs."""
        self._uc.mem_write(address, code)
        self._uc.ctl_remove_cache(address, address + len(code))

    def run(self, start: int, end: int, registers: tuple[int, ...], *, repeats: bool = False) -> Outcome:
        """
        Run from ``start`` until control leaves the range up to ``end``, exclusive; return the outcome and undo it.

        Without ``repeats``, returning to ``start`` ends the run as well.
        """
        uc = self._uc
        uc.context_restore(self._clean)
        for register, value in zip(_STATE, registers, strict=True):
            uc.reg_write(register, value)
        self._range, self._steps, self._returns_to_start = range(start, end), 0, not repeats
        self._before.clear()
        fault = 0
        try:
            uc.emu_start(start, 0)
        except unicorn.UcError as error:
            fault = error.errno
        pc = uc.reg_read(x86.UC_X86_REG_RIP)
        if fault in _UNMAPPED_FETCHES and pc not in self._range:
            fault = 0
        written = {address: uc.mem_read(address, 1)[0] for address in self._before}
        outcome = Outcome(
            pc,
            fault,
            tuple(uc.reg_read(register) for register in _STATE),
            tuple(uc.reg_read(vector) for vector in _VECTORS),
            {address: byte for address, byte in written.items() if byte != self._before[address]},
        )
        for address, byte in self._before.items():
            uc.mem_write(address, bytes((byte,)))
        return outcome

    def _at_instruction(self, uc: unicorn.Uc, address: int, _size: int, _data: object) -> None:
        self._steps += 1
        is_back = self._returns_to_start and self._steps > 1 and address == self._range.start
        if address not in self._range or is_back or self._steps > _STEPS_MAX:
            uc.emu_stop()

    def _before_write(self, uc: unicorn.Uc, _access: int, address: int, size: int, _value: int, _data: object) -> None:
        try:
            content = uc.mem_read(address, size)
        except unicorn.UcError:
            return  # nothing is there, and nothing is written
        for place, byte in enumerate(content, address):
            self._before.setdefault(place, byte)
