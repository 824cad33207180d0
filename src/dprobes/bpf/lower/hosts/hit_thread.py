"""Thread of a hit, its time, and the filter, in eBPF: process, thread and user ids, CPU, task, name, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.bpf_instructions import Alu, Helper, Jump, Register, Size
from dprobes.bpf.lower.state.handler_state import SCRATCH, Field
from dprobes.bpf.map_layouts import NAME_SIZE, SNAPSHOT_REGISTERS, MapName

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.bpf.bpf_assembler import Assembler, Label
    from dprobes.bpf.lower.lowering_request import Filter, Request

__all__ = [
    "REGISTER_OFFSETS",
    "Identities",
    "copy_task_registers",
    "leave_kernel",
    "read_kernel_word",
    "task_registers",
    "write_filter",
]

# ``struct pt_regs``: offsets of the registers, and the registers with which the current thread entered the kernel.


REGISTER_OFFSETS = {
    "r15": 0, "r14": 8, "r13": 16, "r12": 24, "ebp": 32, "ebx": 40, "r11": 48, "r10": 56, "r9": 64, "r8": 72, "eax": 80,
    "ecx": 88, "edx": 96, "esi": 104, "edi": 112, "accessed": 120, "eip": 128, "cs": 136, "eflags": 144, "esp": 152,
    "ss": 160,
}  # fmt: skip
"""
Offsets of registers in ``struct pt_regs`` (arch/x86/include/asm/ptrace.h), for 32-bit processes as well.

