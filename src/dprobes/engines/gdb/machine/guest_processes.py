"""
Processes of a guest kernel of Linux: their tasks, address spaces and mapped files.

Since 6.1, Linux keeps the mappings of an address space in a maple tree (``include/linux/maple_tree.h``). A node has
ascending pivots and one slot more: slot N is for the indices from pivot N-1 (excluded) to pivot N (included). A missing
pivot, or a 0 after the first pivot, stands for the last index of the node. The lower bits of a pointer to a node
contain the node's type::

    63              8 7    6..3   2    1    0
    │ node (256 B)   │  │ type │ 1 │ root │ 0 │

The root's pointer has bit 1. A tree without nodes has an entry for index 0 in its place.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.gdb.machine.machine_target import translate
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.engines.gdb.machine.guest_kernel import GuestKernel, KernelLayout
    from dprobes.engines.gdb.machine.machine_target import MachineTarget, Paging
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.target.btf import Btf
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.kernel.kernel_symbols import Kallsyms

__all__ = [
    "NOBODY",
    "AddressSpace",
    "AddressSpaces",
    "KernelFacts",
    "MapleLayout",
    "MapleTree",
    "MappedFile",
    "MappedModule",
    "ModulePlace",
    "Task",
    "TaskReader",
]

_NODE_MASK = ~0xFF
_TYPE_SHIFT, _TYPE_MASK = 3, 0xF
_LEAF, _RANGE, _ALLOCATION_RANGE = 1, 2, 3
"""``enum maple_type``: a leaf, a range node, and a range node that keeps track of gaps."""
_INTERNAL_MASK, _INTERNAL, _RESERVED_MAX = 3, 2, 4096
"""Bits that distinguish a pointer to a node from an entry at the root (``xa_is_node``)."""
_NODE_SIZE, _WORD = 256, 8
_LAST = (1 << 64) - 1
_DEPTH_MAX = 32
_ENTRIES_MAX = 1 << 18


@dataclass(frozen=True, slots=True)
class MapleLayout:
    """Offsets in bytes of pivots and slots, in leaves and range nodes, and in nodes that keep track of gaps."""

    root: int
    pivots: int
    slots: int
    gap_pivots: int
    gap_slots: int

    @classmethod
    def of(cls, types: Btf) -> MapleLayout:
        """Return the offsets in a kernel's types; raise ``TargetError`` if it has no maple trees."""
        return cls(
            types.member_offset("maple_tree", "ma_root"),
            types.member_offset("maple_range_64", "pivot"),
            types.member_offset("maple_range_64", "slot"),
            types.member_offset("maple_arange_64", "pivot"),
            types.member_offset("maple_arange_64", "slot"),
        )


