"""Compiled handlers of a run's probepoints: one for all sites of a definition in a file with the same placement."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dprobes.arch import architecture
from dprobes.bpf.lower import host_of, lower
from dprobes.bpf.lower.lowering_request import KeptEntry, Placement
from dprobes.bpf.map_layouts import NOTE_HITS, MapName
from dprobes.engines.ebpf.attach.site_spec import Site
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.ebpf.kernel.task_structures import task_layout
from dprobes.record.log_record import Item
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.program_needs import entry_counters, entry_registers
from dprobes.rpn.rpn_program import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.usdt_arguments import Argument
    from dprobes.bpf.lower.lowering_request import Lowered, PortFilter, Request
    from dprobes.engines.ebpf.attach.file_spec import PlannedCode
    from dprobes.engines.ebpf.attach.perf_probes import EventProbe
    from dprobes.engines.ebpf.kernel.kernel_features import Features
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.rpn_program import ProbeDefinition, Program

__all__ = ["HandlerCompiler", "Part", "ProbeNumbers", "batches", "has_tickets", "joined", "largest_entry"]


class ProbeNumbers:
    """
    Probepoints of a run by number, through all files. New ones are appended.

    A number is the index in a session's ``probes``, in the probe table and in ring entries. ``sites`` has the
    breakpoints of each probepoint. ``events`` has the probepoints that are perf events.
    """

    def __init__(self) -> None:
        self.probes: list[Probepoint] = []
        self.sites: dict[int, tuple[Site, ...]] = {}
        self.events: dict[int, EventProbe] = {}

    def enter(self, file: PlannedCode) -> range:
        """Append the probepoints of a file to ``probes``, and return the range of their numbers."""
        first = len(self.probes)
        for probe, sites in file.probes:
            self.sites[len(self.probes)] = sites
            self.probes.append(probe)
        return range(first, len(self.probes))

    def enter_events(self, events: Sequence[EventProbe]) -> range:
        """Assign the next free numbers to perf events, samplers or watchpoints, and return their range."""
        first = len(self.probes)
        for event in events:
            self.events[len(self.probes)] = event
            self.probes.append(event.probe)
        return range(first, len(self.probes))

    def renew_event(self, number: int, event: EventProbe) -> None:
        """
        Replace the event ``number`` by the same watchpoint or sampler at other addresses.

        The addresses change when the kernel loads a module again.
        """
        self.events[number] = event
        self.probes[number] = event.probe

    def link_address(self, number: int) -> int:
        """Return the address of the place that the user specified: a link address, or an address in the kernel."""
        return self.probes[number].instruction.address

    def limit(self, number: int) -> int:
        """Return the number of hits after which a probepoint ends, passcount included, or 0 if it has no limit."""
        definition = self.probes[number].definition
        return definition.passcount + definition.maxhits if definition.maxhits else 0


ALONE_MAX = 16
"""
Maximum number of definitions in a file for which each has a BPF program and a link of its own.

In a file with more definitions they share BPF programs. The kernel takes tens of milliseconds to remove a link, and
removes links one after the other if this process was killed. A handler in a shared BPF program costs each hit some 20
ns more.
"""


@dataclass(slots=True)
class Part:
    """
    Sites of one definition in one file with the same placement, or a perf event.

    ``file`` is None for an event. ``number`` is the number of the definition. ``lowered`` is the compiled code, or None
    after it was loaded. If ``shared`` is True, it was compiled for a BPF program with several handlers.
    """

    file: PlannedCode | None
    number: int
    placement: Placement
    sites: list[tuple[int, Site]]
    lowered: Lowered | None
    shared: bool = False

    @property
    def code(self) -> Lowered:
        """The compiled code, which must not be loaded yet."""
        assert self.lowered is not None, "a part is attached twice"
        return self.lowered


def batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Iterate over the groups of parts that share a BPF program."""
    shared: dict[tuple[int, Placement | None, bool, bool, int], list[Part]] = defaultdict(list)
    for part in parts:
        if not part.shared:
            yield [part]
            continue
        number, layer = _number(part), 0
        # A definition may have several parts with the same probepoint, which the cookie does not distinguish.
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
    """Return the key by which parts are grouped. Parts with the same key can share a BPF program and a link."""
    own = part.placement if part.placement.is_in_kernel or part.placement is Placement.URETPROBE else None
    return id(part.file), own, bool(part.sites[0][1].anchor), part.code.sleepable, layer