At a checked access, the place of ``orig_ax`` has the distance of the accessed memory (``AccessCheck``).
"""

USER_MODE = 3
"""Privilege level (CPL) in ``cs``. Both bits are set in user mode."""


def task_registers(asm: Assembler, nobody: Label) -> None:
    """
    Set R0 to the address of the registers with which the current thread entered the kernel. Clobbers R1-R5.

    Go to ``nobody`` in a thread of the kernel, whose registers are zeros (copy_thread in arch/x86/kernel/process.c).
    """
    asm.call(Helper.GET_CURRENT_TASK_BTF)
    asm.mov(Register.R1, Register.R0)
    asm.call(Helper.TASK_PT_REGS)
    leave_kernel(asm, Register.R0, nobody)


def leave_kernel(asm: Assembler, registers: Register, in_kernel: Label) -> None:
    """Go to ``in_kernel`` unless the registers at an address are user-mode registers. Clobbers R1."""
    asm.load(Register.R1, registers, REGISTER_OFFSETS["cs"])
    asm.alu(Alu.AND, Register.R1, USER_MODE)
    asm.jump_if(Jump.JNE, Register.R1, USER_MODE, in_kernel)


def read_kernel_word(asm: Assembler, base: Register, distance: int, room: tuple[Register, int], fault: Label) -> None:
    """
    Load the word of kernel memory at ``base + distance`` to R3, via the word at ``room``. Clobbers R0-R5.

    Go to ``fault`` if it cannot be read.
    """
    asm.add(Register.R3, base, distance)
    asm.add(Register.R1, *room)
    asm.mov(Register.R2, 8)
    asm.call(Helper.PROBE_READ_KERNEL)
    asm.jump_if(Jump.JNE, Register.R0, 0, fault)
    asm.load(Register.R3, *room)


def copy_task_registers(asm: Assembler, nobody: Label, to: Callable[[Register], None]) -> None:
    """Write the registers of ``task_registers`` to the address that ``to`` loads; clobbers R0-R5."""
    task_registers(asm, nobody)
    to(Register.R2)
    for offset in range(0, 8 * SNAPSHOT_REGISTERS, 8):
        asm.copy_from(Register.R0, offset, Register.R2, offset)


_NAMESPACE_IDS = -32
"""Stack offset of a ``struct bpf_pidns_info``: u32 thread id, u32 process id."""


class Identities:
    """
    Writer of code that loads pid, tid, uid, CPU, time and ``task_struct`` address to R0. Clobbers R1-R5.

    ``process_name`` writes to the address in R1.
    """

    _asm: Assembler
    _request: Request
    _keeps_ids: bool
    """True if the ids are determined before the handler starts, for a namespace that is not the initial one."""

    def prepare_ids(self) -> None:
        """Store the ids in the handler's namespace in the state; clobbers R0-R5."""
        asm = self._asm
        assert self._request.namespace is not None
        device, inode = self._request.namespace
        other, done = asm.label(), asm.label()
        asm.mov(Register.R1, device)
        asm.mov(Register.R2, inode)
        asm.add(Register.R3, Register.R10, _NAMESPACE_IDS)
        asm.mov(Register.R4, 8)
        asm.store(Register.R10, _NAMESPACE_IDS, 0)
        asm.call(Helper.GET_NS_CURRENT_PID_TGID)
        asm.jump_if(Jump.JNE, Register.R0, 0, other)
        asm.load(Register.R1, Register.R10, _NAMESPACE_IDS + 4, Size.W)
        asm.store(SCRATCH, Field.PID, Register.R1)
        asm.load(Register.R1, Register.R10, _NAMESPACE_IDS, Size.W)
        asm.store(SCRATCH, Field.TID, Register.R1)
        asm.jump(done)
        asm.place(other)  # a process of another namespace has no number in this one
        asm.call(Helper.GET_CURRENT_PID_TGID)
        asm.derive(Alu.RSH, Register.R1, Register.R0, 32)
        asm.store(SCRATCH, Field.PID, Register.R1)
        asm.mov(Register.R0, Register.R0, wide=False)
        asm.store(SCRATCH, Field.TID, Register.R0)
        asm.place(done)

    def pid(self) -> None:
        """Load the process id to R0; clobbers R1-R5."""
        if self._keeps_ids:
            self._asm.load(Register.R0, SCRATCH, Field.PID)
            return
        self.global_pid()

    def tid(self) -> None:
        """Load the thread id to R0; clobbers R1-R5."""
        if self._keeps_ids:
            self._asm.load(Register.R0, SCRATCH, Field.TID)
            return
        self.global_tid()

    def global_pid(self) -> None:
        """Load the process id of the initial namespace to R0; clobbers R1-R5."""
        self._asm.call(Helper.GET_CURRENT_PID_TGID)
        self._asm.alu(Alu.RSH, Register.R0, 32)

    def global_tid(self) -> None:
        """Load the thread id of the initial namespace to R0; clobbers R1-R5."""
        self._asm.call(Helper.GET_CURRENT_PID_TGID)
        self._asm.mov(Register.R0, Register.R0, wide=False)

    def uid(self) -> None:
        """Load the real user id to R0; clobbers R1-R5."""
        self._asm.call(Helper.GET_CURRENT_UID_GID)
        self._asm.mov(Register.R0, Register.R0, wide=False)

    def cpu(self) -> None:
        """Load the number of the CPU to R0; clobbers R1-R5."""
        self._asm.call(Helper.GET_SMP_PROCESSOR_ID)

    def task(self) -> None:
        """Load the address of the current thread's ``task_struct`` to R0; clobbers R1-R5."""
        self._asm.call(Helper.GET_CURRENT_TASK)

    def time(self) -> None:
        """Load CLOCK_MONOTONIC in nanoseconds to R0; clobbers R1-R5."""
        self._asm.call(Helper.KTIME_GET_NS)

    def process_name(self) -> None:
        """Write the ``comm`` of the thread, padded with zeros to ``NAME_SIZE`` bytes, to R1. Clobbers R0-R5."""
        # Kernels have left the bytes after the name unchanged (seen with Linux 6.1).
        for position in range(0, NAME_SIZE, 8):
            self._asm.store(Register.R1, position, 0)
        self._asm.mov(Register.R2, NAME_SIZE)
        self._asm.call(Helper.GET_CURRENT_COMM)


# The filter of hits: the scope of a run, as programs test it.


_KEY = -4
_R = Register


def write_filter(asm: Assembler, scope: Filter, load_process: Callable[[], None], outside: Label) -> None:
    """
    Go to ``outside`` unless the running thread is in scope.

    ``load_process`` loads its process id to R0. Clobbers R0-R5.
    """
    if scope.processes or scope.excluded is not None:
        load_process()
        if scope.excluded is not None:
            asm.jump_if(Jump.JEQ, _R.R0, scope.excluded, outside)
    if scope.processes:
        asm.store(_R.R10, _KEY, _R.R0, Size.W)
        asm.look_up(MapName.SCOPE, _R.R10, _KEY, outside)
    if scope.cgroup is not None:
        identity, level = scope.cgroup
        asm.mov(_R.R1, level)
        asm.call(Helper.GET_CURRENT_ANCESTOR_CGROUP_ID)
        asm.mov(_R.R1, identity)
        asm.jump_if(Jump.JNE, _R.R0, _R.R1, outside)
    if scope.uid is not None:
        asm.call(Helper.GET_CURRENT_UID_GID)
        asm.mov(_R.R1, scope.uid)
        asm.jump_if(Jump.JNE, _R.R0, _R.R1, outside, wide=False)
