"""
A program in the kernel: from the plans of its files to maps, loaded handlers and links.

Probepoints are numbered through all files; the number is the index in the probe table and in ring entries.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.bpf.layout import LIMIT, NOTE_HITS, PROBE_MAX, REMOVE, MapName, Turn, power_of_two
from dprobes.bpf.lower import lower
from dprobes.bpf.lower.dispatch import can_share
from dprobes.bpf.lower.request import Placement, Tables
from dprobes.engines.ebpf.attach.conflicts import Place, find_conflicts
from dprobes.engines.ebpf.attach.handlers import basic_request, load_handler
from dprobes.engines.ebpf.attach.modulefiles import descriptor_path
from dprobes.engines.ebpf.attach.modulewatch import ModuleWatches
from dprobes.engines.ebpf.attach.parts import ALONE_MAX, Part, batches, joined
from dprobes.engines.ebpf.attach.perfevents import attach_event, events_in, lower_event
from dprobes.engines.ebpf.attach.sitelinks import Attachments, Group
from dprobes.engines.ebpf.attach.siteplan import Site
from dprobes.engines.ebpf.attach.tables import SharedMaps, Sizes, slot_count
from dprobes.engines.ebpf.kernel.descriptors import Descriptors
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.links import attach_uprobes, uprobe_attach_type
from dprobes.engines.interface import Counts, Notice, StateEvent
from dprobes.errors import DprobesError, EngineError
from dprobes.record.layout import Item
from dprobes.resolve.probepoints import ResolvedProbe
from dprobes.resolve.probestate import ProbeState
from dprobes.resolve.watchpoints import ResolvedWatchpoint
from dprobes.rpn.point import Point
from dprobes.rpn.program import Glob
from dprobes.target.instructions import first_instructions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.bpf.lower.request import Filter
    from dprobes.engines.ebpf.attach.conflicts import Conflict
    from dprobes.engines.ebpf.attach.filesearch import Findings
    from dprobes.engines.ebpf.attach.modulewatch import ModuleWatch
    from dprobes.engines.ebpf.attach.perfevents import EventProbe
    from dprobes.engines.ebpf.attach.siteplan import FilePlan
    from dprobes.engines.ebpf.engine import EbpfEngine
    from dprobes.engines.ebpf.read.entries import Ended
    from dprobes.engines.foreign.users import ForeignUsers
    from dprobes.engines.interface import Event, Job
    from dprobes.resolve.probepoints import Probepoint, ResolvedModule
    from dprobes.rpn.program import Program

__all__ = ["Installation", "PlannedFile", "conflicts_in"]

_LISTED = 3  # offsets named in a message

_WATCHED_LATE = (
    "memory is watched from now on: accesses ran no handler from when the old program let go of its debug registers"
)

_ROOM = 2
"""How many times as many probepoints there may come to be, by files that are found late."""

_ROOM_MIN = 64
"""How many there may come to be at least."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """
    Join a file's plan with how it is reached.

    ``path`` is for people, and may lead to another file later; ``descriptor`` is that of the file, opened with O_PATH.
    ``aliases`` are such descriptors of files that show the same contents: a uprobe in one is in all of them. ``owner``
    is who else can change the file, ``warnings`` what was warned of that is due to it.
    """

    path: str
    descriptor: int
    plan: FilePlan
    aliases: tuple[int, ...] = ()
    owner: str | None = None
    warnings: str = ""

    @property
    def reached(self) -> str:
        """A path to the very file for the kernel."""
        return str(descriptor_path(self.descriptor))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What is to be closed when the file is not needed any more."""
        return self.descriptor, *self.aliases

    @property
    def all_reached(self) -> tuple[str, ...]:
        """Paths to the very file, and to those that show the same contents."""
        return tuple(str(descriptor_path(descriptor)) for descriptor in self.descriptors)


def conflicts_in(file: PlannedFile, users: ForeignUsers | None = None) -> Iterator[Conflict]:
    """Iterate over the places where processes hold other code than a file; see ``find_conflicts`` for ``users``."""
    offsets = dict.fromkeys(site.offset for _, sites in file.plan.probes for site in sites)
    found = first_instructions(file.plan.resolved.module, offsets)
    places = [Place(instruction.offset, instruction.raw) for instruction in found]
    for path in file.all_reached if places else ():
        yield from find_conflicts(path, places, users=users).found