def _number(part: Part) -> int:
    return part.sites[0][0]


def joined(batch: Sequence[Part], bank_size: int) -> Lowered:
    """Return the code of a batch. The cookie modulo ``bank_size`` selects one of its handlers."""
    first = batch[0].code
    if not batch[0].shared:
        return first
    from dprobes.bpf.lower.hosts.handler_host import dispatch

    handlers = [(_number(part), part.code.assembled) for part in batch]
    return first._replace(assembled=dispatch(handlers, bank_size - 1))


def has_tickets(program: Program) -> bool:
    """Return whether hits draw tickets (passcount, maxhits, ``remove``), which are returned after a fault."""
    return any(definition.passcount or definition.maxhits for definition in program.definitions) or any(
        instruction.row.operator == "remove" for code in program.bodies() for instruction in code.instructions
    )


class _Kind(NamedTuple):
    """Common properties of sites that share code. ``alone`` is the only probepoint of the code, or -1 for several."""

    definition: int
    placement: Placement
    return_bytes: int
    is_anchored: bool
    is_entry: bool
    alone: int
    pushed: tuple[Argument, ...]
    moved: int
    ports: PortFilter | None


def largest_entry(program: Program) -> int:
    """Return the maximum size in bytes, on any architecture, of the data kept from a call's entry; 0 if none is."""
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
    """Return the data of a call's entry that the handler of a return needs, or None if it needs none."""
    registers = entry_registers(program, definition, target)
    if registers is None:
        return None
    kept = tuple((each.name, each.index, each.memory_offset) for each in registers)
    return KeptEntry(kept, is_uretprobe, entry_counters(program, definition))


