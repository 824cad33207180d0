"""
Call stacks on a machine: in the kernel by its unwind tables (ORC), in user space by the unwind tables of files.

A kernel stack is unwound like by the kernel's own unwinder (``arch/x86/kernel/unwind_orc.c``). Code without an entry,
such as BPF programs, and all code of a kernel without ORC tables, are unwound by frame pointers. The stack ends at the
entry from user space.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dprobes.engines.gdb.machine.guest_kernel import listed_modules
from dprobes.engines.gdb.machine.guest_processes import MappedModule
from dprobes.engines.gdb.machine.machine_target import GuestMemory
from dprobes.engines.gdb.machine.orc_tables import OrcEntry, OrcKind, OrcRegister, OrcTable
from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.module_lookup import find_module
from dprobes.target.unwind.frame_tables import FileFrames, MovedFrames
from dprobes.target.unwind.stack_walk import COLUMNS, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Literal

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.machine.guest_kernel import GuestModule
    from dprobes.engines.gdb.machine.guest_processes import AddressSpaces, KernelFacts
    from dprobes.engines.gdb.machine.machine_target import MachineTarget
    from dprobes.engines.gdb.stub_registers import Registers

__all__ = ["KernelStacks", "ProgramStacks", "UnwindTables"]

_WORD = 8
_MASK = (1 << 64) - 1
_FRAMES_MAX = 127
_RING = 3
_KERNEL_HALF = 1 << 63
_FRAME_POINTER = OrcEntry(OrcRegister.BP, 16, OrcRegister.PREV_SP, -16, OrcKind.CALL)
"""Entry for code with frame pointers (``orc_fp_entry``)."""
_SAVED_BP, _SAVED_IP, _SAVED_CS, _SAVED_SP = 4 * _WORD, 16 * _WORD, 17 * _WORD, 19 * _WORD
"""Offsets in ``struct pt_regs``; the processor itself saves the registers from the instruction pointer on."""
_NAMES = {
    OrcRegister.DX: "rdx",
    OrcRegister.DI: "rdi",
    OrcRegister.R10: "r10",
    OrcRegister.R13: "r13",
}


class _Frame(NamedTuple):
    """A frame with its registers; ``is_exact`` is True if ``ip`` is the next instruction, not a return address."""

    ip: int
    sp: int
    bp: int
    is_exact: bool


class KernelStacks:
    """
    Unwinder of kernel stacks.

    ``word`` reads a number of a size in bytes at an address, and returns None if it is unreadable. ``entry_at`` returns
    the ORC entry for an address, or None. ``is_entered`` returns True for the address of a function's first
    instruction.
    """

    def __init__(
        self,
        word: Callable[[int, int], int | None],
        entry_at: Callable[[int], OrcEntry | None],
        is_entered: Callable[[int], bool],
    ) -> None:
        self._read, self._entry_at, self._is_entered = word, entry_at, is_entered

    def stack(self, registers: Registers) -> list[int]:
        """Return the addresses of a processor's call stack, the innermost first; none outside of the kernel."""
        if registers["cs"] & _RING:
            return []
        frame: _Frame | None = _Frame(registers["rip"], registers["rsp"], registers["rbp"], is_exact=True)
        found: list[int] = []
        seen: set[_Frame] = set()
        while frame is not None and frame.ip >= _KERNEL_HALF and frame not in seen and len(found) < _FRAMES_MAX:
            seen.add(frame)
            found.append(frame.ip)
            try:
                frame = self._above(frame, registers if len(found) == 1 else None)
            except TargetError:
                break
        return found

    def _word(self, address: int) -> int:
        value = self._read(address & _MASK, _WORD)
        if value is None:
            raise TargetError(f"the stack at {address:#x} cannot be read")
        return value

    def _above(self, frame: _Frame, registers: Registers | None) -> _Frame | None:
        """
        Return the caller's frame, or the interrupted one; None at the end of the stack.

        ``registers`` are None except for the innermost frame.
        """
        entry = self._entry_at(frame.ip if frame.is_exact else frame.ip - 1)
        if entry is None and frame.is_exact and registers is not None and self._is_entered(frame.ip):
            return _Frame(self._word(frame.sp), frame.sp + _WORD, frame.bp, is_exact=False)
        entry = entry or _FRAME_POINTER
        sp = None if entry.kind in (OrcKind.UNDEFINED, OrcKind.END_OF_STACK) else self._sp(entry, frame, registers)
        if sp is None:
            return None
        match entry.kind:
            case OrcKind.CALL:
                return _Frame(self._word(sp - _WORD), sp, self._bp(entry, frame, sp), is_exact=False)
            case OrcKind.REGS:
                return self._interrupted(sp, self._word(sp + _SAVED_BP))
            case OrcKind.REGS_PARTIAL:
                return self._interrupted(sp - _SAVED_IP, self._bp(entry, frame, sp))
            case OrcKind.UNDEFINED | OrcKind.END_OF_STACK:
                return None
            case _:
                assert_never(entry.kind)

    def _interrupted(self, saved: int, bp: int) -> _Frame | None:
        """
        Return the kernel's frame that was interrupted, from its registers at ``saved`` (struct pt_regs) and its rbp.

        None: a program was interrupted.
        """
        if self._word(saved + _SAVED_CS) & _RING:
            return None
        return _Frame(self._word(saved + _SAVED_IP), self._word(saved + _SAVED_SP), bp, is_exact=True)

    def _sp(self, entry: OrcEntry, frame: _Frame, registers: Registers | None) -> int | None:
        match entry.sp_register:
            case OrcRegister.SP:
                return frame.sp + entry.sp_offset
            case OrcRegister.BP:
                return frame.bp + entry.sp_offset
            case OrcRegister.SP_INDIRECT:
                return self._word(frame.sp) + entry.sp_offset
            case OrcRegister.BP_INDIRECT:
                return self._word(frame.bp + entry.sp_offset)
            case OrcRegister.DX | OrcRegister.DI | OrcRegister.R10 | OrcRegister.R13 as register:
                return None if registers is None else registers[_NAMES[OrcRegister(register)]]
        return None

    def _bp(self, entry: OrcEntry, frame: _Frame, sp: int) -> int:
        match entry.bp_register:
            case OrcRegister.PREV_SP:
                return self._word(sp + entry.bp_offset)
            case OrcRegister.BP:
                return self._word(frame.bp + entry.bp_offset)
        return frame.bp


