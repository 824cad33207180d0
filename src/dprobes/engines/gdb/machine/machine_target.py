"""
A machine behind QEMU's stub: physical as well as linear memory, and single steps without interrupts.

QEMU has its own packets for both (gdbstub.c). ``Qqemu.PhyMemMode:1`` makes addresses in ``m`` and ``M`` physical ones.
``Qqemu.sstep`` selects what is held off while a processor executes a single instruction::

    ENABLE=1    NOIRQ=2: no interrupts    NOTIMER=4: time stands still

Both settings outlive the connection, so they are reset before the machine resumes.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from dprobes.engines.gdb.stub_target import BLOCK, StubTarget
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import Registers, TargetDescription
    from dprobes.engines.gdb.stub_requests import Stub

__all__ = ["GuestMemory", "MachineTarget", "Paging", "Region", "Translation", "paging_of", "regions", "translate"]

# A walk through page tables of x86 begins at cr3, and takes 9 bits of the address per level (AMD64 APM, volume 2, 5)::
#
#     47..39      38..30      29..21      20..12      11..0
#     PML4E   ─►  PDPE    ─►  PDE     ─►  PTE     ─►  byte of a page of 4 KiB
#                   └ PS: 1 GiB  └ PS: 2 MiB
#
#     entry: bit 0 present, 1 writable, 2 user, 7 page size (PS), 12-51 physical address, 63 not executable
#
# With cr4.LA57 there is one more level in front. Without paging, addresses are physical ones. Other forms of paging,
# those of 32 bits, are not supported.


_PAGING, _LONG_MODE_ACTIVE, _FIVE_LEVELS = 1 << 31, 1 << 10, 1 << 12
"""Flags cr0.PG, EFER.LMA and cr4.LA57."""
_PRESENT, _WRITABLE, _USER, _LARGE, _NOT_EXECUTABLE = 1 << 0, 1 << 1, 1 << 2, 1 << 7, 1 << 63
_ADDRESS = 0x000F_FFFF_FFFF_F000
_TABLE_ENTRY, _INDEX_BITS, _PAGE_BITS = 8, 9, 12
_LARGE_LEVELS = (1, 2)
"""Levels, counted from the last one, at which an entry may map a page."""


class Paging(enum.Enum):
    """Form of a processor's paging; the value is the number of levels of page tables."""

    OFF = 0
    FOUR_LEVELS = 4
    FIVE_LEVELS = 5
    OTHER = -1


class Translation(NamedTuple):
    """Physical address of a byte, the number of bytes from there to the end of its page, and the access rights."""

    physical: int
    size: int
    is_writable: bool
    is_user: bool
    is_executable: bool


class Region(NamedTuple):
    """The linear addresses from ``start`` to ``end`` (excluded), which have the same access rights."""

    start: int
    end: int
    is_writable: bool
    is_executable: bool


def paging_of(cr0: int, cr4: int, efer: int) -> Paging:
    """Return the form of paging of a processor."""
    if not cr0 & _PAGING:
        return Paging.OFF
    if not efer & _LONG_MODE_ACTIVE:
        return Paging.OTHER
    return Paging.FIVE_LEVELS if cr4 & _FIVE_LEVELS else Paging.FOUR_LEVELS


def _is_canonical(address: int, levels: int) -> bool:
    bits = _PAGE_BITS + _INDEX_BITS * levels
    upper = address >> (bits - 1)
    return upper in (0, (1 << (65 - bits)) - 1)


def translate(entry_at: Callable[[int], int | None], root: int, paging: Paging, address: int) -> Translation | None:
    """
    Translate a linear address by the page tables at ``root`` (cr3). Return None if it is not mapped.

    ``entry_at`` returns 8 bytes of physical memory, or None if they cannot be read.
    """
    if paging is Paging.OFF:
        return Translation(address, (1 << _PAGE_BITS) - address % (1 << _PAGE_BITS), True, True, True)
    if not _is_canonical(address, paging.value):
        return None
    table, rights = root & _ADDRESS, _WRITABLE | _USER
    is_executable = True
    for level in reversed(range(paging.value)):
        shift = _PAGE_BITS + _INDEX_BITS * level
        index = address >> shift & (1 << _INDEX_BITS) - 1
        entry = entry_at(table + index * _TABLE_ENTRY)
        if entry is None or not entry & _PRESENT:
            return None
        rights &= entry
        is_executable &= not entry & _NOT_EXECUTABLE
        if not level or (level in _LARGE_LEVELS and entry & _LARGE):
            size = 1 << shift
            physical = (entry & _ADDRESS & -size) + address % size
            left = size - address % size
            return Translation(physical, left, bool(rights & _WRITABLE), bool(rights & _USER), is_executable)
        table = entry & _ADDRESS
    return None


