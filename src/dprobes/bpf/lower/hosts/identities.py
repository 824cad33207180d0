"""Who makes a hit, and when, in eBPF: process, thread and user ids, CPU, task, name, and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.asm.isa import Alu, Helper, Jump, Register, Size
from dprobes.bpf.layout import NAME_SIZE
from dprobes.bpf.lower.state.handlerstate import Field
from dprobes.bpf.lower.state.stack import SCRATCH

if TYPE_CHECKING:
    from dprobes.bpf.asm.assembler import Assembler
    from dprobes.bpf.lower.request import Request

__all__ = ["Identities"]

_NAMESPACE_IDS = -32
"""Where on the stack ``struct bpf_pidns_info`` is put: u32 thread id, u32 process id."""


class Identities:
    """Write what loads them; the result is in R0, and R1-R5 are taken."""

    _asm: Assembler
    _request: Request
    _keeps_ids: bool
    """Whether the ids are worked out before the handler starts, for a namespace that is not the initial one."""

    def prepare_ids(self) -> None:
        """Note the ids in the handler's namespace before it starts; takes R0-R5."""
        asm = self._asm
        assert self._request.namespace is not None
        device, inode = self._request.namespace
        other, done = asm.label(), asm.label()
        asm.mov(Register.R1, device)
        asm.mov(Register.R2, inode)
        asm.mov(Register.R3, Register.R10)
        asm.alu(Alu.ADD, Register.R3, _NAMESPACE_IDS)
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
        asm.mov(Register.R1, Register.R0)
        asm.alu(Alu.RSH, Register.R1, 32)
        asm.store(SCRATCH, Field.PID, Register.R1)
        asm.mov(Register.R0, Register.R0, wide=False)
        asm.store(SCRATCH, Field.TID, Register.R0)
        asm.place(done)

    def pid(self) -> None:
        """Load the process id."""
        if self._keeps_ids:
            self._asm.load(Register.R0, SCRATCH, Field.PID)
            return
        self.global_pid()

    def tid(self) -> None:
        """Load the thread id."""
        if self._keeps_ids:
            self._asm.load(Register.R0, SCRATCH, Field.TID)
            return
        self.global_tid()

    def global_pid(self) -> None:
        """Load the process id of the initial namespace."""
        self._asm.call(Helper.GET_CURRENT_PID_TGID)
        self._asm.alu(Alu.RSH, Register.R0, 32)

    def global_tid(self) -> None:
        """Load the thread id of the initial namespace."""
        self._asm.call(Helper.GET_CURRENT_PID_TGID)
        self._asm.mov(Register.R0, Register.R0, wide=False)

    def uid(self) -> None:
        """Load the real user id."""
        self._asm.call(Helper.GET_CURRENT_UID_GID)
        self._asm.mov(Register.R0, Register.R0, wide=False)

    def cpu(self) -> None:
        """Load the number of the CPU."""
        self._asm.call(Helper.GET_SMP_PROCESSOR_ID)

    def task(self) -> None:
        """Load the address of the kernel's task structure."""
        self._asm.call(Helper.GET_CURRENT_TASK)

    def time(self) -> None:
        """Load CLOCK_MONOTONIC in nanoseconds."""
        self._asm.call(Helper.KTIME_GET_NS)

    def process_name(self) -> None:
        """Write ``NAME_SIZE`` bytes with the name of the thread to R1, zeros behind it."""
        # Kernels have left what is behind the name as it was (seen with Linux 6.1).
        for position in range(0, NAME_SIZE, 8):
            self._asm.store(Register.R1, position, 0)
        self._asm.mov(Register.R2, NAME_SIZE)
        self._asm.call(Helper.GET_CURRENT_COMM)
