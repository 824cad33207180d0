"""``Context`` of a handler on a processor of a stopped machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guest_processes import NOBODY
from dprobes.engines.gdb.machine.privileged_registers import MONITORED
from dprobes.engines.gdb.stub_context import StubContext
from dprobes.vm import AddressFault

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from dprobes.arch import Architecture
    from dprobes.engines.gdb.machine.guest_processes import Task, TaskReader
    from dprobes.engines.gdb.machine.guest_stacks import KernelStacks
    from dprobes.engines.gdb.machine.machine_target import MachineTarget
    from dprobes.engines.gdb.machine.privileged_registers import Privileged
    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_registers import Registers, StubProcessor

__all__ = ["MachineContext"]

_RING = 3
_WORD = 8
_SAVED = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss"),
)
"""User-mode registers, in the order in which the kernel saves them at the end of its stack (struct pt_regs)."""


class MachineContext(StubContext):
    """
    Context of a handler on the processor that ``select`` chose.

    ``tasks`` looks up the current task on demand; None if the kernel is unknown.
    """

    def __init__(
        self,
        target: MachineTarget,
        architecture: Architecture,
        processor: StubProcessor,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(target, architecture, processor, warn)
        self._machine = target
        self.tasks: TaskReader | None = None
        self.privileged: Privileged | None = None
        """Access to system registers and ports, None if the stub has no monitor."""
        self.stacks_of_kernel: KernelStacks | None = None
        """Unwinder of kernel stacks, None if the kernel is unknown."""
        self._own_names = {register.index: register.name for register in architecture.registers}
        self._cpu: int | None = None
        self._task: Task | None = None

    def select(self, thread: ThreadId | None, registers: Registers, process: int) -> None:
        """Select the processor ``thread`` for all further calls; ``process`` is the id of the process that it runs."""
        super().select(thread, registers, process)
        self._cpu = self._task = None
        if self.privileged is not None:
            self.privileged.forget()

    # The running task

    def cpu(self) -> int:
        if self._cpu is None:
            if self.tasks is None:
                self._cpu = 0 if self.thread is None else self.thread.thread - 1
            else:
                self._cpu = self.tasks.cpu_of(self.thread, self._registers)
        return self._cpu

    @property
    def current(self) -> Task:
        """The kernel's current task on the processor."""
        if self._task is None:
            self._task = NOBODY if self.tasks is None else self.tasks.current(self.cpu())
        return self._task

    def pid(self) -> int:
        return self.current.pid

    def tid(self) -> int:
        return self.current.tid

    def uid(self) -> int:
        return self.current.uid

    def task(self) -> int:
        return self.current.address

    def process_name(self) -> bytes:
        return self.current.name

    def cpu_variables(self) -> MutableSequence[int]:
        assert self.program is not None
        return self.program.variables_of_cpu(self.cpu())

    # Registers of the program that the kernel works for

    @property
    def is_in_kernel(self) -> bool:
        """True if the processor is in kernel mode now."""
        return not self._registers.value("cs") & _RING

    def register(self, index: int, *, user: bool) -> int:
        if user and self.tasks is not None and self.is_in_kernel:
            place = self._saved_place(index)
            return (self._target.word(place, _WORD) or 0) if place is not None else 0
        if self._own_names.get(index) in MONITORED and self.privileged is not None:
            return self.privileged.value(self._own_names[index], self.thread)
        return super().register(index, user=user)

    def selected_register(self, index: int, selector: int) -> tuple[int, ...]:
        if self.privileged is None:
            return super().selected_register(index, selector)
        return self.privileged.selected(self._own_names[index], selector, self.thread, self._registers)

    def set_register(self, index: int, value: int, *, user: bool) -> None:
        if user and self.tasks is not None and self.is_in_kernel:
            if (place := self._saved_place(index)) is not None:
                self._target.write(place, value.to_bytes(_WORD, "little"))
            return
        super().set_register(index, value, user=user)

    def _saved_place(self, index: int) -> int | None:
        name = self.names.get(index)
        saved = self.current.saved
        return saved + _WORD * _SAVED.index(name) if saved and name in _SAVED else None

    def kernel_stack(self) -> list[int]:
        return super().kernel_stack() if self.stacks_of_kernel is None else self.stacks_of_kernel.stack(self._registers)

    def user_stack(self, frames: int) -> list[int]:
        assert self.program is not None
        if self.program.stacks_of_programs is None:
            return super().user_stack(frames)
        task = self.current
        if not task.space:
            return []
        if self.is_in_kernel:
            values = {
                name: self._target.word(task.saved + _WORD * place, _WORD) or 0 for place, name in enumerate(_SAVED)
            }
        else:
            values = {name: self._registers.value(name) for name in _SAVED}
        return self.program.stacks_of_programs.stack(values, task.space, frames)

    # Memory

    def read(self, address: int, size: int) -> bytes:
        data = self._machine.read(address, size)
        if len(data) < size:
            raise AddressFault(address + len(data))
        return data

    def is_writable(self, address: int) -> bool:
        found = self._machine.translate(self._registers, address)
        return found is not None and found.is_writable

    def linear_address(self, selector: int, offset: int, size: int = 0, *, write: bool = False) -> int:
        if self.privileged is None:
            return super().linear_address(selector, offset, size, write=write)
        return self.privileged.linear_address(selector, offset, size, self.thread, self._registers, write=write)

    def read_physical(self, address: int, size: int) -> bytes:
        data = self._machine.read_device(address, size)
        if len(data) < size:
            raise AddressFault(address + len(data))
        return data

    def write_physical(self, address: int, data: bytes) -> None:
        if not self._machine.write_physical(address, data):
            raise AddressFault(address)

    def physical_address(self, address: int) -> int:
        found = self._machine.translate(self._registers, address)
        if found is None:
            raise AddressFault(address)
        return found.physical

    def read_port(self, port: int, size: int) -> int:
        if self.privileged is None:
            return super().read_port(port, size)
        return self.privileged.monitor.read_port(port, size)

    def write_port(self, port: int, size: int, value: int) -> None:
        if self.privileged is None:
            super().write_port(port, size, value)
        else:
            self.privileged.monitor.write_port(port, size, value)

    def symbol_address(self, symbol: str) -> int:
        address = super().symbol_address(symbol)
        assert self.program is not None
        if address in self.program.per_cpu and self.tasks is not None:
            return address + self.tasks.offset_of(self.cpu()) & (1 << 64) - 1
        return address
