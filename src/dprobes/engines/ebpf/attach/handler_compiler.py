"""The handlers of a run's probepoints, compiled: one for all sites of a definition in a file that are placed alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.lower import host_of, lower
from dprobes.bpf.lower.lowering_request import KeptEntry, Placement
from dprobes.bpf.map_layouts import NOTE_HITS, MapName
from dprobes.engines.ebpf.attach.site_spec import Site
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.ebpf.kernel.task_structures import task_layout
from dprobes.record.log_record import Item
from dprobes.resolve.probe_state import ProbeState
from dprobes.rpn.program_needs import entry_registers
from dprobes.rpn.rpn_program import MANY_PLACES, Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.usdt_arguments import Argument
    from dprobes.bpf.lower.lowering_request import Lowered, Request
    from dprobes.engines.ebpf.attach.file_spec import PlannedCode
    from dprobes.engines.ebpf.attach.perf_probes import EventProbe
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import ProbeDefinition, Program

__all__ = ["HandlerCompiler", "Part", "ProbeNumbers", "batches", "has_tickets", "joined", "largest_entry"]

# The numbers of probepoints: the index in a session's ``probes``, in the probe table and in ring entries.


class ProbeNumbers:
    """
    The probepoints of a run in the order of their numbers, through all files; ``probes`` only grows.

    ``sites`` are where each of them has breakpoints, ``events`` those that are perf events.
    """

    def __init__(self) -> None:
        self.probes: list[Probepoint] = []
        self.sites: dict[int, tuple[Site, ...]] = {}
        self.events: dict[int, EventProbe] = {}

    def enter(self, file: PlannedCode) -> range:
        """Give the probepoints of a file their numbers."""
        first = len(self.probes)
        for probe, sites in file.probes:
            self.sites[len(self.probes)] = sites
            self.probes.append(probe)
        return range(first, len(self.probes))

    def enter_events(self, events: Sequence[EventProbe]) -> range:
        """Give events their numbers."""
        first = len(self.probes)
        for event in events:
            self.events[len(self.probes)] = event
            self.probes.append(event.probe)
        return range(first, len(self.probes))

    def renew_event(self, number: int, event: EventProbe) -> None:
        """Put another event in the place of one: the same watchpoint or sampler, at other addresses."""
        self.events[number] = event
        self.probes[number] = event.probe

    def link_address(self, number: int) -> int:
        """Return the link address of a probepoint's written place, or its address in the kernel."""
        return self.probes[number].instruction.address

    def limit(self, number: int) -> int:
        """Return how many hits a probepoint takes, 0 if as many as there are."""
        definition = self.probes[number].definition
        return definition.passcount + definition.maxhits if definition.maxhits else 0


# The parts of a program in the kernel: which sites share a handler, and which handlers share a program and a link.


ALONE_MAX = 16
"""
How many definitions in a file have a program and a link each.

More of them share some: the kernel takes tens of milliseconds to take a link away, one after the other where this
process was killed. A handler in a shared program costs each hit some 20 ns more.
"""