class Installation:
    """
    Hold a program in the kernel; ``attach`` makes it hit.

    ``probes`` are its probepoints in the order of their numbers.
    """

    def __init__(
        self,
        engine: EbpfEngine,
        job: Job,
        found: Findings,
        scope: Filter,
        namespace: tuple[int, int] | None,
    ) -> None:
        self._engine = engine
        self._program = job.program
        self._items = job.items
        self.probes: list[Probepoint] = []
        self._unavailable: dict[int, str] = {}
        self._sites: dict[int, tuple[Site, ...]] = {}
        self.notes_tickets = _has_tickets(self._program)
        self.giving_back: set[int] = set()
        """The probepoints whose hits give their ticket back if the instruction faults; those of late files join."""
        owned = [(file, self._enter(file)) for file in found.files]
        self._events: dict[int, EventProbe] = {}
        events = self._enter_events(found.events)
        count = len(self.probes)
        self.bank_size = power_of_two(max(_ROOM * count, _ROOM_MIN))
        self._foreign_room = (self.bank_size - count) // 2
        if 2 * self.bank_size > PROBE_MAX:
            raise EngineError(f"{count} probepoints are too many: the ebpf engine can have {PROBE_MAX // 2 // _ROOM}")
        cpus = power_of_two(os.cpu_count() or 1)
        self._tables = Tables(slot_count(), cpus, 2 * self.bank_size)
        self._request = replace(
            basic_request(engine.features, self._program),
            filter=scope,
            tables=self._tables,
            namespace=namespace,
            replaceable=engine.replaceable,
            replaces=job.replaces is not None,
        )
        self._parts = [part for file, numbers in owned for part in self._make_parts(file, numbers)]
        self._parts += self._make_events(events)
        slot = max((part.lowered.slot.size for part in self._parts if part.lowered is not None), default=64)
        program, shared = self._program, job.globals
        if shared is not None:
            shared.check(program.gvars)
        self.maps = SharedMaps(
            Sizes(
                2 * self.bank_size, slot, engine.ring_size, self._tables.slots, cpus,
                program.vars, program.gvars if shared is None else 0, program.cvars,
                scope.processes, bool(self._events), engine.replaceable, job.replaces is not None, self.notes_tickets,
            ),
            shared.descriptor if shared is not None else None,
        )  # fmt: skip
        if job.replaces is not None:
            self.maps.set_turn(Turn.NOT_OURS)
        self._postponed: list[Group] = []
        self._attachments = Attachments(self.maps, self.bank_size, self._link)
        self._conflicting: set[int] = set()
        self._programs = Descriptors()
        self._watches = ModuleWatches(job.scope, scope, self.maps, engine.features)

    def _enter(self, file: PlannedFile) -> range:
        """Give the probepoints of a file their numbers."""
        first = len(self.probes)
        for probe, sites in file.plan.probes:
            self._sites[len(self.probes)] = sites
            self.probes.append(probe)
        return range(first, len(self.probes))

    def _make_parts(self, file: PlannedFile, numbers: range) -> Iterator[Part]:
        """Group the sites of a file's probepoints, and compile the handler of each group."""
        grouped: dict[tuple[int, Placement, int], list[tuple[int, Site]]] = {}
        notes: Counter[int] = Counter()
        for number in numbers:
            for site in self._sites[number]:
                key = (self.probes[number].number, site.placement, site.return_bytes)
                grouped.setdefault(key, []).append((number, site))
        written = [key for key in grouped if not isinstance(self._program.definitions[key[0]].location, Glob)]
        are_many = len(written) > ALONE_MAX and Feature.UPROBE_MULTI in self._engine.features
        for (number, placement, return_bytes), sites_of in grouped.items():
            resolved = file.plan.resolved
            definition = self._program.definitions[number]
            offset = self._offset(sites_of[0][0])
            is_glob = isinstance(definition.location, Glob)
            first, site = sites_of[0]
            request = replace(
                self._request,
                items=self._items | Item.IP if is_glob else self._items,
                placement=placement,
                probe=None if is_glob else first,
                link=self._link_address(first, resolved),
                moved=site.moved,
                symbols=dict(resolved.symbols),
                passcount=definition.passcount,
                maxhits=definition.maxhits,
                return_bytes=return_bytes,
                wants_tid=self._is_uncertain(number, sites_of),
                note=self._note_of(number, sites_of, notes),
            )
            point = Point.of(self._program, definition, offset)
            handler = resolved.image, resolved.architecture, resolved.image.handlers[number], point
            shared = are_many and not is_glob
            lowered = lower(*handler, replace(request, probe=None, shared=True) if shared else request)
            if shared and not can_share(lowered.assembled):
                shared, lowered = False, lower(*handler, request)
            if any(reference.map is MapName.NOTES for reference in lowered.assembled.maps):
                self.giving_back |= {probe for probe, _ in sites_of}
            yield Part(file, number, placement, sites_of, lowered, shared=shared)

    def _enter_events(self, events: Sequence[EventProbe]) -> range:
        first = len(self.probes)
        for event in events:
            self._events[len(self.probes)] = event
            self.probes.append(event.probe)
        return range(first, len(self.probes))

    def _make_events(self, numbers: range) -> Iterator[Part]:
        for number in numbers:
            event = self._events[number]
            if event.probe.state is ProbeState.COMPILED:
                site = Site(0, Placement.EVENT, event.executed, may_fault=False)
                self._sites[number] = (site,)
                request = replace(self._request, items=self._items)
                lowered = lower_event(event, self._program, number, request)
                yield Part(None, event.probe.number, Placement.EVENT, [(number, site)], lowered)

    def _offset(self, number: int) -> int:
        probe = self.probes[number]
        return probe.offset if isinstance(probe, ResolvedProbe) else 0

    def _link_address(self, probe: int, resolved: ResolvedModule) -> int:
        return resolved.module.elf.link_address(self._offset(probe)) or 0

    def _is_uncertain(self, number: int, sites: Sequence[tuple[int, Site]]) -> bool:
        """Return whether records are to be dropped should the instruction fault."""
        definition = self._program.definitions[number]
        return not self._program.keeps_log_on_fault(definition) and any(site.may_fault for _, site in sites)

    def _note_of(self, number: int, sites: Sequence[tuple[int, Site]], used: Counter[int]) -> int | None:
        """Return which pair of a note is that of a handler; ``used`` counts those that are taken at an offset."""
        if not (self.notes_tickets and self._is_uncertain(number, sites)):
            return None
        note = max(used[site.offset] for _, site in sites)
        used.update({site.offset: note + 1 - used[site.offset] for _, site in sites})
        return note if note < NOTE_HITS else None

    def is_void(self, ended: Ended) -> bool:
        """Return whether the hit that was to end a probepoint turned out not to count: its instruction has faulted."""
        if ended.probe not in self.giving_back:
            return False
        if ended.reason == REMOVE:
            return not self._attachments.is_disabled(ended.probe)
        return ended.reason == LIMIT and self._attachments.hits(ended.probe) < self._limit(ended.probe)

    def expired(self) -> set[int]:
        """Return the probepoints that have come to their end in the kernel, and that nobody has taken away."""
        exhausted = {
            probe
            for probe in self.giving_back
            if self._attachments.is_there(probe) and 0 < self._limit(probe) <= self._attachments.hits(probe)
        }
        return self._attachments.expired() | exhausted

    def _limit(self, probe: int) -> int:
        """Return how many hits a probepoint takes, 0 if as many as there are."""
        definition = self.probes[probe].definition
        return definition.passcount + definition.maxhits if definition.maxhits else 0

    @property
    def faulting(self) -> dict[int, int]:
        """The probepoints whose records are dropped if the instruction faults, with the offset of that."""
        return {
            probe: site.offset
            for part in self._parts
            for probe, site in part.sites
            if site.may_fault and self._is_uncertain(part.number, part.sites)
        }

    def has_room_for(self, file: PlannedFile) -> bool:
        """Return whether a file that is found late can still be added."""
        resolved = file.plan.resolved
        more = len(file.plan.probes) + len(resolved.watchpoints) + len(resolved.samplers)
        if file.owner is not None and more > self._foreign_room:
            return False  # the other half is for those that other users do not make
        return len(self.probes) + more <= self.bank_size

    def add(self, file: PlannedFile, conflicts: Iterable[Conflict]) -> list[StateEvent]:
        """
        Attach the handlers to a file that was found late; return the states of its probepoints.

        ``conflicts`` says where processes hold other code.
        """
        if file.owner is not None:
            self._foreign_room -= len(file.plan.probes)
        numbers = self._enter(file)
        events = self._enter_events(events_in(file.plan.resolved, file.all_reached))
        parts = [*self._make_parts(file, numbers), *self._make_events(events)]
        self._parts += parts
        states = self._attach(parts, self._refuse_conflicting(file, conflicts))
        present = set(self.attached)
        attached = tuple(number for number in (*numbers, *events) if number in present)
        return [*states, *([StateEvent(attached, 0, ProbeState.ACTIVE)] if attached else [])]

    def attach(self) -> list[StateEvent]:
        """
        Load the handlers and attach them, the probe table being filled before.

        Return what keeps probepoints from being inserted: code that is not the file's, in whatever process, or the lack
        of debug registers.
        """
        files = {id(part.file): part.file for part in self._parts if part.file is not None}
        states: list[StateEvent] = []
        for file in files.values():
            states += self._refuse_conflicting(file, conflicts_in(file))
        return self._attach(self._parts, states)

    def _attach(self, parts: Sequence[Part], states: list[StateEvent]) -> list[StateEvent]:
        for part in parts:
            if part.file is None:
                continue
            for probe, _ in part.sites:
                link = self._link_address(probe, part.file.plan.resolved)
                for bank in (0, self.bank_size):
                    self.maps.set_place(bank + probe, link, self._offset(probe))
        for batch in batches(parts):
            self._attach_batch(batch)
        if not self._postponed:
            self._watches.start()
        return states + self._unavailable_of(number for part in parts for number, _ in part.sites)

    def _attach_batch(self, batch: Sequence[Part]) -> None:
        """Load the program of some parts, and attach it."""
        first = batch[0]
        watching = self._watching_of(first)
        maps = watching.maps if watching is not None else self.maps.descriptors
        minors = [self._program.definitions[part.number].minor for part in (first, *batch[1:][-1:])]
        name = " to ".join(f"{self._program.major},{minor}" for minor in minors)
        attach_type = uprobe_attach_type(self._engine.features)
        lowered = joined(batch, self.bank_size)
        program = self._programs.add(load_handler(lowered, first.placement, maps, attach_type, name))
        for part in batch:
            part.lowered = None
        sites = [pair for part in batch for pair in part.sites if pair[0] not in self._conflicting]
        if not sites:
            return
        reached, shown = (first.file.reached, first.file.path) if first.file is not None else ("", "")
        group = Group(program, reached, shown, first.placement, sites)
        if self._is_postponed(sites[0][0]):
            self._postponed.append(group)
            return
        self._attachments.attach(group)
        if first.file is not None and len({probe for probe, _ in sites}) == 1:
            # It is never attached again, and the link keeps it.
            os.close(self._programs.remove(program))

    def _unavailable_of(self, numbers: Iterable[int]) -> list[StateEvent]:
        found = self._unavailable
        return [StateEvent((n,), 0, ProbeState.DEBUGREG_UNAVAIL, found[n]) for n in numbers if n in found]

    def _is_postponed(self, number: int) -> bool:
        """Return whether a probepoint is attached when another program has made room: debug registers are few."""
        if number not in self._events or self.maps.turn is not Turn.NOT_OURS:
            return False
        return isinstance(self._events[number].probe, ResolvedWatchpoint)

    def attach_postponed(self) -> list[Event]:
        """Attach what had to wait for another program's end; what the kernel refuses is reported, not raised."""
        postponed, self._postponed = self._postponed, []
        if not postponed:
            return []
        events: list[Event] = [Notice(_WATCHED_LATE, is_warning=False)]
        for group in postponed:
            ((number, _),) = group.sites
            try:
                self._attachments.attach(group)
            except DprobesError as error:
                self._unavailable[number] = error.message
        events += self._unavailable_of(number for group in postponed for number, _ in group.sites)
        try:
            self._watches.start()
        except DprobesError as error:
            events.append(Notice(f"memory is not watched in all processes: {error.message}", error.hint))
        return events

    def _watching_of(self, part: Part) -> ModuleWatch | None:
        """Return what watches the module of a watchpoint's part; None for other parts."""
        event = self._events.get(part.sites[0][0])
        if event is None or event.module is None or not isinstance(event.probe, ResolvedWatchpoint):
            return None
        return self._watches.of(event.module, event.paths[0])

    def happened(self) -> Iterator[Event]:
        """Iterate over what happened to watchpoints in single processes."""
        yield from self._watches.happened()

    def _refuse_conflicting(self, file: PlannedFile, conflicts: Iterable[Conflict]) -> list[StateEvent]:
        """Keep the probepoints of a file from being attached that are in conflict; return their states."""
        events: list[StateEvent] = []
        probes: dict[int, set[int]] = {}
        for part in self._parts:
            if part.file is file:
                for probe, site in part.sites:
                    probes.setdefault(site.offset, set()).add(probe)
        for conflict in conflicts:
            numbers = {probe for offset in conflict.offsets for probe in probes[offset]}
            self._conflicting |= numbers
            where = ", ".join(f"{offset:#x}" for offset in conflict.offsets[:_LISTED])
            more = f" and {len(conflict.offsets) - _LISTED} more" if len(conflict.offsets) > _LISTED else ""
            detail = f"{conflict.detail}: offset {where}{more} of '{file.path}'"
            events.append(StateEvent(tuple(sorted(numbers)), conflict.pid, ProbeState.CONFLICT, detail))
        return events

    def _link(self, group: Group, places: Sequence[tuple[int, int]]) -> Descriptors:
        if group.placement is Placement.EVENT:
            return self._link_event(group)
        is_return = group.placement is Placement.URETPROBE
        return attach_uprobes(
            group.program, group.path, places, self._engine.features, at_return=is_return, shown=group.shown
        )

    def _link_event(self, group: Group) -> Descriptors:
        ((number, _),) = group.sites
        event = self._events[number]
        if event.module is not None and isinstance(event.probe, ResolvedWatchpoint):
            watching = self._watches.of(event.module, event.paths[0])
            return watching.add(number, event.probe, group.program)
        links = attach_event(self._events[number], group.program)
        if isinstance(links, str):
            self._unavailable[number] = links
            return Descriptors()
        return links

    @property
    def breakpoint_count(self) -> int:
        """How many breakpoints were attached in files."""
        return sum(
            probe not in self._conflicting for part in self._parts if part.file is not None for probe, _ in part.sites
        )

    @property
    def attached(self) -> tuple[int, ...]:
        """The probepoints that can be hit."""
        absent = self._conflicting | self._unavailable.keys()
        return tuple(number for number, sites in self._sites.items() if sites and number not in absent)

    @property
    def entries(self) -> int:
        """How many entries the probe table has."""
        return 2 * self.bank_size

    @property
    def attachments(self) -> Attachments:
        """The links."""
        return self._attachments

    def counts(self, number: int, faults: int, dropped: int) -> Counts:
        """
        Return the counts of a probepoint.

        ``faults`` of its hits did not complete their instruction, and ``dropped`` of its records were not given out.
        """
        definition = self.probes[number].definition
        entries = [self.maps.counters(bank + number) for bank in (0, self.bank_size)]
        hits = self._attachments.hits(number)
        if definition.maxhits:
            hits = min(hits, self._limit(number))
        if number not in self.giving_back:
            hits -= faults
        return Counts(
            hits=hits,
            records=sum(entry.records for entry in entries) - dropped,
            lost=sum(entry.lost for entry in entries),
            passed=min(hits, definition.passcount),
            missed=sum(entry.missed for entry in entries),
            faulted=faults,
            executed=tuple(sorted({site.executed for site in self._sites.get(number, ())})),
        )

    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of the breakpoints in an open file."""
        status = os.fstat(descriptor)
        return frozenset(offset for offset, _ in self.original_bytes().get((status.st_dev, status.st_ino), ()))

    def original_bytes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Return file offset and original byte of each breakpoint, by the device and inode of the file."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in self._parts:
            if part.file is None:
                continue
            elf = part.file.plan.resolved.module.elf
            status = os.fstat(part.file.descriptor)
            pairs = found.setdefault((status.st_dev, status.st_ino), [])
            pairs += [(site.offset, elf.data[site.offset]) for _, site in part.sites]
        return found

    def unhandled(self) -> Iterator[tuple[int, int]]:
        """Iterate over the probepoints of which exceptions ended handlers, with the bits of those."""
        for entry, bits in self.maps.unhandled().items():
            yield entry % self.bank_size, bits

    def close(self) -> None:
        """Take everything out of the kernel."""
        self._attachments.close()
        self._watches.close()
        self._programs.close()
        self.maps.close()


def _has_tickets(program: Program) -> bool:
    """Return whether what a hit has drawn is to be given back if its instruction faults."""
    return any(definition.passcount or definition.maxhits for definition in program.definitions) or any(
        instruction.row.operator == "remove" for code in program.bodies() for instruction in code.instructions
    )
