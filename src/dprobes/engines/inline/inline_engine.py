"""
Handlers of one program in probed processes: the client's side of ``engines.ptrace.client.program_run``.

::

    breakpoints placed ─► memory shared ─► code and jumps planned for that process ─► jumps written
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import Notice
from dprobes.engines.inline.entry_reader import RingReader, StackEntries
from dprobes.engines.inline.handler_code import CodeWriters, Families, Postponed, tid_place_in
from dprobes.engines.inline.handler_hits import (
    Borrowed,
    HandlerHits,
    HandlerMaps,
    damage_notice,
    new_state,
    refusal_notice,
)
from dprobes.engines.inline.handler_pieces import PieceWriter, call_table_of, planned_sites, site_groups
from dprobes.engines.inline.handler_trials import asks_for_thread
from dprobes.engines.inline.module_plans import ModulePlan, plan_alone, plan_together, sites_together
from dprobes.engines.inline.shared_state import PROBES_MAX, SharedState
from dprobes.engines.ptrace.ptrace_engine import PtraceEngine, PtraceSession
from dprobes.engines.ptrace.tracer_messages import PatchSites, ReleaseMemory, ShareMemory
from dprobes.errors import DprobesError
from dprobes.rpn.program_needs import takes_user_stacks
from dprobes.target.process_images import ProcessImages
from dprobes.target.process_maps import mappings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.engine_interface import Counts, EngineOptions, Job, Scope
    from dprobes.engines.inline.handler_code import ModuleKey
    from dprobes.engines.inline.handler_pieces import Piece, PlannedSite
    from dprobes.engines.inline.module_plans import PlannedJumps
    from dprobes.engines.inline.shared_state import StatePlan
    from dprobes.engines.ptrace.client.program_run import Batch
    from dprobes.engines.ptrace.client.site_answers import Answers
    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.engines.ptrace.tracer_messages import MemoryReleased, MemoryShared, SitesPatched
    from dprobes.platform.linux.procfs import ThreadIdentity
    from dprobes.record.log_record import Item
    from dprobes.resolve.probepoints import ProbeState
    from dprobes.rpn.rpn_program import Program
    from dprobes.target.process_maps import Mapping

__all__ = ["InlineEngine", "InlineHandlers"]


class InlineHandlers:
    """
    The client's side of one program's handlers in processes; ``items`` are the header items of its records.

    ``borrowed`` is the state that they share with other programs. ``why_not`` is the reason why none of them can run in
    a process; None: there is none. ``images`` has the mappings of processes.
    """

    def __init__(
        self,
        program: Program,
        items: Item,
        borrowed: Borrowed,
        why_not: str | None = None,
        images: ProcessImages | None = None,
    ) -> None:
        self._program = program
        self._items = items
        self._writer = PieceWriter(program, items, why_not)
        self.state = None if self._writer.obstacle is not None else new_state(program)
        self._borrowed = borrowed
        self._images = images
        self._calls = call_table_of(program)
        self._maps: HandlerMaps | None = None
        self._pieces: dict[int, tuple[Piece, ...] | str] = {}
        self._waiting: dict[int, set[int]] = {}
        """The probepoints, by process, for which shared memory was requested."""
        self._memories: dict[int, MemoryShared] = {}
        self._families = Families()
        self._postponed = Postponed()
        self._planned: dict[int, list[SitePatch]] = {}
        """The requested jumps, by process; a copy of a process has the jumps of its parent."""
        self._sites: dict[ModuleKey, dict[int, PlannedSite]] = {}
        """The sites in each module, by address."""
        self._writers = CodeWriters(borrowed)
        self._rank = 0
        self._neighbours: Callable[[], Iterable[object]] = tuple
        """The function that returns the other programs with handlers in the same processes."""
        self._hits: HandlerHits | None = None
        self._is_closed = False
        self._limits: dict[int, tuple[int, int]] = {}
        """The ``passcount`` and ``maxhits`` of probepoints."""
        self._probe_count = 0
        """The number after the highest one of a probepoint with handlers in processes."""
        self._ending: set[int] = set()
        """The probepoints that handlers may end."""
        self.refused: dict[int, str] = {}
        """The reasons why probepoints have breakpoints and no jumps."""
        self.jumps: dict[int, set[str]] = {}
        """The methods of the jumps of each probepoint that has jumps."""
        self._asked: dict[int, dict[int, str]] = {}
        """The methods of requested jumps, by process and probepoint."""

    @property
    def plan(self) -> StatePlan | None:
        """The layout of the state, for other programs; None without a state."""
        return None if self.state is None else self.state.plan

    def join(self, rank: int, neighbours: Callable[[], Iterable[object]]) -> None:
        """Set the program's rank in the order of insertion; ``neighbours`` returns other programs' native sides."""
        self._rank, self._neighbours = rank, neighbours

    def native_probes(self, probes: Iterable[int], answers: Answers) -> frozenset[int]:
        """Return those probepoints for which jumps will be requested when they are placed."""
        if self._is_closed:
            return frozenset()
        return frozenset(probe for probe in probes if self._pieces_of(probe, answers))

    def placed(
        self, program: int, pid: int, probes: Sequence[int], answers: Answers
    ) -> ShareMemory | PatchSites | None:
        """
        Request jumps for breakpoints of ``probes`` that the tracer has placed in a process.

        Return the next request to the tracer: to map memory, or to write jumps. None: no jump can replace them, or the
        answer to a request is awaited.
        """
        wanted = self.native_probes(probes, answers)
        if not wanted:
            return None
        known = self._memories.get(pid)
        if known is not None:
            return self._plan(known, set(wanted), answers)
        is_asked = pid in self._waiting
        self._waiting.setdefault(pid, set()).update(wanted)
        return None if is_asked else self._share(program, pid)

    def shared(self, message: MemoryShared, answers: Answers) -> PatchSites | None:
        """
        Record the memory that a process has mapped for handlers, and plan its jumps.

        Return the request to write them; None if there are none, or if the process could not map the memory.
        """
        wanted = self._waiting.pop(message.pid, set())
        if self._is_closed:
            return None
        if message.problem:
            self.refused |= dict.fromkeys(wanted, message.problem)
            return None
        if self._hits is not None:
            self._hits.begin_program(message.pid)
        self._memories[message.pid] = message
        self._families.of(message.pid)
        self._postponed.forget(message.pid)
        return self._plan(message, wanted, answers)

    def patched(self, program: int, message: SitesPatched) -> ShareMemory | None:
        """
        Record the result of a request to write jumps.

        Return a new request to the tracer if the jumps must be planned again, else None.
        """
        refused = message.refused_of(program)
        if (message.is_outdated or message.is_occupied) and self._maps is not None:
            if message.is_outdated:
                self.left(message.pid)
            else:
                self._writers.forget(self._families.of(message.pid))  # new writers read the current mappings
            self._waiting.setdefault(message.pid, set()).update(refused)
            return self._share(program, message.pid)
        for probe in message.probes_of(program):
            if (method := self._asked.get(message.pid, {}).get(probe)) is not None:  # else it is a copy of its parent's
                self.jumps.setdefault(probe, set()).add(method)
        self.refused |= refused
        return None

    def copied(self, pid: int, parent: int) -> None:
        """Record that a process has a copy of its parent's memory, jumps included."""
        self._families.copied(pid, parent)
        if parent in self._planned:
            self._planned[pid] = list(self._planned[parent])

    def left(self, pid: int) -> None:
        """Forget the memory and the planned jumps of a process that has ended or called execve."""
        for known in (self._memories, self._planned, self._asked):
            known.pop(pid, None)
        self._postponed.forget(pid)
        family = self._families.left(pid)
        if family is not None:
            self._writers.forget(family)
            self._sites = {key: sites for key, sites in self._sites.items() if key[0] != family}

    @property
    def is_due(self) -> bool:
        """True if a postponed request to the tracer is due."""
        return not self._is_closed and self._postponed.is_due

    def due(self, answers: Answers) -> PatchSites | None:
        """Return the request to write postponed jumps whose time has come; None if there is none."""
        found = None if self._is_closed else self._postponed.take_due()
        memory = None if found is None else self._memories.get(found[0])
        return None if found is None or memory is None else self._plan(memory, found[1], answers)

    def told(self, identity: ThreadIdentity) -> None:
        """Record the name and user id of a thread, which the tracer reported."""
        if self._hits is not None:
            self._hits.told(identity)

    # Planning

    def _pieces_of(self, probe: int, answers: Answers) -> tuple[Piece, ...]:
        """Return the code that runs in processes for a probepoint; empty if no code can run there."""
        found = self._pieces.get(probe)
        if found is None:
            found = self._writer.pieces(probe, answers.probes[probe], answers.compiled.get(probe))
            self._pieces[probe] = found
            definition = answers.probes[probe].definition
            self._limits[probe] = definition.passcount, definition.maxhits
            if isinstance(found, str):
                self.refused[probe] = found
            elif self._maps is None:
                assert self.state is not None
                self._maps = maps = HandlerMaps(self.state, self._program)
                tables = (self._borrowed.principal or self.state).tables
                stacks = StackEntries.of(self._program, tables, self._images)
                reader = RingReader(self._items, maps.rings.size, PROBES_MAX, stacks)
                self._hits = HandlerHits(maps, reader, self.state)
            if not isinstance(found, str) and self._hits is not None:
                if definition.maxhits or self._writer.is_ending(answers.probes[probe], answers.compiled.get(probe)):
                    self._ending.add(probe)
                self._probe_count = max(self._probe_count, probe + 1)
                self._hits.limit(self._probe_count, self._ending)
        return () if isinstance(found, str) else found

    def _share(self, program: int, pid: int) -> ShareMemory:
        assert self._maps is not None
        region = self._maps.region
        return ShareMemory(program, pid, region.descriptor, region.size, self._calls, *self._borrowed.parts)

    def _plan(self, memory: MemoryShared, wanted: set[int], answers: Answers) -> PatchSites | None:
        """Return the request for the code and the jumps of probepoints; None if the process cannot be inspected."""
        try:
            mappings = mappings_of(memory.pid)
        except DprobesError as error:
            self.refused |= dict.fromkeys(wanted, str(error))  # it has ended, or has too many mappings
            return None
        knows_threads = tid_place_in(memory.pid, mappings) is not None
        asks = not knows_threads and any(self._asks_for_thread(probe) for probe in wanted)
        if asks and self._postponed.add(memory.pid, wanted):
            return _Request().message(memory, sorted(wanted))  # breakpoints serve them meanwhile
        self._postponed.drop(memory.pid, wanted)
        by_file: dict[tuple[int, int], list[int]] = {}
        for probe in sorted(wanted):
            by_file.setdefault(answers.compiled[probe].file, []).append(probe)
        request = _Request()
        for probes in by_file.values():
            self._plan_module(memory, probes, answers, mappings, request)
        self._planned.setdefault(memory.pid, []).extend(request.patches)
        neighbours = [each for each in self._neighbours() if isinstance(each, InlineHandlers)]
        for patch in request.patches:
            mine = (probe for number, probe in patch.probes if number == memory.program)
            self._asked.setdefault(memory.pid, {}).update(dict.fromkeys(mine, patch.method))
            for each in neighbours:
                each.note_asked(memory.pid, patch)
        return request.message(memory)

    def _asks_for_thread(self, probe: int) -> bool:
        pieces = self._pieces[probe]
        return not isinstance(pieces, str) and any(asks_for_thread(piece.code.assembled) for piece in pieces)

    def _plan_module(
        self,
        memory: MemoryShared,
        probes: list[int],
        answers: Answers,
        mappings: list[Mapping],
        request: _Request,
    ) -> None:
        assert self._maps is not None
        family = self._families.of(memory.pid)
        writer = self._writers.writer(family, memory, probes[0], answers, mappings, self._maps)
        if writer is None:
            return
        is_new, bias, file = writer.runtime is None, writer.module.bias, answers.compiled[probes[0]].file
        groups = list(site_groups(piece for probe in probes for piece in self._pieces_of(probe, answers)))
        wanted = planned_sites(groups, memory.program, bias)
        sites = self._sites.setdefault((family, file, bias), {})
        sites.update(wanted)
        mine = ModulePlan(memory.program, self._rank, memory.page, sites, writer)
        if (problem := writer.prepare(min(wanted))) is not None:
            self.refused |= dict.fromkeys(probes, problem)
            return
        beside = self._plans_beside(memory.pid, file, bias)
        plans = [mine, *beside]
        others = {
            answers.probes[number].instruction.address + bias
            for number, site in answers.compiled.items()
            if site.file == file and answers.probes[number].is_in_code
        }.union(*(plan.planned for plan in beside))
        together = sites_together(wanted, plans)
        alone = [address for address in wanted if address not in together]
        if alone:
            self._take(plan_alone(mine, alone, others, memory.pid, mappings), mine, request)
        if together:
            self._take(plan_together(plans, mine, together, others, memory.pid, mappings), mine, request)
            request.memories |= {plan.program: plan.page for plan in plans}
        if writer.runtime is not None and is_new:
            request.code.append((writer.runtime.code.address, writer.runtime.code.code))
            request.fixups += writer.fixups
        request.pages += writer.new_regions()

    def _take(self, made: PlannedJumps, mine: ModulePlan, request: _Request) -> None:
        """
        Add planned jumps and their code to a request, and record in ``refused`` why other probepoints have none.

        ``mine`` is the plan of this program.
        """
        for address, reason in made.refused.items():
            if address in mine.planned:
                self.refused |= dict.fromkeys(mine.planned[address].probes_of(mine.program), reason)
        for jump in made.jumps:
            request.code.append((jump.trampoline.code.address, jump.trampoline.code.code))
        request.patches += made.patches

    def _plans_beside(self, pid: int, file: tuple[int, int], bias: int) -> list[ModulePlan]:
        """Return the plans of other programs for a module of a process."""
        plans = (each.plan_in(pid, file, bias) for each in self._neighbours() if isinstance(each, InlineHandlers))
        return [plan for plan in plans if plan is not None]

    def plan_in(self, pid: int, file: tuple[int, int], bias: int) -> ModulePlan | None:
        """Return the plan for a module of a process; None if there is none."""
        memory = self._memories.get(pid)
        if memory is None or self._is_closed:
            return None
        key = self._families.of(pid), file, bias
        writer = self._writers.find(key)
        if writer is None or writer.runtime is None or not self._sites.get(key):
            return None
        return ModulePlan(memory.program, self._rank, memory.page, dict(self._sites[key]), writer)

    def note_asked(self, pid: int, patch: SitePatch) -> None:
        """Record that another program has requested a jump, which may serve probepoints of this program, too."""
        memory = self._memories.get(pid)
        if memory is not None:
            for probe in (probe for number, probe in patch.probes if number == memory.program):
                self._asked.setdefault(pid, {}).setdefault(probe, patch.method)

    # Results

    def take(self, *, is_over: bool, patience: int = 0) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """
        Return the records that have arrived, each with its probepoint, and the probepoints that have ended.

        ``is_over`` is True if no more records can arrive. Records of the last ``patience`` nanoseconds may be kept.
        """
        return ([], []) if self._hits is None else self._hits.take(is_over=is_over, patience=patience)

    @property
    def has_breakpoints(self) -> bool:
        """True if a probepoint has breakpoints instead of jumps, in at least one process."""
        return bool(self.refused)

    @property
    def settled(self) -> int | None:
        """Monotonic time in nanoseconds; all earlier records were returned. None: all records were."""
        return None if self._hits is None else self._hits.settled

    @property
    def is_busy(self) -> bool:
        """True if so many entries have arrived that the next reading must follow at once."""
        return self._hits is not None and not self._is_closed and self._hits.is_busy

    def to_be_released(self, program: int) -> ReleaseMemory | None:
        """Return a request if handlers seem to have abandoned ring entries or locks; else None."""
        words = None if self._hits is None else self._hits.to_be_released()
        return None if words is None else ReleaseMemory(program, words)

    def released(self, message: MemoryReleased) -> None:
        """Pass on the tracer's reply to the request to release what killed handlers have left in shared memory."""
        if self._hits is not None:
            self._hits.released(is_done=message.is_done)

    def add_counts(self, counts: Sequence[Counts]) -> None:
        """Add the counts of hits at jumps, which the tracer does not count, to ``counts``, in place."""
        if self._hits is not None:
            self._hits.add_counts(counts, self.jumps, self._limits)

    def notices(self) -> Iterator[Notice]:
        """Iterate over the notices at the end: lost records, damaged memory, and reasons for breakpoints."""
        if self._hits is not None and (unfinished := self._hits.unfinished):
            what = "a record is" if unfinished == 1 else f"{unfinished} records are"
            yield Notice(
                f"{what} lost that threads did not finish: they were killed, or left by a jump of a signal handler"
            )
        if self._hits is not None and any(damage := self._hits.damage):
            yield damage_notice(damage)
        reasons = [reason for probe, reason in self.refused.items() if probe not in self.jumps]
        if reasons:
            yield refusal_notice(reasons)

    def disable(self) -> None:
        """Disable all handlers, because the tracer, which handles their faults, has ended."""
        if self._maps is not None:
            for probe in self._pieces:
                self._maps.disable(probe)

    def remove(self, pids: Iterable[int]) -> int:
        """Restore the files' bytes where memory of these processes has jumps; return the number of jumps."""
        if not self._planned:
            return 0
        from dprobes.engines.ptrace.client.outside_removal import remove_jumps

        everything = [patch for patches in self._planned.values() for patch in patches]
        # There was no message about a process that was forked when the tracer was killed.
        return sum(remove_jumps(pid, self._planned.get(pid, everything)) for pid in pids)

    def close(self) -> None:
        """
        Disable all handlers, and release all memory except the state: variables, tables and counts remain readable.

        Later calls return no requests to the tracer.
        """
        self._is_closed = True
        self._maps = None
        if self._hits is not None:
            self._hits.close()