_UNSAID = (StackEnd.OUTERMOST, StackEnd.LIMIT)
_ARCHITECTURE = "x86_64"


class _KnownFile:
    """File of this machine that a guest process may map, and the module by which mappings are compared with it."""

    def __init__(self, spaces: AddressSpaces, elf: ElfFile, name: str) -> None:
        self.module = MappedModule(spaces, elf, name)
        self._frames = FileFrames(elf)
        self._moved: dict[int, MovedFrames] = {}

    def at(self, bias: int) -> MovedFrames:
        """Return the unwind tables for a load bias."""
        if bias not in self._moved:
            self._moved[bias] = MovedFrames(self._frames, bias)
        return self._moved[bias]


class ProgramStacks:
    """
    Unwinder of user-space call stacks, by the unwind tables of files on this machine.

    The pages of unwind tables are rarely present in a process's memory. So a file on this machine is used if it has the
    name of the mapped file, and the same build ID. ``names`` maps register indices to the stub's names. ``files`` has
    known files; others are found by their names.
    """

    word_size = 8
    byte_order: Literal["little"] = "little"

    def __init__(
        self,
        spaces: AddressSpaces,
        architecture: Architecture,
        names: Mapping[int, str],
        files: tuple[ElfFile, ...] = (),
    ) -> None:
        self._spaces = spaces
        self._columns = COLUMNS[_ARCHITECTURE]
        columns = {number: architecture.register(name) for number, name in enumerate(self._columns.names) if name}
        self._names = {number: names[each.index] for number, each in columns.items() if each and each.index in names}
        self._files: dict[bytes, _KnownFile | None] = {
            os.fsencode(each.path.name): _KnownFile(spaces, each, each.path.name) for each in files
        }
        self._space = 0

    def stack(self, registers: Mapping[str, int], space: int, frames: int) -> list[int]:
        """Return up to ``frames`` addresses of a program's call stack, as ``Context.user_stack`` returns them."""
        self._space = space
        values = {number: registers[name] for number, name in self._names.items() if name in registers}
        found = walk(self, self._columns, values, frames)
        return [*found.addresses] if found.end in _UNSAID else [*found.addresses, found.end]

    def read(self, address: int, n: int) -> bytes:
        """Return bytes of memory; raise ``TargetError`` if some cannot be read."""
        data = self._spaces.read(self._space, address, n)
        if len(data) < n:
            raise TargetError(f"{n} bytes at {address:#x} cannot be read")
        return data

    def table_at(self, address: int) -> MovedFrames | None:
        """Return the unwind table of the file that is mapped at an address, or None if it is not known here."""
        mapped = self._spaces.file_at(self._space, address)
        if mapped is None:
            return None
        if mapped.name not in self._files:
            self._files[mapped.name] = self._found(os.fsdecode(mapped.name))
        known = self._files[mapped.name]
        bias = None if known is None else known.module.bias_in(mapped, 0)
        if known is None or bias is None or not known.module.is_verified(mapped):
            return None
        return known.at(bias)

    def _found(self, name: str) -> _KnownFile | None:
        try:
            path = find_module(name, architecture=_ARCHITECTURE)
            return None if path is None else _KnownFile(self._spaces, ElfFile.open(path), name)
        except TargetError:
            return None


