"""What formatters are told of a probepoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.resolve import ResolvedProbe
from dprobes.record.place import Place

if TYPE_CHECKING:
    from dprobes.engines.resolve import Probepoint

__all__ = ["place_of_probe"]


def place_of_probe(module: str, probe: Probepoint) -> Place:
    """Return the place of a probepoint of the module's program."""
    placed = probe.offset + probe.moved if isinstance(probe, ResolvedProbe) and probe.moved else None
    return Place(module, probe.where, probe.function, placed)
