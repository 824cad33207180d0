"""Which of a kernel's unwind tables is about an address: its own, or that of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.guestmemory import GuestMemory
from dprobes.engines.gdb.machine.guestmodules import listed_modules
from dprobes.engines.gdb.machine.stacks.orctables import OrcTable

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.guestmodules import GuestModule
    from dprobes.engines.gdb.machine.kernelfacts import KernelFacts
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.machine.stacks.orctables import OrcEntry

__all__ = ["UnwindTables"]

_MODULES_START = 0xFFFFFFFFC0000000
"""Behind the kernel's image (Documentation/arch/x86/x86_64/mm.rst)."""


class UnwindTables:
    """
    The tables of a kernel that is known by ``facts``, and of its modules.

    A module is looked for when an address is in none that is known; it is taken for the same as long as code is there.
    """

    def __init__(self, target: MachineTarget, facts: KernelFacts) -> None:
        self._target, self._facts = target, facts
        self._core = None if facts.unwinding is None else self._table(*facts.unwinding)
        self._modules: list[tuple[GuestModule, OrcTable | None]] = []

    def _table(self, addresses: int, entries: int, count: int) -> OrcTable | None:
        layout = self._facts.layout.orc
        return None if layout is None else OrcTable(self._target.read, layout, addresses, entries, count)

    def entry_at(self, address: int) -> OrcEntry | None:
        """Return the entry for an address, None if there is none; raise ``TargetError`` if it cannot be read."""
        table = self._core if address < _MODULES_START else self._table_of_module(address)
        return None if table is None else table.entry_at(address)

    def _table_of_module(self, address: int) -> OrcTable | None:
        for _ in range(2):
            for module, table in self._modules:
                if 0 <= address - module.loaded.address < module.loaded.size:
                    return table
            self._modules = self._listed()
        return None

    def _listed(self) -> list[tuple[GuestModule, OrcTable | None]]:
        facts = self._facts
        if facts.tables is None or not facts.modules or facts.layout.module_orc is None:
            return []
        memory = GuestMemory(self._target, facts.tables, facts.paging)
        addresses, entries, count = facts.layout.module_orc
        found: list[tuple[GuestModule, OrcTable | None]] = []
        for module in listed_modules(memory, facts.layout, facts.modules).found:
            at = module.address
            size = memory.word(at + count, 4)
            found.append((module, self._table(memory.word(at + addresses), memory.word(at + entries), size)))
        return found
