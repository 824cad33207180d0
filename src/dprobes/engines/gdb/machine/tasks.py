"""Who runs on a processor of a machine: the kernel's task, and what that says of its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.machine.kernelfacts import KernelFacts
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.registers import Registers
    from dprobes.engines.gdb.stopreplies import ThreadId

__all__ = ["NOBODY", "Task", "TaskReader"]

_WORD = 8
_ANCESTORS_MAX = 1 << 10
_NAME = 16
"""TASK_COMM_LEN"""
_STACK_SIZE = 1 << 14
"""THREAD_SIZE of x86-64 without KASAN (arch/x86/include/asm/page_64_types.h)."""


class Task(NamedTuple):
    """
    A task: where its structure is, and who it is.

    ``saved`` is where the registers of its program are saved, and ``space`` where its address space is; 0: nowhere.
    """

    address: int
    pid: int
    tid: int
    uid: int
    name: bytes
    saved: int
    space: int


NOBODY = Task(0, 0, 0, 0, b"", 0, 0)
"""Who runs where no kernel is known."""

_SAVED_SIZE = 168
"""sizeof(struct pt_regs) of x86-64."""


class TaskReader:
    """Find out who runs on processors of a machine whose kernel is known by ``facts``."""

    def __init__(self, target: MachineTarget, facts: KernelFacts, processors: int) -> None:
        self._target, self._facts, self._processors = target, facts, processors

    def cpu_of(self, thread: ThreadId | None, registers: Registers) -> int:
        """Return the kernel's number of a processor: that whose own data one of its segments leads to."""
        bases = {registers.value("gs_base"), registers.value("k_gs_base")}
        for cpu in range(self._processors):
            if self.offset_of(cpu) in bases:
                return cpu
        return 0 if thread is None else thread.thread - 1

    def offset_of(self, cpu: int) -> int:
        """Return how far the data of a processor is from where its symbols say."""
        return self._target.word(self._facts.cpu_offsets + cpu * _WORD, _WORD) or 0

    def current(self, cpu: int) -> Task:
        """Return who runs on a processor, by the kernel's number of it."""
        address = self._target.word(self.offset_of(cpu) + self._facts.current & (1 << 64) - 1, _WORD)
        return NOBODY if not address else self.task_at(address)

    def ancestors(self, address: int) -> Iterator[int]:
        """Iterate over the process ids of a task and its parents, as far as these have not ended."""
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
            self._target.read(address + layout.comm, _NAME).partition(b"\0")[0],
            stack + _STACK_SIZE - _SAVED_SIZE if stack and space else 0,
            space,
        )
