"""What formatters are told of a probepoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.resolve import ResolvedProbe
from dprobes.errors import TargetError
from dprobes.record.place import Place
from dprobes.target.elf import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.engines.resolve import Probepoint

__all__ = ["build_ids_of", "place_of_probe"]


def place_of_probe(module: str, probe: Probepoint) -> Place:
    """Return the place of a probepoint of the module's program."""
    placed = probe.offset + probe.moved if isinstance(probe, ResolvedProbe) and probe.moved else None
    return Place(module, probe.where, probe.function, placed)


def build_ids_of(probes: Iterable[Probepoint], known: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the build-ids of the files that probepoints are in, after those that are known; some files have none."""
    found = dict.fromkeys(known)
    for path in dict.fromkeys(probe.path for probe in probes if isinstance(probe, ResolvedProbe)):
        with contextlib.suppress(TargetError):  # it may be gone already
            if (build_id := ElfFile.open(path).build_id) is not None:
                found[build_id] = None
    return tuple(found)
