"""
The probepoints of a program at each distance above its link addresses at which its module is mapped in a machine.

QEMU's breakpoints are for an address in whatever address space, so processes that map the module at the same place
share them, and others may come to them by chance. What is not in memory yet is no obstacle: nobody has executed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.gdb.placement import PlacedProbes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MappedProbes"]


class MappedProbes(PlacedProbes):
    """The probepoints at one distance; ``read`` returns the memory of the process that they are placed for."""

    read: Callable[[int, int], bytes] | None = None

    def _is_other(self, address: int, raw: bytes) -> bool:
        found = b"" if self.read is None else self.read(address, len(raw))
        return len(found) == len(raw) and found != raw
