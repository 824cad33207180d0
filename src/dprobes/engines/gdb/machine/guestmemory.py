"""The memory of a machine as its kernel sees it, whatever its processors do at the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.machine.pagetables import translate

if TYPE_CHECKING:
    from dprobes.engines.gdb.machine.machinetarget import MachineTarget
    from dprobes.engines.gdb.machine.pagetables import Paging

__all__ = ["GuestMemory"]

_TEXT_MAX = 4096


class GuestMemory:
    """What page tables at ``root`` show of a machine that stands still."""

    def __init__(self, target: MachineTarget, root: int, paging: Paging) -> None:
        self._target, self._root, self.paging = target, root, paging

    def read(self, address: int, size: int) -> bytes:
        """Return bytes; fewer if they cannot all be read."""
        return self._target.read_large(self._root, self.paging, address, size)

    def physical(self, address: int) -> int | None:
        """Return where a byte is in physical memory, None if it is nowhere."""
        found = translate(self._target.entry_at, self._root, self.paging, address)
        return None if found is None else found.physical

    def word(self, address: int, size: int = 8) -> int:
        """Return an unsigned number, 0 where there is none."""
        data = self.read(address, size)
        return int.from_bytes(data, self._target.byte_order) if len(data) == size else 0

    def string(self, address: int) -> bytes:
        """Return what is up to the first zero."""
        return self.read(address, _TEXT_MAX - address % _TEXT_MAX).partition(b"\0")[0]