_MODULES_START = 0xFFFFFFFFC0000000
"""End of the kernel's image, where modules begin (Documentation/arch/x86/x86_64/mm.rst)."""


class UnwindTables:
    """
    Unwind tables of a kernel that is described by ``facts``, and of its modules.

    The list of modules is read again when an address is in no known module. A known module is assumed to be loaded as
    long as addresses are in it.
    """

    def __init__(self, target: MachineTarget, facts: KernelFacts) -> None:
        self._target, self._facts = target, facts
        self._core = None if facts.unwinding is None else self._table(*facts.unwinding)
        self._modules: list[tuple[GuestModule, OrcTable | None]] = []

    def _table(self, addresses: int, entries: int, count: int) -> OrcTable | None:
        layout = self._facts.layout.orc
        return None if layout is None else OrcTable(self._target.read, layout, addresses, entries, count)

    def entry_at(self, address: int) -> OrcEntry | None:
        """Return the entry for an address, None if there is none; raise ``TargetError`` if it cannot be read."""
        table = self._core if address < _MODULES_START else self._table_of_module(address)
        return None if table is None else table.entry_at(address)

    def _table_of_module(self, address: int) -> OrcTable | None:
        for _ in range(2):
            for module, table in self._modules:
                if 0 <= address - module.loaded.address < module.loaded.size:
                    return table
            self._modules = self._listed()
        return None

    def _listed(self) -> list[tuple[GuestModule, OrcTable | None]]:
        facts = self._facts
        if facts.tables is None or not facts.modules or facts.layout.module_orc is None:
            return []
        memory = GuestMemory(self._target, facts.tables, facts.paging)
        addresses, entries, count = facts.layout.module_orc
        found: list[tuple[GuestModule, OrcTable | None]] = []
        for module in listed_modules(memory, facts.layout, facts.modules).found:
            at = module.address
            size = memory.word(at + count, 4)
            found.append((module, self._table(memory.word(at + addresses), memory.word(at + entries), size)))
        return found
