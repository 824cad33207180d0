"""
Offsets in the kernel's task_struct and vm_area_struct, and the kernel's identification of mapped files.

stat(2) may return a device and inode number that differ from those in a mapping: overlay file systems and btrfs use
their own. So a file is mapped here, and a BPF program with the same code as in handlers reads the numbers from the
mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Helper, Register, Size
from dprobes.bpf.lower.hosts.vma_lookup import Answer, VmaQuestions
from dprobes.bpf.lower.lowering_request import MappedModule, PagingLayout, TaskLayout, VmaLayout
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptor, load
from dprobes.engines.ebpf.kernel.kernel_features import Feature, KeptAnswers
from dprobes.errors import DprobesError, EngineError, TargetError
from dprobes.platform.linux.bpf_calls import ProgramFlag, ProgramRunner, ProgramType
from dprobes.platform.linux.procfs import without_waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.engines.ebpf.kernel.kernel_features import Features, KernelTypes
    from dprobes.target.elf.elf_file import ElfFile

__all__ = ["FileIdentifier", "mapped_module", "paging_layout", "task_layout", "vma_layout"]


def task_layout(features: Features) -> TaskLayout | None:
    """Return the offsets in task_struct of the data for records, or None if BPF programs cannot read these."""
    # Tasks for bpf_find_vma come from the same helper.
    if Feature.FIND_VMA not in features or Feature.BTF not in features or not features.remembered(_is_readable):
        return None
    return _layout(features.types)


def _layout(types: KernelTypes) -> TaskLayout:
    task, members = "task_struct", ("pid", "tgid", "comm", "cred")
    tid, pid, name, cred = (types.member_offset(task, member) for member in members)
    return TaskLayout(tid=tid, pid=pid, name=name, cred=cred, uid=types.member_offset("cred", "uid"))


def _is_readable(features: Features) -> bool:
    """
    Return whether sleepable and other BPF programs may read the fields of ``TaskLayout``.

    The result is cached until the next boot.
    """
    kinds = [ProgramFlag.NONE]
    if Feature.SLEEPABLE_UPROBE in features:
        kinds.append(ProgramFlag.SLEEPABLE)
    kept, key = KeptAnswers("task-fields"), f"readable by {len(kinds)}"
    if (known := kept.get(key)) is None:
        known = int(_are_loaded(features.types, kinds))
        kept.add(key, known)
    return bool(known)


def _are_loaded(types: KernelTypes, kinds: Iterable[ProgramFlag]) -> bool:
    try:
        task = _layout(types)
        for flags in kinds:
            os.close(load(_reader(task).assemble(), {}, ProgramType.KPROBE, flags=flags))
    except (DprobesError, OSError):
        return False
    return True


def _reader(task: TaskLayout) -> Assembler:
    asm, read, found = Assembler(), Register.R1, Register.R0
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    for place in (task.tid, task.pid):
        asm.load(read, found, place, Size.W)
    asm.load(read, found, task.name + 1, Size.B)
    asm.load(read, found, task.cred)
    asm.load(read, read, task.uid, Size.W)
    asm.mov(found, 0)
    asm.exit()
    return asm


def vma_layout(types: KernelTypes) -> VmaLayout:
    """Return offsets in vm_area_struct for handlers; raise OSError or ``TargetError`` if the BTF lacks them."""
    return VmaLayout(
        start=types.member_offset("vm_area_struct", "vm_start"),
        pages=types.member_offset("vm_area_struct", "vm_pgoff"),
        flags=types.member_offset("vm_area_struct", "vm_flags"),
        file=types.member_offset("vm_area_struct", "vm_file"),
        inode=types.member_offset("file", "f_inode"),
        number=types.member_offset("inode", "i_ino"),
        super_block=types.member_offset("inode", "i_sb"),
        device=types.member_offset("super_block", "s_dev"),
    )


def paging_layout(features: Features) -> PagingLayout | None:
    """
    Return the layout by which handlers find out whether a user-space server delivers a page.

    Return None if they cannot.
    """
    if Feature.FIND_VMA not in features or Feature.BTF not in features:
        return None
    types = features.types
    try:
        return PagingLayout(
            end=types.member_offset("vm_area_struct", "vm_end"),
            file=types.member_offset("vm_area_struct", "vm_file"),
            userfault=_userfault(types),
            inode=types.member_offset("file", "f_inode"),
            super_block=types.member_offset("inode", "i_sb"),
            magic=types.member_offset("super_block", "s_magic"),
        )
    except TargetError:
        return None


def _userfault(types: KernelTypes) -> int | None:
    try:
        return types.member_offset("vm_area_struct", "vm_userfaultfd_ctx.ctx")
    except TargetError:
        return None  # a structure without members: CONFIG_USERFAULTFD is off


_QUESTION = struct.Struct("=QqQQ")
"""Argument of the program, an address, and its results: an error, and device and inode number of the mapped file."""


def _identification(layout: VmaLayout) -> Assembled:
    asm = Assembler()
    questions = VmaQuestions(asm, layout)
    asm.mov(Register.R6, Register.R1)
    asm.load(Register.R2, Register.R6, 0)
    questions.ask()
    asm.store(Register.R6, 8, Register.R0)
    for offset, word in ((16, Answer.DEVICE), (24, Answer.INODE)):
        asm.load(Register.R1, Register.R10, word)
        asm.store(Register.R6, offset, Register.R1)
    asm.mov(Register.R0, 0)
    asm.exit()
    questions.write_callback()
    return asm.assemble()


class FileIdentifier(Descriptor):
    """BPF program that returns the kernel's identification of files."""

    def __init__(self, layout: VmaLayout) -> None:
        program = _identification(layout)
        super().__init__(load(program, {}, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE, name="identify"))

    def identity(self, path: str) -> tuple[int, int]:
        """
        Return the device and inode number of a file, as mappings have them.

        Raise OSError if the file cannot be mapped, ``EngineError`` if the program fails.
        """
        # A private writable mapping, because ctypes returns addresses of writable ones only; it is never written.
        with (
            open(path, "rb", opener=without_waiting) as file,
            mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as mapping,
        ):
            view = (ctypes.c_char * 1).from_buffer(mapping)
            try:
                argument = bytearray(_QUESTION.pack(ctypes.addressof(view), 0, 0, 0))
            finally:
                del view
            ProgramRunner(self.fd, argument).run()
        _, error, device, inode = _QUESTION.unpack(argument)
        if error or not inode:
            raise EngineError(f"the kernel does not say how it identifies '{path}' where it is mapped")
        return device, inode


def mapped_module(identifier: FileIdentifier, elf: ElfFile, paths: Sequence[str]) -> MappedModule:
    """Return the data by which BPF programs recognize the module ``elf`` in any of its files, ``paths``."""
    segments = sorted(
        (segment.offset, segment.vaddr - segment.offset) for segment in elf.load_segments if segment.executable
    )
    return MappedModule(tuple({identifier.identity(path): None for path in paths}), tuple(segments))
