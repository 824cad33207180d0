"""A program as the tracer runs it: what the client has said of it, its processes, variables, and probepoints."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.engines.hits import handlerruns, probes
from dprobes.engines.hits.probes import Handlers
from dprobes.engines.hits.records import RecordBuilder
from dprobes.engines.ptrace.sharedcounters import SharedCounters
from dprobes.engines.sharedglobals import MappedCells
from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence

    from dprobes.engines.hits.probes import ProbeLimits
    from dprobes.engines.ptrace.sites import FileKey, Site, Sites, WatchSite
    from dprobes.engines.ptrace.wire import Start
    from dprobes.extensions import Extension

__all__ = ["Handled", "InsertedProgram", "Probe", "Reach"]

Probe = probes.Probe["InsertedProgram"]
"""A probepoint of one of the tracer's programs."""

Handled = handlerruns.Handled["InsertedProgram"]
"""What the handler of such a probepoint came to."""


@dataclass(slots=True, eq=False)
class Reach:
    """The processes that a program is about: ``pids``, and with ``follow`` those that they start."""

    follow: bool = True
    pids: set[int] = field(default_factory=set)

    def covers(self, pids: set[int]) -> bool:
        """Return whether one of these processes is among them."""
        return not self.pids.isdisjoint(pids)


@dataclass(slots=True, eq=False)
class InsertedProgram:
    """
    A program; its ``number`` is the client's, and its ``rank`` its place in the order of insertion.

    ``everywhere`` says what is watched in every process, by word size, and ``known`` what is where in files;
    ``handlers`` are those for modules with words of 4 and 8 bytes.
    """

    number: int
    rank: int
    reach: Reach
    definitions: Sequence[ProbeLimits]
    everywhere: dict[int, Sites | str]
    counters: SharedCounters
    global_variables: MutableSequence[int]
    extensions: Mapping[str, Extension]
    records: RecordBuilder
    core_directory: str
    known: dict[FileKey, Sites] = field(default_factory=dict)
    handlers: dict[int, Handlers] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)
    _removed: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, start: Start, former: InsertedProgram | None = None) -> InsertedProgram:
        """
        Return the program that a message describes, before it has probepoints.

        One that takes the place of a ``former`` one has its processes and its place in the order, and its global
        variables if they are its own. Raise ``EngineError`` if one of its extensions cannot be loaded.
        """
        local_count, global_count, cpu_count = start.variables
        extensions: dict[str, Extension] = {}
        if start.extensions:
            # Before anything is traced, because that may take its time.
            from dprobes.extensions.registry import load_extensions

            extensions = load_extensions(start.extensions)
        cells: MutableSequence[int]
        if start.globals >= 0:
            cells = MappedCells(start.globals, global_count)
        else:
            kept = [] if former is None else list(former.global_variables[:global_count])
            cells = kept + [0] * (global_count - len(kept))
        counters = SharedCounters(start.counters, local_count, cpu_count)
        return cls(
            start.number,
            start.number if former is None else former.rank,
            Reach(start.follow) if former is None else former.reach,
            start.definitions,
            dict(start.everywhere),
            counters,
            cells,
            extensions,
            RecordBuilder(start.items),
            start.core_directory,
        )

    def enter(self, sites: Sites, file: tuple[int, int], warn: Callable[[str, str | None], None]) -> list[Probe]:
        """Note the probepoints and handlers that an answer brings; return those that somebody has removed already."""
        found: tuple[Site | WatchSite, ...] = (*sites.sites, *sites.watches)
        removed = []
        for site in found:
            if site.probe >= 0 and site.probe not in self.probes:
                limits, counts = self.definitions[site.definition], self.counters.tally(site.probe)
                probe = probes.Probe(self, site.probe, site.definition, limits, file, counts)
                self.probes[site.probe] = probe
                if site.probe in self._removed:
                    probe.state = ProbeState.REMOVED
                    removed.append(probe)
        if sites.code is not None:
            word_size = sites.code.image.word_size
            if word_size not in self.handlers:
                self.handlers[word_size] = Handlers(sites.code.image, sites.code.architecture, warn)
        return removed

    def probe(self, number: int) -> Probe | None:
        """Return the probepoint of a site, None for one of the engine's own."""
        return self.probes[number] if number >= 0 else None

    def remove(self, numbers: Iterable[int]) -> list[Probe]:
        """Return probepoints that are to be removed, by their numbers; those that are yet to come will be inactive."""
        self._removed.update(numbers)
        return [self.probes[number] for number in numbers if number in self.probes]
