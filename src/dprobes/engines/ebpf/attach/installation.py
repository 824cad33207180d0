"""
Probe program in the kernel: its maps, BPF programs and links, created from the plans of its files.

``handler_compiler`` compiles the handlers, and ``site_links`` manages the links.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dprobes.bpf.lower.lowering_request import Placement, Tables
from dprobes.bpf.map_layouts import LIMIT, LOAD_LIMIT, PROBE_MAX, REMOVE, SwitchOver, power_of_two
from dprobes.engines.ebpf.attach.handler_compiler import (
    HandlerCompiler,
    ProbeNumbers,
    batches,
    has_tickets,
    joined,
    largest_entry,
)
from dprobes.engines.ebpf.attach.handler_objects import basic_request, load_handler, span_in
from dprobes.engines.ebpf.attach.map_objects import SharedMaps, Sizes, state_count
from dprobes.engines.ebpf.attach.run_scope import is_in_scope
from dprobes.engines.ebpf.attach.site_links import Attachments, Group
from dprobes.engines.ebpf.inkernel.kernel_groups import KernelGroups
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
from dprobes.engines.ebpf.kernel.kernel_features import Feature
from dprobes.engines.engine_interface import Notice, StateEvent
from dprobes.engines.overload_guard import budget_of
from dprobes.errors import DprobesError, EngineError
from dprobes.platform.linux.procfs import cpu_limit
from dprobes.resolve.probepoints import ProbeKind, ProbeState
from dprobes.rpn.program_needs import dumps_core, makes_records, shared_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from dprobes.bpf.lower.lowering_request import Filter, Request
    from dprobes.engines.ebpf.attach.code_mappers import Conflict
    from dprobes.engines.ebpf.attach.file_spec import Findings, PlannedCode, PlannedFile
    from dprobes.engines.ebpf.attach.handler_compiler import Part
    from dprobes.engines.ebpf.attach.module_watch import ModuleWatch
    from dprobes.engines.ebpf.ebpf_options import Settings
    from dprobes.engines.ebpf.kernel.bpf_links import ProgramForm
    from dprobes.engines.engine_interface import Event, Job
    from dprobes.resolve.probepoints import Probepoint

__all__ = ["Installation"]


_RING_WITHOUT_RECORDS = 1 << 21
"""Maximum size in bytes of the ring if handlers log nothing: to create a large ring takes longer than anything else."""

_LISTED = 3  # offsets named in a message

_WATCHED_LATE = (
    "memory is watched from now on: accesses ran no handler since the old program released its debug registers"
)

_ROOM = 2
"""Factor by which newly mapped files may increase the number of probepoints."""

_ROOM_MIN = 64
"""Minimum number of probepoints for which the probe table has room."""


class Installation:
    """Probe program in the kernel. ``attach`` activates its probepoints, ``close`` removes all of them."""

    def __init__(
        self,
        settings: Settings,
        job: Job,
        found: Findings,
        scope: Filter,
        namespace: tuple[int, int] | None,
        principal: SharedMaps | None = None,
    ) -> None:
        features = self._features = settings.features
        self._program = job.program
        self.numbers = numbers = ProbeNumbers()
        """The numbers of the probepoints, with their sites."""
        self._unavailable: dict[int, str] = {}
        planned: list[PlannedCode] = [*found.files, *([found.kernel] if found.kernel is not None else ())]
        owned = [(code, numbers.enter(code)) for code in planned]
        events = numbers.enter_events(found.events)
        count = len(self.probes)
        self.bank_size = power_of_two(max(_ROOM * count, _ROOM_MIN))
        self.entries = 2 * self.bank_size
        """Number of entries of the probe table: two for each probepoint (``site_links``)."""
        self._foreign_room = (self.bank_size - count) // 2
        if self.entries > PROBE_MAX:
            raise EngineError(f"{count} probepoints are too many: the ebpf engine can have {PROBE_MAX // 2 // _ROOM}")
        cpus = power_of_two(cpu_limit())
        self.budget = budget = budget_of(settings.overhead, job.scope, job.program)
        tables = Tables(state_count(), cpus, self.entries)
        request = replace(
            basic_request(features, self._program),
            shared_tables=frozenset().union(*map(shared_tables, job.companions or (job.program,))),
            filter=scope,
            tables=tables,
            namespace=namespace,
            replaceable=settings.replaceable,
            replaces=job.replaces is not None,
            load_limit=None if budget is None else int(budget * LOAD_LIMIT),
        )
        self._compiler = HandlerCompiler(self._program, numbers, request, job.items, features)
        self._parts = [part for file, entered in owned for part in self._compiler.parts(file, entered)]
        event_parts = list(self._compiler.event_parts(events))
        state = max((p.lowered.state.size for p in (*self._parts, *event_parts) if p.lowered is not None), default=64)
        if found.kernel is None or found.kernel.resolved.module.is_loaded:
            self._parts += event_parts
        else:
            self._unavailable.update(dict.fromkeys(events, "its module is not loaded"))
        self.notes_tickets = has_tickets(self._program)
        self.maps = self._make_maps(settings, job, request, state, principal, for_events=bool(events))
        self._postponed: list[Group] = []
        self.attachments = Attachments(self.maps, self.bank_size, self._link)
        self._conflicting: set[int] = set()
        self._programs = Descriptors()
        self._scope, self._filter = job.scope, scope
        self._watches: dict[int, ModuleWatch] = {}
        """Watches on the memory of modules, by the ``id()`` of the module. Most programs have none."""
        self.kernel = KernelGroups(numbers.probes, found.kernel, request, self.maps.descriptors, features)
        """Probepoints attached to the kernel's code."""

    def _make_maps(
        self,
        settings: Settings,
        job: Job,
        request: Request,
        state: int,
        principal: SharedMaps | None,
        *,
        for_events: bool,
    ) -> SharedMaps:
        """Create the maps of the program, whose handlers have a state of ``state`` bytes."""
        program, shared, tables = self._program, job.globals, request.tables
        if shared is not None:
            shared.check(program.gvars)
        sizes = Sizes(
            probes=self.entries,
            state=state,
            ring=settings.ring_size if makes_records(program) else min(settings.ring_size, _RING_WITHOUT_RECORDS),
            states=tables.states,
            cpus=tables.cpus,
            locals=program.vars,
            globals=program.gvars if shared is None else 0,
            cpu_variables=program.cvars,
            thread_variables=program.tvars,
            counters=request.abilities.counters,
            for_tree=request.filter.processes,
            for_events=for_events,
            replaceable=settings.replaceable,
            replaces=job.replaces is not None,
            notes=self.notes_tickets,
            loads=self.budget is not None,
            entry=largest_entry(program),
            stops=dumps_core(program),
        )
        globals_ = None if shared is None else shared.descriptor
        maps = SharedMaps(sizes, globals_, program.tables, request.shared_tables, principal)
        if job.replaces is not None:
            maps.set_switch_over(SwitchOver.NOT_OURS)
        return maps

    @property
    def probes(self) -> Sequence[Probepoint]:
        """Probepoints by number. New ones are appended."""
        return self.numbers.probes

    @property
    def giving_back(self) -> AbstractSet[int]:
        """Numbers of the probepoints whose hits return their ticket if the instruction faults. The set grows."""
        return self._compiler.giving_back

    def is_void(self, probe: int, reason: int) -> bool:
        """Return True if the fault of a hit undoes the end of a probepoint. ``reason`` is as in ``Ended``."""
        if probe not in self.giving_back:
            return False
        if reason == REMOVE:
            return not self.attachments.is_disabled(probe)
        return reason == LIMIT and self.attachments.hits(probe) < self.numbers.limit(probe)

    def expired(self) -> set[int]:
        """Return the numbers of the probepoints that handlers have ended, and that have not been removed yet."""
        exhausted = {
            probe
            for probe in self.giving_back
            if self.attachments.is_there(probe) and 0 < self.numbers.limit(probe) <= self.attachments.hits(probe)
        }
        return self.attachments.expired() | exhausted

    @property
    def faulting(self) -> dict[int, int]:
        """File offsets of instructions whose fault drops records, keyed by the number of the probepoint."""
        return self._compiler.faulting(self._parts)

    def has_room_for(self, file: PlannedFile) -> bool:
        """
        Return whether there is room for the probepoints of a newly mapped file.

        Other users' files get half of it.
        """
        more = len(file.probes) + len(file.resolved.events)
        if file.owner is not None and more > self._foreign_room:
            return False  # the other half is reserved for files of this user
        return len(self.probes) + more <= self.bank_size

    def add(self, file: PlannedFile, conflicts: Iterable[Conflict]) -> list[StateEvent]:
        """
        Attach handlers in a newly mapped file; return the states of its probepoints.

        Probepoints in ``conflicts`` are not attached.
        """
        if file.owner is not None:
            self._foreign_room -= len(file.probes)
        numbers = self.numbers.enter(file)
        events = self.numbers.enter_events(file.events)
        parts = [*self._compiler.parts(file, numbers), *self._compiler.event_parts(events)]
        self._parts += parts
        states = self._attach(parts, self._refuse_conflicting(file, conflicts))
        present = set(self.attached)
        attached = tuple(number for number in (*numbers, *events) if number in present)
        return [*states, *([StateEvent(attached, 0, ProbeState.ACTIVE)] if attached else [])]

    def attach(self) -> list[StateEvent]:
        """
        Write the probe table, then load and attach the handlers.

        Return the states of probepoints that cannot be inserted, because the code of a process differs from the file,
        or all debug registers are in use.
        """
        files = {id(part.file): part.file for part in self._parts if part.file is not None}
        states: list[StateEvent] = []
        for file in files.values():
            states += self._refuse_conflicting(file, file.conflicts())
        return self._attach(self._parts, states)

    def _attach(self, parts: Sequence[Part], states: list[StateEvent]) -> list[StateEvent]:
        for part in parts:
            if part.file is None:
                continue
            for probe, _ in part.sites:
                link = self.numbers.link_address(probe)
                for entry in self.entries_of(probe):
                    self.maps.set_place(entry, link, self.probes[probe].offset)
        if self.maps.load is not None:
            self.maps.load.set_costs((self.entries_of(number), site) for part in parts for number, site in part.sites)
        for batch in batches(parts):
            self._attach_batch(batch)
        if not self._postponed:
            self._start_watching()
        numbers = [number for part in parts for number, _ in part.sites]
        return [*states, *self._unavailable_of(numbers), *self.kernel.states_of(numbers)]

    def _attach_batch(self, batch: Sequence[Part]) -> None:
        """Load the BPF program of a batch of parts, and attach it."""
        first = batch[0]
        watching = self._watching_of(first.sites[0][0])
        maps = watching.maps if watching is not None else self.maps.descriptors
        minors = [self._program.definitions[part.number].minor for part in (first, *batch[1:][-1:])]
        name = " to ".join(f"{self._program.major},{minor}" for minor in minors)
        attach_type = uprobe_attach_type(self._features)
        lowered = joined(batch, self.bank_size)
        form = self._form_of(first)
        spans = partial(span_in, self._program, lowered.word_size)
        program = self._programs.add(load_handler(lowered, first.placement, maps, attach_type, name, form, spans))
        for part in batch:
            part.lowered = None
        sites = [pair for part in batch for pair in part.sites if pair[0] not in self._conflicting]
        if not sites:
            return
        reached, shown = (first.file.reached, first.file.path) if first.file is not None else ("", "")
        group = Group(program, reached, shown, first.placement, sites, is_entry=sites[0][1].is_entry)
        if self._is_postponed(sites[0][0]):
            self._postponed.append(group)
            return
        self.attachments.attach(group)
        if len({probe for probe, _ in sites}) == 1 and reached:
            # The program is never attached again, and the link keeps it loaded.
            os.close(self._programs.remove(program))

    def _unavailable_of(self, numbers: Iterable[int]) -> list[StateEvent]:
        found = self._unavailable
        return [StateEvent((n,), 0, ProbeState.DEBUGREG_UNAVAIL, found[n]) for n in numbers if n in found]

    def _is_postponed(self, number: int) -> bool:
        """Return whether a watchpoint must wait until the replaced program has released its debug registers."""
        if number not in self.numbers.events or self.maps.switch_over is not SwitchOver.NOT_OURS:
            return False
        return self.numbers.events[number].probe.kind is ProbeKind.WATCHPOINT

    def attach_postponed(self) -> list[Event]:
        """Attach the watchpoints that waited for the replaced program's end; return events about failures."""
        postponed, self._postponed = self._postponed, []
        if not postponed:
            return []
        events: list[Event] = [Notice(_WATCHED_LATE, is_warning=False)]
        for group in postponed:
            ((number, _),) = group.sites
            try:
                self.attachments.attach(group)
            except DprobesError as error:
                self._unavailable[number] = error.message
        events += self._unavailable_of(number for group in postponed for number, _ in group.sites)
        try:
            self._start_watching()
        except DprobesError as error:
            events.append(Notice(f"memory is not watched in all processes: {error.message}", error.hint))
        return events

    def _form_of(self, part: Part) -> ProgramForm | None:
        """Return the load parameters of a BPF program at a tracepoint or trampoline, or None for other placements."""
        if part.placement.is_trampoline:
            from dprobes.engines.ebpf.kernel.bpf_links import trampoline_form

            return trampoline_form(part.placement, self.probes[part.sites[0][0]].where, self._features.types)
        if part.placement is not Placement.TRACEPOINT:
            return None
        from dprobes.engines.ebpf.kernel.bpf_links import form_of
        from dprobes.target.kernel.traced_fields import entry_of

        number, site = part.sites[0]
        traced = self.numbers.events[number].probe.traced
        return form_of(entry_of(traced) if site.is_entry else traced, self._features.types)

    def _watching_of(self, number: int) -> ModuleWatch | None:
        """Return the object that places a watchpoint in each process that maps its module, or None for others."""
        event = self.numbers.events.get(number)
        if event is None or event.module is None or event.probe.kind is not ProbeKind.WATCHPOINT:
            return None
        key = id(event.module)
        if key not in self._watches:
            from dprobes.engines.ebpf.attach.module_watch import ModuleWatch

            place, is_ours = event.paths[0], partial(is_in_scope, self._scope, maps=self.maps)
            self._watches[key] = ModuleWatch(event.module, place, self._filter, self.maps, self._features, is_ours)
        return self._watches[key]

    def happened(self) -> Iterator[Event]:
        """Iterate over the new events of watchpoints whose modules were mapped or unmapped."""
        for each in self._watches.values():
            yield from each.happened()

    def _start_watching(self) -> None:
        for each in self._watches.values():
            each.start()

    def _refuse_conflicting(self, file: PlannedCode, conflicts: Iterable[Conflict]) -> list[StateEvent]:
        """Exclude the conflicting probepoints of a file from attachment; return their states."""
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
        if group.placement in (Placement.EVENT, Placement.TRACEPOINT):
            return self._link_event(group)
        if group.placement.is_in_kernel:
            return self.kernel.link(group, places)
        is_return = group.placement is Placement.URETPROBE
        return attach_uprobes(
            group.program,
            group.path,
            places,
            self._features,
            at_return=is_return,
            counters=[site.counter for _, site in group.sites],
            shown=group.shown,
        )

    def _link_event(self, group: Group) -> Descriptors:
        ((number, _),) = group.sites
        event = self.numbers.events[number]
        if (watching := self._watching_of(number)) is not None:
            return watching.add(number, event.probe.memory, group.program)
        from dprobes.engines.ebpf.attach.perf_probes import attach_event

        links = attach_event(event, group.program)
        if isinstance(links, str):
            self._unavailable[number] = links
            return Descriptors()
        return links

    def warning_of_slow_end(self) -> Notice | None:
        """Return the notice that this kernel takes long to remove these uprobes, or None if it does not."""
        count = sum(
            probe not in self._conflicting
            for part in self._parts
            if part.file is not None and part.file.reached
            for probe, _ in part.sites
        )
        if not count or Feature.UPROBE_MULTI in self._features:
            return None
        what = "the breakpoint has" if count == 1 else f"each of the {count} breakpoints has"
        return Notice(
            f"this kernel has no uprobe_multi links: {what} a separate perf event, and takes 0.1 s to remove",
            is_warning=False,
        )

    @property
    def attached(self) -> tuple[int, ...]:
        """Numbers of the probepoints that are attached."""
        absent = self._conflicting | self._unavailable.keys() | self.kernel.refused.keys()
        return tuple(number for number, sites in self.numbers.sites.items() if sites and number not in absent)

    def attach_events(self, numbers: Iterable[int]) -> list[StateEvent]:
        """
        Compile and attach perf events in a module that was loaded after the start of the run.

        ``numbers`` has the numbers of their probepoints. Return a state for each event that the kernel refuses.
        """
        for number in numbers:
            self._unavailable.pop(number, None)
        return self._attach(list(self._compiler.event_parts(numbers)), [])

    def entries_of(self, number: int) -> tuple[int, int]:
        """Return the indices of a probepoint's two entries in the probe table."""
        return number, self.bank_size + number

    def detach(self) -> None:
        """Close all links. Counters can still be read."""
        self.kernel.look_at_ways()
        self.attachments.close()

    def breakpoints_in(self, descriptor: int) -> frozenset[int]:
        """Return the file offsets of this program's uprobes in the file that is open as ``descriptor``."""
        status = os.fstat(descriptor)
        return frozenset(offset for offset, _ in self.original_bytes().get((status.st_dev, status.st_ino), ()))

    def original_bytes(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Return file offset and original byte of each breakpoint, keyed by the file's device and inode number."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part in self._parts:
            if part.file is None:
                continue
            if (original := part.file.original()) is not None:
                identity, data = original
                pairs = found.setdefault(identity, [])
                pairs += [(site.offset, data[site.offset]) for _, site in part.sites]
        return found

    def unhandled(self) -> Iterator[tuple[int, int]]:
        """Iterate over the probepoints whose handlers were ended by exceptions, each with their bit mask."""
        for entry, bits in self.maps.unhandled().items():
            yield entry % self.bank_size, bits

    def close(self) -> None:
        """Remove links, BPF programs and maps from the kernel."""
        self.detach()
        for each in self._watches.values():
            each.close()
        self.kernel.close()
        self._programs.close()
        self.maps.close()
