"""
The processes of a machine and what they have mapped, by its kernel's own structures.

::

    init_task ─► tasks ─► task_struct ─► mm_struct ─► mm_mt ─► vm_area_struct ─► file ─► dentry, inode
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.mapletree import MapleTree
from dprobes.engines.gdb.machine.pagetables import translate
from dprobes.errors import TargetError
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.machine.kernelfacts import KernelFacts
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.machine.spacelayout import SpaceLayout

__all__ = ["AddressSpace", "AddressSpaces", "MappedFile"]

_WORD = 8
_EXECUTABLE = 4
"""VM_EXEC"""
_PAGE_BITS = 12
_NAME_MAX = 256
_TASKS_MAX = 1 << 22


class AddressSpace(NamedTuple):
    """An address space: where its structure is, and the process that it was found by."""

    address: int
    pid: int


class MappedFile(NamedTuple):
    """A part of a file in an address space: from ``start`` to ``end`` there is what the file has at ``offset``."""

    space: int
    start: int
    end: int
    offset: int
    is_code: bool
    name: bytes
    inode: int


class AddressSpaces:
    """Look at the processes of a ``target`` that stands still, whose kernel is known by ``facts``."""

    def __init__(self, target: MachineTarget, facts: KernelFacts, layout: SpaceLayout) -> None:
        self._target, self._facts, self._layout = target, facts, layout

    def _word(self, address: int) -> int:
        return self._target.word(address, _WORD) or 0

    def __iter__(self) -> Iterator[AddressSpace]:
        """Iterate over those of all processes; of threads that share one, the first is named."""
        task_layout, head = self._facts.layout, self._facts.first_task + self._layout.tasks
        at = self._word(head)
        for _ in range(_TASKS_MAX):
            if at in (head, 0):
                return
            task = at - self._layout.tasks
            if space := self._word(task + task_layout.mm):
                yield AddressSpace(space, self._target.word(task + task_layout.tgid, 4) or 0)
            at = self._word(at)

    def of_task(self, task: int) -> int:
        """Return where the address space of a task is, 0 if it has none."""
        return self._word(task + self._facts.layout.mm) if task else 0

    def _tree(self, space: int) -> MapleTree:
        return MapleTree(self._target.read, self._layout.tree, space + self._layout.mappings)

    def file_at(self, space: int, address: int) -> MappedFile | None:
        """Return what file is mapped at an address, None if none is, or that cannot be read."""
        try:
            area = self._tree(space).entry_at(address)
        except TargetError:
            return None
        return self.mapped_file(area) if area else None

    def code_files(self, space: int) -> Iterator[MappedFile]:
        """Iterate over the files that are mapped as code, by their addresses; what cannot be read is the end."""
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
        """Return the file of a mapping, by the address of its structure; None if it has none."""
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
            self._target.read(name, _NAME_MAX).partition(b"\0")[0],
            self._word(file + layout.inode),
        )

    def read(self, space: int, address: int, size: int) -> bytes:
        """Return memory of an address space; less if it is not all there, because nobody has asked for it yet."""
        tables = self._word(space + self._facts.layout.pgd)
        if self._facts.tables is None or not tables:
            return b""
        root = translate(self._target.entry_at, self._facts.tables, self._facts.paging, tables)
        if root is None:
            return b""
        return self._target.read_large(root.physical, self._facts.paging, address, size)
