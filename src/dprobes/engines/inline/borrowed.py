"""
What handlers use that belongs to other programs as well: variables and tables of the principal, global variables.

It is in files of its own, which the process maps besides that of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.bpf.layout import MapName
from dprobes.engines.sharedglobals import mapped_size
from dprobes.lazydataclass import dataclass
from dprobes.native.memory import MapPlace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.engines.inline.sharedstate import SharedState
    from dprobes.engines.sharedglobals import GlobalVariables

__all__ = ["Borrowed"]

_OWN = (MapName.PROBES,)
"""What each program has for itself of a state."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The state of the ``principal``, and ``variables`` that all programs have."""

    principal: SharedState | None = None
    variables: GlobalVariables | None = None

    @property
    def files(self) -> tuple[tuple[int, int], ...]:
        """The files that a process has to map, (descriptor, size) each."""
        return () if self.principal is None else ((self.principal.region.descriptor, self.principal.region.size),)

    @property
    def globals_size(self) -> int:
        """The bytes of global variables that it has to map behind them."""
        return 0 if self.variables is None else mapped_size(self.variables.count)

    @property
    def parts(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Both."""
        return self.files, self.globals_size

    def places(self, addresses: Sequence[int]) -> Mapping[MapName, MapPlace]:
        """Return where a process has the maps that has mapped the files at these addresses."""
        left = list(addresses)
        found: dict[MapName, MapPlace] = {}
        if self.principal is not None:
            self.principal.region.place = left.pop(0)
            found |= {name: part.place for name, part in self.principal.maps.items() if name not in _OWN}
        if self.variables is not None:
            found[MapName.GLOBALS] = MapPlace(left.pop(0))
        return found