class _Request:
    """Builder of a request to the tracer for one process."""

    def __init__(self) -> None:
        self.memories: dict[int, int] = {}
        """The pages of other programs, by their numbers."""
        self.pages: list[tuple[int, int]] = []
        self.code: list[tuple[int, bytes]] = []
        self.fixups: list[tuple[int, int]] = []
        self.patches: list[SitePatch] = []

    def message(self, memory: MemoryShared, postponed: Sequence[int] = ()) -> PatchSites:
        """Return the request as a message; jumps of ``postponed`` probepoints must wait for further mappings."""
        parts = tuple(self.pages), tuple(self.code), tuple(self.fixups), tuple(self.patches)
        memories = tuple(({memory.program: memory.page} | self.memories).items())
        return PatchSites(memory.program, memory.pid, memories, *parts, tuple(postponed))


# The engine: a tracer places breakpoints, and jumps to handlers in the process replace them where that is possible.
#
# So the engine has all capabilities of the ptrace engine, which handles the probepoints that cannot have a jump.


class InlineEngine(PtraceEngine):
    """Engine that runs handlers in the probed process."""

    name = "inline"

    def session(self, job: Job) -> PtraceSession:
        """Return the session of a job; it has not begun."""
        if job.images is None and takes_user_stacks(job.program):
            job = job._replace(images=ProcessImages())  # ended processes are unwound with their former files
        session = super().session(job)
        program, principal, why_not = job.program, None, None
        if job.principal is not None and (program.vars or program.cvars or program.tvars or program.tables):
            principal = _state_of(job.principal)
            if principal is None:
                why_not = "its variables and tables are those of a program that is not in the process"
        borrowed = Borrowed(principal, job.globals if program.gvars else None)
        session.use_native(InlineHandlers(program, job.items, borrowed, why_not, job.images))
        return session


def _state_of(session: object) -> SharedState | None:
    """Return the shared state of a session's variables and tables; None if it has none."""
    native = session.native if isinstance(session, PtraceSession) else None
    state = None if native is None else native.state
    return state if isinstance(state, SharedState) else None


def engine_for(options: EngineOptions, scope: Scope) -> InlineEngine:  # noqa: ARG001 - the registry's signature
    """Return the engine for the given options."""
    return InlineEngine(options)
