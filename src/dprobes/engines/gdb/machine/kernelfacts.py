"""What is known of the kernel of a machine while a program runs: where it keeps its tasks, CPUs and page tables."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.spacelayout import SpaceLayout
from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guestkernel import GuestKernel
    from dprobes.engines.gdb.machine.kernellayout import KernelLayout
    from dprobes.engines.gdb.machine.pagetables import Paging
    from dprobes.target.kernel.kallsyms import Kallsyms

__all__ = ["KernelFacts"]

_CURRENT = ("current_task", "pcpu_hot")
"""
Where each CPU has its task. Linux kernel commit e57ef2ed97c1 ("x86: Put hot per CPU variables into a struct") (in v6.2)
made it the first member of another variable; it has been a variable of its own again since v6.15.
"""
_TABLES = "init_top_pgt"
_MODULES = "modules"
_TASKS = "init_task"
_UNWINDING = ("__start_orc_unwind_ip", "__stop_orc_unwind_ip", "__start_orc_unwind")
_ELEMENT = 4
"""Bytes of an element of the table of addresses."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """
    Hold addresses of a kernel.

    ``current`` is that of each CPU's task, without the CPU's offset, and ``cpu_offsets`` where these are. ``tables`` is
    where its own page tables, of the form ``paging``, are in physical memory, None if that is not known. ``text`` is
    where its code begins. ``modules`` is the head of their list,
    and ``first_task`` the idle task of the first CPU. ``unwinding`` is where its unwind tables are, addresses and
    entries, and how many, None if it has none; ``symbols`` are its own.
    ``spaces`` is how it keeps what processes have mapped, None if that is not known. ``left_out`` says what is unknown
    of its modules, nothing for a kernel that is in order.
    """

    layout: KernelLayout
    current: int
    cpu_offsets: int
    tables: int | None
    paging: Paging
    text: int
    modules: int
    first_task: int
    unwinding: tuple[int, int, int] | None
    symbols: Kallsyms
    spaces: SpaceLayout | None
    left_out: str

    @classmethod
    def of(cls, kernel: GuestKernel) -> KernelFacts:
        """Return what is found in a kernel."""

        def address_of(*names: str) -> int:
            return next((found[0].address for name in names if (found := kernel.symbols.find(name, ""))), 0)

        start, end, entries = (address_of(name) for name in _UNWINDING)
        spaces = None
        with contextlib.suppress(TargetError):
            spaces = SpaceLayout.of(kernel.types)
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
            (start, entries, (end - start) // _ELEMENT) if entries and 0 < start < end else None,
            kernel.symbols,
            spaces,
            kernel.left_out,
        )
