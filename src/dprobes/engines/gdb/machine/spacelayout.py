"""Where a kernel keeps what its processes have mapped: members of its structures, by its own type information (BTF)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.mapletree import MapleLayout
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.target.btf import Btf

__all__ = ["SpaceLayout"]


@dataclass(frozen=True, slots=True)
class SpaceLayout:
    """
    Hold where members begin in their structures.

    ``tasks`` is the place of a process in the list of all, ``mappings`` the tree of an address space, ``space`` to
    ``file`` what a mapping says, ``dentry`` and ``inode`` what a file says, and ``name`` the name in a directory.
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
        """Return what a kernel's types say; raise ``TargetError`` if a structure is another one than is known here."""
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
