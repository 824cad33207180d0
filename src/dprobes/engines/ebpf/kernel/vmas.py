"""
How the kernel identifies files where they are mapped, and how programs find that out.

``os.stat`` may give other numbers than mappings have: overlay file systems and btrfs make up some of their own. So we
map a file and ask the kernel, with the very question that handlers will ask.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.asm.assembler import Assembler
from dprobes.bpf.asm.isa import Register
from dprobes.bpf.lower.hosts.vma import Answer, VmaQuestions
from dprobes.bpf.lower.request import MappedModule, PagingLayout, VmaLayout
from dprobes.engines.ebpf.kernel.descriptors import Descriptor
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.loader import load
from dprobes.engines.linux.bpfcalls import ProgramFlag, ProgramRunner, ProgramType
from dprobes.engines.linux.procfs import without_waiting
from dprobes.errors import EngineError, TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.bpf.asm.assembler import Assembled
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.ebpf.kernel.kerneltypes import KernelTypes
    from dprobes.target.elf.file import ElfFile

__all__ = ["FileIdentifier", "mapped_module", "paging_layout", "vma_layout"]


def vma_layout(types: KernelTypes) -> VmaLayout:
    """Return where the kernel has what it knows of mappings; raise OSError or ``TargetError`` if it does not say."""
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
    """Return how handlers find out who delivers a page; None where they cannot."""
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
"""The argument of the program: an address; then its answer: an error, the device and the inode of what lies there."""


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
    """Find out how the kernel identifies files."""

    def __init__(self, layout: VmaLayout) -> None:
        program = _identification(layout)
        super().__init__(load(program, {}, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE, name="identify"))

    def identity(self, path: str) -> tuple[int, int]:
        """Return device and inode of a file; raise OSError if it cannot be mapped."""
        # A private mapping that may be written, because ctypes gives no address of others; nothing is.
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
    """Return how programs recognise the module with the contents ``elf`` in its copies ``paths``."""
    segments = sorted(
        (segment.offset, segment.vaddr - segment.offset) for segment in elf.load_segments if segment.executable
    )
    return MappedModule(tuple({identifier.identity(path): None for path in paths}), tuple(segments))
