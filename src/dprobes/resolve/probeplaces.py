"""Places of probepoints and the files that these are in, as records' sources and formatters know them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.record.probeinfo import Place
from dprobes.target.elf.file import ElfFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dprobes.record.origin import RecordSource
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["places_of", "with_files"]


def places_of(module: str, probes: Sequence[Probepoint], first: int = 0) -> list[Place]:
    """Return the places of the probepoints of the module's program, from one of them on."""
    known: set[tuple[str, int, bool]] = set()
    if any(probe.at_return for probe in probes):
        known = {probe.place for probe in probes if probe.is_in_code}
    return [_place_of(module, probe, known) for probe in probes[first:]]


def _place_of(module: str, probe: Probepoint, known: set[tuple[str, int, bool]]) -> Place:
    if not probe.is_in_code:
        return Place(module, probe.where, probe.function, at_return=probe.at_return, is_code=False)
    path, offset, at_return = probe.place
    placed = probe.placed if probe.code.moved else None
    return Place(module, probe.where, probe.function, placed, at_return, (path, offset, not at_return) in known)


def with_files(source: RecordSource, probes: Iterable[Probepoint]) -> RecordSource:
    """Return a source that knows also the files that these probepoints are in; some files have no build-id."""
    build_ids, paths = dict.fromkeys(source.build_ids), dict.fromkeys(source.paths)
    for path in dict.fromkeys(probe.path for probe in probes if probe.is_in_code):
        paths[path] = None
        with contextlib.suppress(TargetError):  # it may be gone already
            if (build_id := ElfFile.open(path).build_id) is not None:
                build_ids[build_id] = None
    return replace(source, build_ids=tuple(build_ids), paths=tuple(paths))