class HandlerCompiler:
    """Compiler of handlers. ``request`` has their common properties, ``items`` the header items of records."""

    def __init__(
        self, program: Program, numbers: ProbeNumbers, request: Request, items: Item, features: Features
    ) -> None:
        self._program = program
        self._numbers = numbers
        if items & (Item.PID | Item.TID | Item.UID | Item.PROCESS_NAME):
            request = replace(request, abilities=request.abilities._replace(task=task_layout(features)))
        self._request = request
        self._items = items
        self._has_multi = Feature.UPROBE_MULTI in features
        self._notes_tickets = has_tickets(program)
        self.giving_back: set[int] = set()
        """Numbers of the probepoints whose hits return their ticket if the instruction faults. The set grows."""

    def parts(self, file: PlannedCode, numbers: range) -> Iterator[Part]:
        """Group the sites of a file's probepoints, and compile the handler of each group."""
        grouped: dict[_Kind, list[tuple[int, Site]]] = {}
        for number in numbers:
            for site in self._numbers.sites[number]:
                grouped.setdefault(self._kind_of(file, number, site), []).append((number, site))
        written = [kind for kind in grouped if not self._is_glob(kind.definition)]
        are_many = len(written) > ALONE_MAX and self._has_multi
        nesting = {kind.definition for kind in grouped if kind.placement is Placement.URETPROBE}
        notes: Counter[int] = Counter()
        for kind, sites in grouped.items():
            note = self._note_of(kind.definition, sites, notes)
            request = self._request_for(file, kind, sites, note, is_nesting=kind.definition in nesting)
            if not kind.is_entry:
                yield self._handler(file, kind, sites, request, are_many=are_many)
                continue
            from dprobes.bpf.lower.hits.call_entries import entry_program

            lowered = entry_program(file.resolved.architecture, request, host_of(request))
            yield Part(file, kind.definition, kind.placement, sites, lowered)

    def _kind_of(self, file: PlannedCode, number: int, site: Site) -> _Kind:
        probe = self._numbers.probes[number]
        # The module's load bias follows from the address of the hit and from ``moved``, which the cookie has as well.
        moved = site.moved if file.resolved.symbols and not self._is_glob(probe.number) else 0
        return _Kind(
            probe.number,
            site.placement,
            site.return_bytes,
            bool(site.anchor),
            site.is_entry,
            number if site.placement.is_trampoline else -1,  # such a program is for one function
            self._pushed(probe),
            moved,
            site.ports,
        )

    def _is_glob(self, definition: int) -> bool:
        return self._program.definitions[definition].has_many_places

    def _request_for(
        self, file: PlannedCode, kind: _Kind, sites: Sequence[tuple[int, Site]], note: int | None, *, is_nesting: bool
    ) -> Request:
        """Return the request for the code of ``sites``; ``note`` is the result of ``_note_of``."""
        definition, resolved = self._program.definitions[kind.definition], file.resolved
        is_glob = self._is_glob(kind.definition)
        first, site = sites[0]
        return replace(
            self._request,
            items=self._items | Item.IP if is_glob else self._items,
            placement=kind.placement,
            probe=None if is_glob and kind.alone < 0 else first,
            arguments=site.arguments,
            link=self._numbers.link_address(first),
            moved=site.moved,
            ports=kind.ports,
            follows_module=kind.is_anchored,
            symbols=dict(resolved.symbols),
            per_cpu=resolved.per_cpu,
            passcount=definition.passcount,
            maxhits=definition.maxhits,
            return_bytes=kind.return_bytes,
            wants_tid=self._is_uncertain(kind.definition, sites),
            note=note,
            entry=_kept(self._program, definition, resolved.architecture, is_uretprobe=is_nesting),
        )

    def _handler(
        self, file: PlannedCode, kind: _Kind, sites: list[tuple[int, Site]], request: Request, *, are_many: bool
    ) -> Part:
        """
        Compile the handler of ``sites``.

        With ``are_many``, compile it for a shared BPF program if that is possible.
        """
        probe, resolved = self._numbers.probes[sites[0][0]], file.resolved
        definition, start = self._program.definitions[kind.definition], resolved.image.handlers[kind.definition]
        point = Point.of(self._program, definition, probe.offset, probe.arguments)
        shared = are_many and not self._is_glob(kind.definition) and kind.alone < 0
        asked = replace(request, probe=None, shared=True) if shared else request
        lowered = lower(resolved.image, resolved.architecture, start, point, asked)
        if shared:
            from dprobes.bpf.lower.hosts.handler_host import can_share

            if not can_share(lowered.assembled):
                shared, lowered = False, lower(resolved.image, resolved.architecture, start, point, request)
        if any(reference.map is MapName.NOTES for reference in lowered.assembled.maps):
            self.giving_back |= {number for number, _ in sites}
        return Part(file, kind.definition, kind.placement, sites, lowered, shared=shared)

    def _pushed(self, probe: Probepoint) -> tuple[Argument, ...]:
        """Return the locations of the arguments that a USDT handler pushes. Sites with different ones share no code."""
        if not (arguments := probe.arguments):
            return ()
        from dprobes.resolve.usdt_probes import arguments_used

        return tuple(arguments[used - 1] for used in arguments_used(self._program, probe.definition))

    def event_parts(self, numbers: Iterable[int]) -> Iterator[Part]:
        """Compile the handlers of the perf events with these numbers; yield a part for each."""
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
                    entry = site._replace(is_entry=True)
                    self._numbers.sites[number] = (entry, site)
                    lowered = lower_entry(event, number, request)
                    yield Part(None, event.probe.number, event.placement, [(number, entry)], lowered)
                lowered = lower_event(event, self._program, number, request)
                yield Part(None, event.probe.number, event.placement, [(number, site)], lowered)

    def _is_uncertain(self, number: int, sites: Sequence[tuple[int, Site]]) -> bool:
        """Return whether records of definition ``number`` are dropped if the instruction at one of ``sites`` faults."""
        definition = self._program.definitions[number]
        return not self._program.keeps_log_on_fault(definition) and any(site.may_fault for _, site in sites)

    def _note_of(self, number: int, sites: Sequence[tuple[int, Site]], used: Counter[int]) -> int | None:
        """
        Return the index, in a thread's value of the map NOTES, of the pair in which a handler notes a hit.

        By this pair, the kernel finds the tickets to return after a fault. Return None if the handler notes nothing,
        because no ticket is ever returned, or because other handlers at the same instruction use all ``NOTE_HITS``
        pairs. ``used`` has the number of used pairs at each file offset, and is updated.
        """
        if not (self._notes_tickets and self._is_uncertain(number, sites)):
            return None
        note = max(used[site.offset] for _, site in sites)
        used.update({site.offset: note + 1 - used[site.offset] for _, site in sites})
        return note if note < NOTE_HITS else None

    def faulting(self, parts: Iterable[Part]) -> dict[int, int]:
        """Return the file offsets of instructions whose fault drops records, keyed by the number of the probepoint."""
        return {
            probe: site.offset
            for part in parts
            for probe, site in part.sites
            if site.may_fault and self._is_uncertain(part.number, part.sites)
        }