class MapleTree:
    """
    The maple tree whose ``struct maple_tree`` is at ``address``.

    ``read`` returns memory, fewer bytes than requested if some cannot be read.
    """

    def __init__(self, read: Callable[[int, int], bytes], layout: MapleLayout, address: int) -> None:
        self._read, self._layout = read, layout
        self._root = self._words(address + layout.root, 1)[0]

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        data = self._read(address, count * _WORD)
        if len(data) < count * _WORD:
            raise TargetError(f"{count * _WORD} bytes at {address:#x} cannot be read")
        return struct.unpack(f"<{count}Q", data)

    @property
    def _has_nodes(self) -> bool:
        return self._root & _INTERNAL_MASK == _INTERNAL and self._root > _RESERVED_MAX

    def _slots(self, pointer: int, limit: int) -> Iterator[tuple[int, int]]:
        """Iterate over the slots of a maple tree node, each with its last index; the last index of all is ``limit``."""
        kind = pointer >> _TYPE_SHIFT & _TYPE_MASK
        if kind not in (_LEAF, _RANGE, _ALLOCATION_RANGE):
            raise TargetError(f"a maple tree has a node of type {kind} at {pointer:#x}")
        layout = self._layout
        knows_gaps = kind == _ALLOCATION_RANGE
        pivots, slots = (layout.gap_pivots, layout.gap_slots) if knows_gaps else (layout.pivots, layout.slots)
        words = self._words(pointer & _NODE_MASK, _NODE_SIZE // _WORD)
        count = (slots - pivots) // _WORD
        for number in range(count + 1):
            pivot = words[pivots // _WORD + number] if number < count else limit
            last = limit if (number and not pivot) or pivot > limit else pivot
            yield words[slots // _WORD + number], last
            if last >= limit:
                return

    def entry_at(self, index: int) -> int:
        """Return the entry for an index, 0 if there is none; raise ``TargetError`` if the tree cannot be read."""
        if not self._has_nodes:
            return self._root if not index else 0
        pointer, limit = self._root, _LAST
        for _ in range(_DEPTH_MAX):
            found, limit = next(each for each in self._slots(pointer, limit) if index <= each[1])
            if pointer >> _TYPE_SHIFT & _TYPE_MASK == _LEAF or not found:
                return found
            pointer = found
        raise TargetError(f"a maple tree of more than {_DEPTH_MAX} levels")

    def entries(self) -> Iterator[int]:
        """Iterate over the entries in ascending order; raise ``TargetError`` if the tree cannot be read."""
        if not self._has_nodes:
            yield from (self._root,) if self._root else ()
            return
        yielded = 0
        waiting = [(self._root, _LAST, 0)]
        while waiting:
            pointer, limit, depth = waiting.pop()
            if depth > _DEPTH_MAX or yielded > _ENTRIES_MAX:
                raise TargetError("a maple tree that does not end")
            slots = [each for each in self._slots(pointer, limit) if each[0]]
            if pointer >> _TYPE_SHIFT & _TYPE_MASK == _LEAF:
                yielded += len(slots)
                yield from (entry for entry, _ in slots)
            else:
                waiting += [(child, last, depth + 1) for child, last in reversed(slots)]


@dataclass(frozen=True, slots=True)
class SpaceLayout:
    """
    Offsets in bytes of members of the structures for mappings, from the kernel's type information (BTF).

    ``tasks`` links a process into the list of all processes, and ``mappings`` is the tree of an address space. The
    offsets from ``space`` to ``file`` are members of a mapping, ``dentry`` and ``inode`` of a file, and ``name`` of a
    directory entry.
    """

    tree: MapleLayout
    tasks: int
    mappings: int
    space: int
    start: int
    end: int
    page: int
    flags: int
    file: int
    dentry: int
    inode: int
    name: int

    @classmethod
    def of(cls, types: Btf) -> SpaceLayout:
        """Return the offsets in a kernel's types; raise ``TargetError`` if a structure has an unknown layout."""
        area = "vm_area_struct"
        return cls(
            tree=MapleLayout.of(types),
            tasks=types.member_offset("task_struct", "tasks"),
            mappings=types.member_offset("mm_struct", "mm_mt"),
            space=types.member_offset(area, "vm_mm"),
            start=types.member_offset(area, "vm_start"),
            end=types.member_offset(area, "vm_end"),
            page=types.member_offset(area, "vm_pgoff"),
            flags=types.member_offset(area, "vm_flags"),
            file=types.member_offset(area, "vm_file"),
            dentry=types.member_offset("file", "f_path.dentry"),
            inode=types.member_offset("file", "f_inode"),
            name=types.member_offset("dentry", "d_name.name"),
        )


_CURRENT = ("current_task", "pcpu_hot")
"""
Names of the per-CPU variable of the current task.

Linux kernel commit e57ef2ed97c1 ("x86: Put hot per CPU variables into a struct") (in v6.2) made it the first member of
another variable. Since v6.15 it is a variable of its own again.
"""
_TABLES = "init_top_pgt"
_MODULES = "modules"
_TASKS = "init_task"
_UNWINDING = ("__start_orc_unwind_ip", "__stop_orc_unwind_ip", "__start_orc_unwind")
_ELEMENT = 4
"""Size in bytes of an element of the table of addresses (``orc_unwind_ip``)."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """
    Facts about the kernel of a machine, for the run of a program: addresses of its tasks, CPUs and page tables.

    * ``current`` is the address of the variable of the current task, relative to a CPU's offset. ``cpu_offsets`` is the
      address of the table of these offsets.
    * ``tables`` is the physical address of the kernel's page tables, of the form ``paging``, or None if it is unknown.
    * ``text`` is the address at which the kernel's code begins.
    * ``modules`` is the head of the list of modules, and ``first_task`` the idle task of the first CPU.
    * ``unwinding`` has the addresses of the unwind tables (the address table and the entries) and their number, or is
      None.
    * ``symbols`` has the kernel's symbols.
    * ``spaces`` is the layout of the structures for mappings, or None if it is unknown.
    * ``left_out`` describes the missing modules and symbols, or is empty.
    """

    layout: KernelLayout
    current: int
    cpu_offsets: int
    tables: int | None
    paging: Paging
    text: int
    modules: int
    first_task: int
    unwinding: tuple[int, int, int] | None
    symbols: Kallsyms
    spaces: SpaceLayout | None
    left_out: str

    @classmethod
    def of(cls, kernel: GuestKernel) -> KernelFacts:
        """Return the facts found in a kernel."""

        def address_of(*names: str) -> int:
            return next((found[0].address for name in names if (found := kernel.symbols.find(name, ""))), 0)

        start, end, entries = (address_of(name) for name in _UNWINDING)
        spaces = None
        with contextlib.suppress(TargetError):
            spaces = SpaceLayout.of(kernel.types)
        tables = kernel.guest_memory.physical(address_of(_TABLES))
        return cls(
            kernel.layout,
            address_of(*_CURRENT),
            kernel.per_cpu_offsets,
            tables,
            kernel.guest_memory.paging,
            kernel.base_of(""),
            address_of(_MODULES),
            address_of(_TASKS),
            (start, entries, (end - start) // _ELEMENT) if entries and 0 < start < end else None,
            kernel.symbols,
            spaces,
            kernel.left_out,
        )


# The structures that lead from the first task to a mapped file:
# ``init_task ─► tasks ─► task_struct ─► mm_struct ─► mm_mt ─► vm_area_struct ─► file ─► dentry, inode``


_EXECUTABLE = 4
"""VM_EXEC in include/linux/mm.h."""
_PAGE_BITS = 12
_PAGE = 1 << _PAGE_BITS
_NAME_SIZE = 256
_TASKS_MAX = 1 << 22


class AddressSpace(NamedTuple):
    """An address space: the address of its mm_struct, and the id of a process in it."""

    address: int
    pid: int


class MappedFile(NamedTuple):
    """A mapping of a file in an address space: ``start`` to ``end`` (excluded) map the file from ``offset`` on."""

    space: int
    start: int
    end: int
    offset: int
    is_code: bool
    name: bytes
    inode: int


class AddressSpaces:
    """Address spaces of the processes of a stopped ``target``; ``facts`` describe its kernel."""

    def __init__(self, target: MachineTarget, facts: KernelFacts, layout: SpaceLayout) -> None:
        self._target, self._facts, self._layout = target, facts, layout

    def _word(self, address: int) -> int:
        return self._target.word(address, _WORD) or 0

    def __iter__(self) -> Iterator[AddressSpace]:
        """Iterate over the address spaces of all processes, by their main threads; a shared one occurs repeatedly."""
        task_layout, head = self._facts.layout, self._facts.first_task + self._layout.tasks
        at = self._word(head)
        for _ in range(_TASKS_MAX):
            if at in (head, 0):
                return
            task = at - self._layout.tasks
            if space := self._word(task + task_layout.mm):
                yield AddressSpace(space, self._target.word(task + task_layout.tgid, 4) or 0)
            at = self._word(at)

    def _tree(self, space: int) -> MapleTree:
        return MapleTree(self._target.read, self._layout.tree, space + self._layout.mappings)

    def file_at(self, space: int, address: int) -> MappedFile | None:
        """Return the file that is mapped at an address, None if there is none or it cannot be read."""
        try:
            area = self._tree(space).entry_at(address)
        except TargetError:
            return None
        return self.mapped_file(area) if area else None

    def code_files(self, space: int) -> Iterator[MappedFile]:
        """Iterate over the files that are mapped as code, by address; over none if the tree cannot be read."""
        try:
            areas = list(self._tree(space).entries())
        except TargetError:
            return
        for area in areas:
            if self._is_code(area) and (found := self.mapped_file(area)) is not None:
                yield found

    def _is_code(self, area: int) -> bool:
        return bool(self._word(area + self._layout.flags) & _EXECUTABLE)

    def mapped_file(self, area: int) -> MappedFile | None:
        """Return the file of a mapping, by the address of its structure, or None if it maps no file."""
        layout = self._layout
        file = self._word(area + layout.file)
        if not file:
            return None
        name = self._word(self._word(file + layout.dentry) + layout.name)
        return MappedFile(
            self._word(area + layout.space),
            self._word(area + layout.start),
            self._word(area + layout.end),
            self._word(area + layout.page) << _PAGE_BITS,
            self._is_code(area),
            self._target.read(name, _NAME_SIZE).partition(b"\0")[0],
            self._word(file + layout.inode),
        )

    def read(self, space: int, address: int, size: int) -> bytes:
        """Return memory of the address space ``space``; fewer bytes if pages are absent (not accessed yet)."""
        tables = self._word(space + self._facts.layout.pgd)
        if self._facts.tables is None or not tables:
            return b""
        root = translate(self._target.entry_at, self._facts.tables, self._facts.paging, tables)
        if root is None:
            return b""
        return self._target.read_large(root.physical, self._facts.paging, address, size)


_NAME_MAX = 255


class ModulePlace(NamedTuple):
    """One mapping of the module: the address space, its process, and the load bias in bytes."""

    space: int
    pid: int
    bias: int


class MappedModule:
    """
    Probed module ``name``, whose file on this machine is ``elf``, in the address spaces ``spaces``.

    The files of the probed machine cannot be read. A mapped file is the module if it has the module's name and, if the
    module has one, its build ID. If the page with a file's build ID is not in memory yet, the file counts as the
    module, and the bytes of an instruction are compared at a hit.
    """

    def __init__(self, spaces: AddressSpaces, elf: ElfFile, name: str) -> None:
        self._spaces, self._elf = spaces, elf
        called = {elf.path.name, elf.path.resolve().name, os.path.basename(name), elf.soname or ""}
        self._names = {os.fsencode(each)[:_NAME_MAX] for each in called if each}
        self._code = [segment for segment in elf.load_segments if segment.executable]
        build_id = bytes.fromhex(elf.build_id or "")
        self._build_id, self._build_id_place = build_id, bytes(elf.data[: _PAGE * 4]).find(build_id) if build_id else -1
        self._verdicts: dict[tuple[int, bytes], bool] = {}
        """Results of comparisons of build IDs, by inode and name of a file, for files whose build ID could be read."""
        self.others: set[int] = set()
        """Ids of the processes that map a file with the module's name and another build ID."""

    @property
    def code_start(self) -> int:
        """Lowest link address of code."""
        return self._code[0].vaddr if self._code else 0

    def __iter__(self) -> Iterator[ModulePlace]:
        """Iterate over the current mappings; an address space that several processes share occurs once."""
        seen: set[int] = set()
        for space, pid in self._spaces:
            if space not in seen:
                seen.add(space)
                for mapped in self._spaces.code_files(space):
                    if (bias := self.bias_in(mapped, pid)) is not None:
                        yield ModulePlace(space, pid, bias)

    def bias_in(self, mapped: MappedFile | None, pid: int) -> int | None:
        """Return the load bias of the module by one of its mappings, or None if the mapping is not of its code."""
        if mapped is None or not mapped.is_code or mapped.name not in self._names:
            return None
        for segment in self._code:
            first = segment.offset // _PAGE * _PAGE
            if first <= mapped.offset < segment.offset + segment.filesz:
                bias = mapped.start - (segment.vaddr // _PAGE * _PAGE + mapped.offset - first)
                return bias if self._is_build(mapped, bias, pid) else None
        return None

    def _is_build(self, mapped: MappedFile, bias: int, pid: int) -> bool:
        """Return False if a file with the module's name certainly has another build ID."""
        key = mapped.inode, mapped.name
        address = None if self._build_id_place < 0 else self._elf.link_address(self._build_id_place)
        if key not in self._verdicts and address is not None:
            found = self._spaces.read(mapped.space, bias + address, len(self._build_id))
            if len(found) == len(self._build_id):
                self._verdicts[key] = found == self._build_id
        is_build = self._verdicts.get(key, True)
        if not is_build:
            self.others.add(pid)
        return is_build

    def is_verified(self, mapped: MappedFile) -> bool:
        """Return whether a file was identified by its build ID, and not only by its name."""
        return self._verdicts.get((mapped.inode, mapped.name), False)

    def is_at(self, space: int, bias: int, address: int | None = None) -> bool:
        """Return whether the code at ``address``, by default its beginning, is mapped with the load bias ``bias``."""
        mapped = self._spaces.file_at(space, bias + self.code_start if address is None else address)
        return self.bias_in(mapped, 0) == bias


_ANCESTORS_MAX = 1 << 10
_COMM_SIZE = 16
"""Size of a task's name in bytes, TASK_COMM_LEN."""
_STACK_SIZE = 1 << 14
"""Size of a kernel stack in bytes, THREAD_SIZE of x86-64 without KASAN (arch/x86/include/asm/page_64_types.h)."""


class Task(NamedTuple):
    """
    Task of a kernel: the address of its task_struct, its ids and its name.

    ``saved`` is the address of its user-mode pt_regs, and ``space`` the address of its mm_struct, or 0 for a kernel
    thread.
    """

    address: int
    pid: int
    tid: int
    uid: int
    name: bytes
    saved: int
    space: int


NOBODY = Task(0, 0, 0, 0, b"", 0, 0)
"""Placeholder for the running task if no kernel is known."""

_SAVED_SIZE = 168
"""sizeof(struct pt_regs) of x86-64, in bytes."""


class TaskReader:
    """Reader of the tasks on a machine's processors; ``facts`` describe the kernel."""

    def __init__(self, target: MachineTarget, facts: KernelFacts, processors: int) -> None:
        self._target, self._facts, self._processors = target, facts, processors

    def cpu_of(self, thread: ThreadId | None, registers: Registers) -> int:
        """Return the kernel's number of a processor: the CPU whose per-CPU data is at the base of its GS segment."""
        bases = {registers.value("gs_base"), registers.value("k_gs_base")}
        for cpu in range(self._processors):
            if self.offset_of(cpu) in bases:
                return cpu
        return 0 if thread is None else thread.thread - 1

    def offset_of(self, cpu: int) -> int:
        """Return the distance of a processor's per-CPU data from the addresses of the symbols, in bytes."""
        return self._target.word(self._facts.cpu_offsets + cpu * _WORD, _WORD) or 0

    def current(self, cpu: int) -> Task:
        """Return the task that runs on a processor, by the kernel's number of the processor."""
        address = self._target.word(self.offset_of(cpu) + self._facts.current & (1 << 64) - 1, _WORD)
        return NOBODY if not address else self.task_at(address)

    def ancestors(self, address: int) -> Iterator[int]:
        """Iterate over the process ids of the task whose task_struct is at ``address`` and of running ancestors."""
        for _ in range(_ANCESTORS_MAX):
            yield self._target.word(address + self._facts.layout.tgid, 4) or 0
            parent = self._target.word(address + self._facts.layout.parent, _WORD)
            if not parent or parent == address:
                return
            address = parent

    def task_at(self, address: int) -> Task:
        """Return the task whose structure is at an address."""
        layout, word = self._facts.layout, self._target.word
        credentials = word(address + layout.cred, _WORD) or 0
        stack = word(address + layout.stack, _WORD) or 0
        space = word(address + layout.mm, _WORD) or 0
        return Task(
            address,
            word(address + layout.tgid, 4) or 0,
            word(address + layout.pid, 4) or 0,
            (word(credentials + layout.uid, 4) or 0) if credentials else 0,
            self._target.read(address + layout.comm, _COMM_SIZE).partition(b"\0")[0],
            stack + _STACK_SIZE - _SAVED_SIZE if stack and space else 0,
            space,
        )
