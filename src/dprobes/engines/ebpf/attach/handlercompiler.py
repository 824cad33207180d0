"""The handlers of a run's probepoints, compiled: one for all sites of a definition in a file that are placed alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.bpf.layout import NOTE_HITS, MapName
from dprobes.bpf.lower import host_of, lower
from dprobes.bpf.lower.request import KeptEntry, Placement
from dprobes.engines.ebpf.attach.parts import ALONE_MAX, Part
from dprobes.engines.ebpf.attach.siteplan import Site
from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.ebpf.kernel.taskfields import task_layout
from dprobes.record.layout import Item
from dprobes.resolve.probestate import ProbeState
from dprobes.rpn.needs import entry_registers
from dprobes.rpn.point import Point
from dprobes.rpn.program import MANY_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.arch import Architecture
    from dprobes.arch.arguments import Argument
    from dprobes.bpf.lower.request import Lowered, Request
    from dprobes.engines.ebpf.attach.plannedfile import PlannedCode
    from dprobes.engines.ebpf.attach.probenumbers import ProbeNumbers
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.resolve.probepoints import Probepoint
    from dprobes.rpn.program import ProbeDefinition, Program

__all__ = ["HandlerCompiler", "has_tickets", "largest_entry"]


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
    from dprobes.bpf.lower.callentries import entry_size

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
    from dprobes.bpf.lower.dispatch import can_share

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
                from dprobes.bpf.lower.callentries import entry_program

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
        from dprobes.resolve.usdtprobes import arguments_used

        return tuple(arguments[used - 1] for used in arguments_used(self._program, probe.definition))

    def event_parts(self, numbers: Iterable[int]) -> Iterator[Part]:
        """Compile the handlers of events."""
        for number in numbers:
            event = self._numbers.events[number]
            if event.probe.state is ProbeState.COMPILED:
                from dprobes.engines.ebpf.attach.perfevents import lower_entry, lower_event

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
