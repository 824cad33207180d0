"""The maps of keyed tables as the kernel has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.bpfmaps import ArrayMap, HashMap
from dprobes.engines.tablemaps import TableMaps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.layout import MapName
    from dprobes.rpn.tables import Table

__all__ = ["KernelTables"]


class _KernelMaps:
    """Make maps in the kernel."""

    def array(self, size: int, name: str) -> ArrayMap:
        """Return an array of one element; mapping it takes a descriptor as well, so it is mapped."""
        made = ArrayMap(size, name=name)
        _ = made.words
        return made

    def hash(self, key_size: int, value_size: int, entries: int, name: str, *, per_cpu: bool) -> HashMap:
        """Return a hash with all its memory."""
        return HashMap(key_size, value_size, entries, name, preallocated=True, per_cpu=per_cpu)


class KernelTables(TableMaps[ArrayMap, HashMap]):
    """Own the maps of the tables of a program; ``cpus`` is what handlers mask the number of a CPU by, plus 1."""

    def __init__(self, tables: Sequence[Table], shared: AbstractSet[int], cpus: int) -> None:
        super().__init__(tables, shared, cpus, _KernelMaps())

    @property
    def descriptors(self) -> Mapping[MapName, int]:
        """The descriptors by what handlers call the maps."""
        return {name: each.fd for name, each in self.maps.items()}
