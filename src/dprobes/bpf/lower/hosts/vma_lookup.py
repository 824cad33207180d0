"""
Lookup of the mapping at an address, in eBPF: ``bpf_find_vma``, with callbacks that follow kernel structures.

Some pages come from a server in user space, which may never deliver them. They are pages of a file on FUSE, which any
user can mount, or of memory registered with userfaultfd(2). A handler that reads such a page sleeps until it is
delivered, and its probe cannot be removed. So in processes of other users, handlers wait only for pages that the kernel
itself provides. A race remains, as with ptrace (``served_pages``): a thread can change the mapping between the lookup
and the read.

The helper does not wait for the lock of the mappings (mmap_lock). While interrupts are disabled, only one call
succeeds. Further calls return EBUSY, which the caller must handle.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.map_layouts import SAMPLE_SIZE, MapName

if TYPE_CHECKING:
    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.lowering_request import Abilities, MappedModule, VmaLayout

__all__ = ["BUSY", "VM_WRITE", "Answer", "PagingQuestion", "VmaQuestions", "ask_once", "write_module_test"]

BUSY = -16
"""Return value of the helper if it cannot look up the mapping (-EBUSY)."""

VM_WRITE = 1 << 1
"""The flag of a mapping that may be written (include/linux/mm.h)."""

_R = Register
_PAGE_BITS = 12

_ANSWER = -96
_ADDRESS = -56
"""Stack offsets of the answer and of the address, below the data of handlers."""


class Answer(IntEnum):
    """
    Offsets from R10, the end of the BPF stack frame, of the data about a mapping. All are 0 if nothing is mapped.

    ``FILE`` is not 0 for a mapping of a file; ``INODE`` and ``DEVICE`` (of its super block) identify the file.
    ``PAGES`` is the first page of the mapping in the file.
    """

    START = _ANSWER
    PAGES = _ANSWER + 8
    INODE = _ANSWER + 16
    DEVICE = _ANSWER + 24
    FLAGS = _ANSWER + 32


class VmaQuestions:
    """Lookups of mappings of the running process. ``write_callback`` must be called after all other code."""

    def __init__(self, asm: Assembler, layout: VmaLayout) -> None:
        self._asm = asm
        self._layout = layout
        self._callback: Label | None = None

    def ask(self) -> None:
        """Look up the mapping at the address in R2; R0 is 0, BUSY, or another error. Clobbers R0-R5."""
        asm = self._asm
        if self._callback is None:
            self._callback = asm.label()
        asm.store(_R.R10, _ADDRESS, _R.R2)
        for word in Answer:
            asm.store(_R.R10, word, 0)
        asm.call(Helper.GET_CURRENT_TASK_BTF)
        asm.mov(_R.R1, _R.R0)
        asm.load(_R.R2, _R.R10, _ADDRESS)
        asm.load_function(_R.R3, self._callback)
        asm.add(_R.R4, _R.R10, _ANSWER)
        asm.mov(_R.R5, 0)
        asm.call(Helper.FIND_VMA)

    def address(self, dst: Register) -> None:
        """Load the address of the last ``ask`` to ``dst``."""
        self._asm.load(dst, _R.R10, _ADDRESS)

    def write_callback(self) -> None:
        """Write the callback that the kernel calls with the ``vm_area_struct`` (R2) and the BPF stack (R3)."""
        if self._callback is None:
            return
        asm, layout, anonymous = self._asm, self._layout, self._asm.label()

        def keep(word: Answer) -> None:
            asm.store(_R.R3, word - _ANSWER, _R.R4)

        asm.function(self._callback)
        for word, offset in ((Answer.START, layout.start), (Answer.PAGES, layout.pages), (Answer.FLAGS, layout.flags)):
            asm.load(_R.R4, _R.R2, offset)
            keep(word)
        asm.jump_if_word(Jump.JEQ, _R.R2, layout.file, 0, anonymous, by=_R.R2)
        asm.load(_R.R2, _R.R2, layout.inode)
        asm.load(_R.R4, _R.R2, layout.number)
        keep(Answer.INODE)
        asm.load(_R.R2, _R.R2, layout.super_block)
        asm.load(_R.R4, _R.R2, layout.device, Size.W)
        keep(Answer.DEVICE)
        asm.place(anonymous)
        asm.exit(0)


_FAULT = -14
"""-EFAULT, the return value of helpers that read memory."""

_FUSE = 0x6573_5546
"""FUSE_SUPER_MAGIC (include/uapi/linux/magic.h)."""

_MAPPINGS_MAX = 4
"""Maximum number of mappings of the pages of one read."""

_END, _OWN_FRAME = -8, _R.R10


class PagingQuestion:
    """
    Check whether pages arrive without a server in user space.

    ``write_functions`` must be called after all other code.
    """

    def __init__(self, asm: Assembler, abilities: Abilities) -> None:
        self._asm = asm
        self._user = abilities.user
        self._layout = abilities.paging
        self._function: Label | None = None

    def ask(self) -> None:
        """
        Check R2 bytes at the address in R1. Clobbers R1-R5.

        R0 is 0 if a read does not wait for a server, and -EFAULT otherwise.
        """
        if self._function is None:
            self._function = self._asm.label()
        self._asm.call_function(self._function)

    def write_functions(self) -> None:
        """
        Write the function, and its callback, which gets a mapping (R2) and a word of the function's stack (R3).

        R7, the address of the handler's state, is unchanged.
        """
        if self._function is None:
            return
        asm, layout = self._asm, self._layout
        callback, comes, refused = asm.label(), asm.label(), asm.label()
        address, end, task = _R.R6, _R.R8, _R.R9
        asm.function(self._function)
        asm.mov(address, _R.R1)
        asm.add(end, _R.R1, _R.R2)
        asm.call(Helper.GET_CURRENT_UID_GID)
        asm.mov(_R.R1, self._user)
        asm.jump_if(Jump.JEQ, _R.R0, _R.R1, comes, wide=False)
        if layout is not None:
            asm.call(Helper.GET_CURRENT_TASK_BTF)
            asm.mov(task, _R.R0)
            for _ in range(_MAPPINGS_MAX):
                asm.store(_OWN_FRAME, _END, 0)
                asm.mov(_R.R1, task)
                asm.mov(_R.R2, address)
                asm.load_function(_R.R3, callback)
                asm.add(_R.R4, _OWN_FRAME, _END)
                asm.mov(_R.R5, 0)
                asm.call(Helper.FIND_VMA)
                asm.jump_if(Jump.JNE, _R.R0, 0, refused)
                asm.jump_if_word(Jump.JEQ, _OWN_FRAME, _END, 0, refused, by=address)
                asm.jump_if(Jump.JGE, address, end, comes)
        asm.place(refused)
        asm.exit(_FAULT)
        asm.place(comes)
        asm.exit(0)
        if layout is None:
            return
        in_memory, out = asm.label(), asm.label()
        asm.function(callback)
        if layout.userfault is not None:
            asm.jump_if_word(Jump.JNE, _R.R2, layout.userfault, 0, out)
        asm.jump_if_word(Jump.JEQ, _R.R2, layout.file, 0, in_memory)
        for offset in (layout.inode, layout.super_block, layout.magic):
            asm.load(_R.R1, _R.R1, offset)
        asm.jump_if(Jump.JEQ, _R.R1, _FUSE, out)
        asm.place(in_memory)
        asm.copy_from(_R.R2, layout.end, _R.R3, 0)
        asm.place(out)
        asm.exit(0)


_THREAD, _IP, _TIME, _FIRST_WORD = 0, 8, 16, 24
"""Offsets, in the memory of a sample, of the thread, the address, the time, and the first word of the answer."""

_REMEMBERED = (Answer.START, Answer.PAGES, Answer.INODE, Answer.DEVICE)

_SAME_INTERRUPT = 1_000_000
"""Nanoseconds within which two samples of a thread at the same address belong to the same interrupt."""


def ask_once(asm: Assembler, questions: VmaQuestions, cpus: int, busy: Label) -> None:
    """
    Look up the mapping at the interrupted address in R2; go to ``busy`` if that is not possible.

    The timers of several programs expire together, and in one interrupt only the first program's lookup succeeds. That
    program stores the result for the others. The result is all 0 if nothing is mapped. Clobbers R0-R5 and R7.
    """
    recall, known = asm.label(), asm.label()
    questions.ask()
    asm.mov(_R.R7, _R.R0)
    asm.call(Helper.GET_SMP_PROCESSOR_ID)
    asm.point_to_element(_R.R1, MapName.SAMPLES, _R.R0, cpus, SAMPLE_SIZE)
    asm.jump_if(Jump.JEQ, _R.R7, BUSY, recall)
    asm.mov(_R.R7, _R.R1)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.store(_R.R7, _THREAD, _R.R0)
    questions.address(_R.R1)
    asm.store(_R.R7, _IP, _R.R1)
    asm.call(Helper.KTIME_GET_NS)
    asm.store(_R.R7, _TIME, _R.R0)
    for number, word in enumerate(_REMEMBERED):
        asm.copy_from(_R.R10, word, _R.R7, _FIRST_WORD + 8 * number)
    asm.jump(known)
    asm.place(recall)
    asm.mov(_R.R7, _R.R1)
    asm.call(Helper.GET_CURRENT_PID_TGID)
    asm.load(_R.R1, _R.R7, _THREAD)
    asm.jump_if(Jump.JNE, _R.R0, _R.R1, busy)
    questions.address(_R.R1)
    asm.load(_R.R2, _R.R7, _IP)
    asm.jump_if(Jump.JNE, _R.R1, _R.R2, busy)
    asm.call(Helper.KTIME_GET_NS)
    asm.load(_R.R1, _R.R7, _TIME)
    asm.alu(Alu.SUB, _R.R0, _R.R1)
    asm.jump_if(Jump.JGT, _R.R0, _SAME_INTERRUPT, busy)
    for number, word in enumerate(_REMEMBERED):
        asm.copy_from(_R.R7, _FIRST_WORD + 8 * number, _R.R10, word)
    asm.place(known)


def write_module_test(asm: Assembler, questions: VmaQuestions, module: MappedModule, outside: Label) -> None:
    """
    Continue only if the address of the query lies in a module.

    R2 is then the file offset of the address, R3 the load bias. Clobbers R1-R3.
    """
    inside = asm.label()
    asm.load(_R.R1, _R.R10, Answer.INODE)
    asm.load(_R.R2, _R.R10, Answer.DEVICE)
    for device, inode in module.files:
        other = asm.label()
        asm.mov(_R.R3, device)
        asm.jump_if(Jump.JNE, _R.R2, _R.R3, other)
        asm.mov(_R.R3, inode)
        asm.jump_if(Jump.JEQ, _R.R1, _R.R3, inside)
        asm.place(other)
    asm.jump(outside)
    asm.place(inside)
    questions.address(_R.R3)
    asm.mov(_R.R2, _R.R3)
    asm.load(_R.R1, _R.R10, Answer.START)
    asm.alu(Alu.SUB, _R.R2, _R.R1)
    asm.load(_R.R1, _R.R10, Answer.PAGES)
    asm.alu(Alu.LSH, _R.R1, _PAGE_BITS)
    asm.alu(Alu.ADD, _R.R2, _R.R1)
    asm.alu(Alu.SUB, _R.R3, _R.R2)
    found = asm.label()
    for number, (first, distance) in enumerate(reversed(module.segments)):
        following = asm.label()
        if number + 1 < len(module.segments):
            asm.mov(_R.R1, first)
            asm.jump_if(Jump.JLT, _R.R2, _R.R1, following)
        asm.mov(_R.R1, distance)
        asm.alu(Alu.SUB, _R.R3, _R.R1)
        asm.jump(found)
        asm.place(following)
    asm.place(found)