@dataclass(slots=True)
class Part:
    """
    The sites of one definition in one file that are placed alike, or an event.

    ``file`` is None for an event. ``lowered`` is the code until it is loaded: some KiB for each definition. What is
    ``shared`` was lowered for a program with other handlers.
    """

    file: PlannedCode | None
    number: int
    placement: Placement
    sites: list[tuple[int, Site]]
    lowered: Lowered | None
    shared: bool = False

    @property
    def code(self) -> Lowered:
        """The code, while it is there."""
        assert self.lowered is not None, "a part is attached twice"
        return self.lowered


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Iterate over the parts that get a program together."""
    shared: dict[tuple[int, Placement | None, bool, bool, int], list[Part]] = defaultdict(list)
    for part in parts:
        if not part.shared:
            yield [part]
            continue
        number, layer = _number(part), 0
        # A definition may have several parts with the same probepoint, which the cookie does not tell apart.
        while (alike := shared[_kind(part, layer)]) and _number(alike[-1]) == number:
            layer += 1
        alike.append(part)
    for alike in shared.values():
        yield from _of_limited_size(alike)


def _of_limited_size(parts: Iterable[Part]) -> Iterator[list[Part]]:
    from dprobes.bpf.lower.hosts.handler_host import SHARED_MAX

    batch: list[Part] = []
    size = 0
    for part in parts:
        more = len(part.code.assembled.code)
        if batch and size + more > SHARED_MAX:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += more
    if batch:
        yield batch


def _kind(part: Part, layer: int) -> tuple[int, Placement | None, bool, bool, int]:
    """Return what parts must have in common to share a program and a link."""
    own = part.placement if part.placement.is_in_kernel or part.placement is Placement.URETPROBE else None
    return id(part.file), own, bool(part.sites[0][1].anchor), part.code.sleepable, layer


def _number(part: Part) -> int:
    return part.sites[0][0]


def joined(batch: Sequence[Part], bank_size: int) -> Lowered:
    """Return the code of a batch."""
    first = batch[0].code
    if not batch[0].shared:
        return first
    from dprobes.bpf.lower.hosts.handler_host import dispatch

    handlers = [(_number(part), part.code.assembled) for part in batch]
    return replace(first, assembled=dispatch(handlers, bank_size - 1))


def has_tickets(program: Program) -> bool:
    """Return whether what a hit has drawn is to be given back if its instruction faults."""
    return any(definition.passcount or definition.maxhits for definition in program.definitions) or any(
        instruction.row.operator == "remove" for code in program.bodies() for instruction in code.instructions
    )


_Key = tuple[int, "Placement", int, bool, bool, int, tuple["Argument", ...], int]
"""What sites have in common that share code."""


def largest_entry(program: Program) -> int:
    """Return the size of what is kept of the entry of a call at most, whatever the architecture; 0 if nothing is."""
    kept = (
        _kept(program, definition, architecture(name), is_uretprobe=False)
        for definition in program.definitions
        for name in ("x86_64", "i386")
    )
    found = [entry for entry in kept if entry is not None]
    if not found:
        return 0
    from dprobes.bpf.lower.hits.call_entries import entry_size

    return max(map(entry_size, found))


def _kept(
    program: Program, definition: ProbeDefinition, target: Architecture, *, is_uretprobe: bool
) -> KeptEntry | None:
    """Return what a handler of a return wants to know of the entry."""
    registers = entry_registers(program, definition, target)
    if registers is None:
        return None
    return KeptEntry(tuple((each.name, each.index, each.memory_offset) for each in registers), is_uretprobe)


def _can_share(lowered: Lowered) -> bool:
    from dprobes.bpf.lower.hosts.handler_host import can_share

    return can_share(lowered.assembled)


class HandlerCompiler:
    """A compiler of handlers; ``request`` is what they have in common, ``items`` what records are to carry."""

    def __init__(
        self, program: Program, numbers: ProbeNumbers, request: Request, items: Item, features: Features
    ) -> None:
        self._program = program
        self._numbers = numbers
        if items & (Item.PID | Item.TID | Item.UID | Item.PROCESS_NAME):
            request = replace(request, abilities=replace(request.abilities, task=task_layout(features)))
        self._request = request
        self._items = items
        self._has_multi = Feature.UPROBE_MULTI in features
        self._notes_tickets = has_tickets(program)
        self.giving_back: set[int] = set()
        """The probepoints whose hits give their ticket back if the instruction faults; those of late files join."""

    def parts(self, file: PlannedCode, numbers: range) -> Iterator[Part]:
        """Group the sites of a file's probepoints, and compile the handler of each group."""
        probes = self._numbers.probes
        grouped: dict[_Key, list[tuple[int, Site]]] = {}
        notes: Counter[int] = Counter()
        for number in numbers:
            pushed = self._pushed(probes[number])
            for site in self._numbers.sites[number]:
                alone = number if site.placement.is_trampoline else -1  # a program there is for one function
                kind = probes[number].number, site.placement, site.return_bytes
                # Where the module lies is told by where the hit was; the cookie says it to handlers of several places.
                is_glob = isinstance(self._program.definitions[probes[number].number].location, MANY_PLACES)
                moved = site.moved if file.resolved.symbols and not is_glob else 0
                key = (*kind, bool(site.anchor), site.is_entry, alone, pushed, moved)
                grouped.setdefault(key, []).append((number, site))
        written = [key for key in grouped if not isinstance(self._program.definitions[key[0]].location, MANY_PLACES)]
        are_many = len(written) > ALONE_MAX and self._has_multi
        nesting = {number for number, placement, *_ in grouped if placement is Placement.URETPROBE}
        resolved = file.resolved
        for (number, placement, return_bytes, _, is_entry, alone, _, _), sites in grouped.items():
            definition = self._program.definitions[number]
            is_glob = isinstance(definition.location, MANY_PLACES)
            first, site = sites[0]
            request = replace(
                self._request,
                items=self._items | Item.IP if is_glob else self._items,
                placement=placement,
                probe=None if is_glob and alone < 0 else first,
                arguments=site.arguments,
                link=self._numbers.link_address(first),
                moved=site.moved,
                follows_module=bool(site.anchor),
                symbols=dict(resolved.symbols),
                per_cpu=resolved.per_cpu,
                passcount=definition.passcount,
                maxhits=definition.maxhits,
                return_bytes=return_bytes,
                wants_tid=self._is_uncertain(number, sites),
                note=self._note_of(number, sites, notes),
                entry=_kept(self._program, definition, resolved.architecture, is_uretprobe=number in nesting),
            )
            if is_entry:
                from dprobes.bpf.lower.hits.call_entries import entry_program

                lowered = entry_program(resolved.architecture, request, host_of(request))
                yield Part(file, number, placement, sites, lowered)
                continue
            probe = self._numbers.probes[first]
            point = Point.of(self._program, definition, probe.offset, probe.arguments)
            shared = are_many and not is_glob and alone < 0
            asked = replace(request, probe=None, shared=True) if shared else request
            handler = resolved.image.handlers[number]
            lowered = lower(resolved.image, resolved.architecture, handler, point, asked)
            if shared and not _can_share(lowered):
                shared, lowered = False, lower(resolved.image, resolved.architecture, handler, point, request)
            if any(reference.map is MapName.NOTES for reference in lowered.assembled.maps):
                self.giving_back |= {probe for probe, _ in sites}
            yield Part(file, number, placement, sites, lowered, shared=shared)

    def _pushed(self, probe: Probepoint) -> tuple[Argument, ...]:
        """Return where the arguments are that the handler of a USDT probe pushes: sites that differ share no code."""
        if not (arguments := probe.arguments):
            return ()
        from dprobes.resolve.usdt_probes import arguments_used

        return tuple(arguments[used - 1] for used in arguments_used(self._program, probe.definition))

    def event_parts(self, numbers: Iterable[int]) -> Iterator[Part]:
        """Compile the handlers of events."""
        for number in numbers:
            event = self._numbers.events[number]
            if event.probe.state is ProbeState.COMPILED:
                from dprobes.engines.ebpf.attach.perf_probes import lower_entry, lower_event

                site = Site(0, event.placement, event.executed, may_fault=False)
                self._numbers.sites[number] = (site,)
                request = replace(self._request, items=self._items)
                ((_, target), *_) = event.forms
                kept = _kept(self._program, event.probe.definition, target, is_uretprobe=False)
                if kept is not None:
                    request = replace(request, entry=kept)
                    entry = replace(site, is_entry=True)
                    self._numbers.sites[number] = (entry, site)
                    lowered = lower_entry(event, number, request)
                    yield Part(None, event.probe.number, event.placement, [(number, entry)], lowered)
                lowered = lower_event(event, self._program, number, request)
                yield Part(None, event.probe.number, event.placement, [(number, site)], lowered)

    def _is_uncertain(self, number: int, sites: Sequence[tuple[int, Site]]) -> bool:
        """Return whether records are to be dropped should the instruction fault."""
        definition = self._program.definitions[number]
        return not self._program.keeps_log_on_fault(definition) and any(site.may_fault for _, site in sites)

    def _note_of(self, number: int, sites: Sequence[tuple[int, Site]], used: Counter[int]) -> int | None:
        """Return which pair of a note is that of a handler; ``used`` counts those that are taken at an offset."""
        if not (self._notes_tickets and self._is_uncertain(number, sites)):
            return None
        note = max(used[site.offset] for _, site in sites)
        used.update({site.offset: note + 1 - used[site.offset] for _, site in sites})
        return note if note < NOTE_HITS else None

    def faulting(self, parts: Iterable[Part]) -> dict[int, int]:
        """Return the probepoints whose records are dropped if the instruction faults, with the offset of that."""
        return {
            probe: site.offset
            for part in parts
            for probe, site in part.sites
            if site.may_fault and self._is_uncertain(part.number, part.sites)
        }