def regions(
    entry_at: Callable[[int], int | None], root: int, paging: Paging, start: int, end: int, step: int
) -> Iterator[Region]:
    """
    Iterate over mapped regions from ``start`` to ``end``.

    Unmapped addresses are skipped in steps of ``step`` bytes.
    """
    at, begun = start, None
    while at < end:
        found = translate(entry_at, root, paging, at)
        kind = None if found is None else (found.is_writable, found.is_executable)
        if begun is not None and begun[1:] != (kind or ()):
            yield Region(begun[0], at, *begun[1:])
            begun = None
        if begun is None and kind is not None:
            begun = (at, *kind)
        at += step if found is None else found.size
        if found is None:
            at &= -step
    if begun is not None:
        yield Region(begun[0], min(at, end), *begun[1:])


_FRAME: Final = 512
"""Bytes of physical memory that are read at once, as adjacent entries of page tables are read together."""
_KERNEL_HALF = 1 << 63
_STEP_MASK = 7
"""Single steps that hold off interrupts and stop the clock."""


class MachineTarget(StubTarget):
    """
    A machine whose processors are the threads of its stub.

    The register cr3 leads to the page tables.
    """

    def __init__(
        self,
        stub: Stub,
        byte_order: Literal["little", "big"],
        default: TargetDescription,
        breakpoint_: bytes,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(stub, byte_order, default, breakpoint_, tell)
        self.has_physical = stub.is_machine
        """True if the stub can access physical memory."""
        self._is_physical = False
        self._paged: tuple[int, Paging] | None = None
        """Page tables of the processor whose registers were read last."""
        self._spoken_of: ThreadId | None = None
        """Processor through which memory is read."""
        self._frames: dict[int, bytes] = {}
        self.kernel_tables: int | None = None
        """Physical address of the kernel's own page tables, which map all its memory, even during user-space code."""
        self.kernel_paging = Paging.FOUR_LEVELS
        self._step_mask: bytes | None = None
        """Previous step flags of the stub in hexadecimal, None if they need not be restored."""

    @property
    def can_walk(self) -> bool:
        """True if page tables can be read, which requires physical memory."""
        return self.has_physical and "cr3" in self.description.registers

    def _be_physical(self, is_physical: bool) -> None:
        if self._is_physical is not is_physical:
            self.stub.ask(f"Qqemu.PhyMemMode:{is_physical:d}")
            self._is_physical = is_physical

    def _read_block(self, block: int) -> bytes:
        self._be_physical(False)
        data = super()._read_block(block)
        if not data and block >= _KERNEL_HALF and self.kernel_tables is not None:
            data = self.read_large(self.kernel_tables, self.kernel_paging, block, BLOCK)
        return data

    def registers(self, thread: ThreadId | None) -> Registers:
        """Return the registers of a processor, through which memory is accessed from now on."""
        registers = super().registers(thread)
        if thread != self._spoken_of:
            self._blocks.clear()  # another processor may have other memory at the same addresses
            self._spoken_of = thread
        self._paged = (registers["cr3"], self.paging(registers)) if self.can_walk else None
        return registers

    def write(self, address: int, data: bytes) -> bool:
        """
        Write memory; return whether all of it could be written.

        The stub writes to any present page. One that the processor cannot write to may be shared with other processes.
        """
        at = address
        while self._paged is not None and self._paged[1] is not Paging.OTHER and at < address + len(data):
            found = translate(self.entry_at, *self._paged, at)
            if found is None or not found.is_writable:
                return False
            at += found.size
        self._be_physical(False)
        self._frames.clear()
        return super().write(address, data)

    def _set_running(self) -> None:
        self._be_physical(False)
        self.stub.flush()
        self._frames.clear()
        super()._set_running()

    # Physical memory

    def read_physical(self, address: int, size: int) -> bytes:
        """Return bytes of physical memory; fewer if some cannot be read."""
        data = bytearray()
        while len(data) < size:
            at = address + len(data)
            block = at & -_FRAME
            known = self._frames.get(block)
            if known is None:
                self._be_physical(True)
                known = self._frames[block] = self.stub.read(block, _FRAME)
            piece = known[at - block : at - block + size - len(data)]
            if not piece:
                break
            data += piece
        return bytes(data)

    def read_device(self, address: int, size: int) -> bytes:
        """Return exactly these bytes of physical memory, which may be a device's: its reads have side effects."""
        self._be_physical(True)
        return self.stub.read(address, size)

    def write_physical(self, address: int, data: bytes) -> bool:
        """Write physical memory; return whether all of it could be written."""
        self._blocks.clear()
        self._frames.clear()
        self._be_physical(True)
        return self.stub.write(address, data)

    def read_large(self, root: int, paging: Paging, address: int, size: int) -> bytes:
        """
        Read memory at a virtual address, translated by the page tables at the physical address ``root``.

        It is read uncached and in large pieces. The result is shorter if some bytes cannot be read.
        """
        data = bytearray()
        while len(data) < size:
            found = translate(self.entry_at, root, paging, address + len(data))
            if found is None:
                break
            count = min(found.size, size - len(data))
            self._be_physical(True)
            piece = self.stub.read_in_batches(found.physical, count)
            data += piece
            if len(piece) < count:
                break
        return bytes(data)

    def entry_at(self, address: int) -> int | None:
        """Return an entry of a page table by its physical address, None if it cannot be read."""
        data = self.read_physical(address, _TABLE_ENTRY)
        return int.from_bytes(data, self.byte_order) if len(data) == _TABLE_ENTRY else None

    def paging(self, registers: Registers) -> Paging:
        """Return the form of paging of a processor; OTHER if it is unknown."""
        if not self.can_walk:
            return Paging.OTHER
        return paging_of(registers.value("cr0"), registers.value("cr4"), registers.value("efer"))

    def translate(self, registers: Registers, address: int) -> Translation | None:
        """Return the translation of a processor's linear address, None if it is not mapped or paging is unknown."""
        paging = self.paging(registers)
        return None if paging is Paging.OTHER else translate(self.entry_at, registers["cr3"], paging, address)

    def write_back(self, thread: ThreadId | None, registers: Registers) -> None:
        """
        Write only the changed registers to a processor: writes of system registers have side effects.

        Raise ``EngineError`` if the stub does not set one of them.
        """
        changed = sorted(registers.changed)
        registers.changed.clear()
        for name in changed:
            if not self._set_register(thread, registers, name):
                raise EngineError(f"the stub {self.stub.name} does not set the register '{name}'")

    # Steps

    def hold_interrupts(self) -> None:
        """Disable interrupts and the clock during single steps, until ``let_go``."""
        before = self.stub.ask_if_known("qqemu.sstep")
        if before is None or (found := re.fullmatch(rb"(?:0x)?([0-9a-f]+)", before)) is None:
            return
        if int(found[1], 16) != _STEP_MASK:
            self._step_mask = found[1]
            self.tell(f"last Qqemu.sstep={found[1].decode()}")
            self.stub.ask(f"Qqemu.sstep={_STEP_MASK:x}")

    def leave_standing(self) -> None:
        """Remove all breakpoints, and leave the machine stopped when the connection ends."""
        self._set_back()
        self._watch_nothing()
        for address in sorted(self.inserted):
            self._remove(address, 1)
        self.stub.flush()
        self.tell("end")
        self.is_over = True

    def let_go(self) -> None:
        """Remove all breakpoints from the machine, and resume it without further stops."""
        if self.is_running:
            self.stop()
        self._set_back()
        super().let_go()

    def _set_back(self) -> None:
        self._be_physical(False)
        if self._step_mask is not None:
            self.stub.ask(f"Qqemu.sstep={self._step_mask.decode()}")
            self._step_mask = None


_TEXT_MAX = 4096


class GuestMemory:
    """Memory of a stopped machine as page tables at ``root`` map it, independent of its processors' state."""

    def __init__(self, target: MachineTarget, root: int, paging: Paging) -> None:
        self._target, self._root, self.paging = target, root, paging

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes of the machine's memory at a virtual address; fewer if some cannot be read."""
        return self._target.read_large(self._root, self.paging, address, size)

    def physical(self, address: int) -> int | None:
        """Return the physical address of a byte, None if it is not mapped."""
        found = translate(self._target.entry_at, self._root, self.paging, address)
        return None if found is None else found.physical

    def word(self, address: int, size: int = 8) -> int:
        """Return the unsigned number of ``size`` bytes at a virtual address, or 0 if it cannot be read."""
        data = self.read(address, size)
        return int.from_bytes(data, self._target.byte_order) if len(data) == size else 0

    def string(self, address: int) -> bytes:
        """Return a C string without its NUL; it ends at the latest at the end of the block of ``_TEXT_MAX`` bytes."""
        return self.read(address, _TEXT_MAX - address % _TEXT_MAX).partition(b"\0")[0]
