"""What is known of the kernel of a machine while a program runs: where it keeps its tasks, CPUs and page tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guestkernel import GuestKernel
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout
    from dprobes.engines.gdb.machine.pagetables import Paging

__all__ = ["KernelFacts"]

_CURRENT = ("current_task", "pcpu_hot")
"""
Where each CPU has its task. Linux kernel commit e57ef2ed97c1 ("x86: Put hot per CPU variables into a struct") (in v6.2)
made it the first member of another variable; it has been a variable of its own again since v6.15.
"""
_TABLES = "init_top_pgt"
_MODULES = "modules"
_TASKS = "init_task"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """
    Hold addresses of a kernel.

    ``current`` is that of each CPU's task, without the CPU's offset, and ``cpu_offsets`` where these are. ``tables`` is
    where its own page tables, of the form ``paging``, are in physical memory, None if that is not known. ``text`` is
    where its code begins. ``modules`` is the head of their list,
    and ``first_task`` the idle task of the first CPU.
    """

    layout: KernelLayout
    current: int
    cpu_offsets: int
    tables: int | None
    paging: Paging
    text: int
    modules: int
    first_task: int

    @classmethod
    def of(cls, kernel: GuestKernel) -> KernelFacts:
        """Return what is found in a kernel."""

        def address_of(*names: str) -> int:
            return next((found[0].address for name in names if (found := kernel.symbols.find(name, ""))), 0)

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
        )
