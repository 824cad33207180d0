"""Programs of a tracer: their processes, variables and probepoints, and their sites in files."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import apply_changes
from dprobes.engines.hits import probe_hits
from dprobes.engines.hits.probe_hits import Handlers, RecordBuilder
from dprobes.engines.ptrace.breakpoint_sites import Sites
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.engines.ptrace.tracer_messages import End, ModuleMapped, ProbeStatus, Warned
from dprobes.engines.shared_globals import MappedCells
from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence

    from dprobes.engines.engine_interface import ValueChange
    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.engines.hits.probe_hits import ProgramGuard
    from dprobes.engines.overload_guard import Verdict
    from dprobes.engines.ptrace.breakpoint_sites import FileKey, Site, WatchSite
    from dprobes.engines.ptrace.shared_counters import NativeState
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer_messages import Start
    from dprobes.extensions import Extension
    from dprobes.keyed.table_entries import KeyedStore

__all__ = ["EVERYWHERE", "FileSites", "Handled", "InsertedProgram", "Probe", "Programs", "Reach"]

EVERYWHERE: FileKey = (0, 0, "")
"""Key for watchpoints that belong to no file, of programs that probe every process."""

Probe = probe_hits.Probe["InsertedProgram"]
"""Probepoint of one of the tracer's programs."""

Handled = probe_hits.Handled["InsertedProgram"]
"""Result of the handler of such a probepoint."""


@dataclass(slots=True, eq=False)
class Reach:
    """Processes that a program probes: ``pids``, and with ``follow`` those that they start."""

    follow: bool = True
    pids: set[int] = field(default_factory=set)

    def covers(self, pids: set[int]) -> bool:
        """Return whether one of these processes is probed."""
        return not self.pids.isdisjoint(pids)


@dataclass(slots=True, eq=False)
class InsertedProgram:
    """
    Probe program of a tracer; the client assigns ``number``, and ``rank`` is its place in the order of insertion.

    ``everywhere`` are its watchpoints of every process, by word size, and ``known`` its sites in files. ``handlers``
    are keyed by the word size of modules, 4 or 8 bytes.
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
    guard: ProgramGuard | None = None
    thread_count: int = 0
    """Number of variables of each thread."""
    keyed_tables: Sequence[KeyedStore] = ()
    wants_images: bool = False
    principal: InsertedProgram | None = None
    """Program whose variables and tables it uses instead of its own."""
    native: NativeState | None = None
    """State that handlers in the probed processes share with those in the tracer."""
    globals_file: int = -1
    """Descriptor of the global variables if they are shared with other programs, or -1."""
    known: dict[FileKey, Sites] = field(default_factory=dict)
    handlers: dict[int, Handlers] = field(default_factory=dict)
    probes: dict[int, Probe] = field(default_factory=dict)
    _removed: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        start: Start,
        former: InsertedProgram | None = None,
        principal: InsertedProgram | None = None,
        native: NativeState | None = None,
    ) -> InsertedProgram:
        """
        Create the program that a message describes, before it has probepoints.

        A program that replaces a ``former`` one takes over its processes and its place in the order, and its global
        variables if they are not shared. A program with a ``principal`` uses the principal's variables and tables.
        ``native`` is the state that it shares with handlers in the probed processes. Raise ``EngineError`` if one of
        its extensions cannot be loaded.
        """
        local_count, global_count, cpu_count, thread_count = start.variables
        extensions: dict[str, Extension] = {}
        if start.extensions:
            # Load them before anything is traced, because that may take some time.
            from dprobes.extensions.extension_registry import load_extensions

            extensions = load_extensions(start.extensions)
        cells: MutableSequence[int]
        if start.globals >= 0:
            cells = MappedCells(start.globals, global_count)
        else:
            kept = [] if former is None else list(former.global_variables)[:global_count]
            cells = [0] * global_count if native is None else native.global_variables
            for index, value in enumerate(kept):
                cells[index] = value
        counters = SharedCounters(start.counters, local_count, cpu_count, start.tables)
        if native is not None and principal is None:
            counters.use_native(native.variables, native.tables)
        stores: Sequence[KeyedStore] = []
        if principal is not None:
            counters.borrow(principal.counters)
            stores = principal.keyed_tables
        elif start.tables:
            stores = counters.stores()
        guard = None
        if start.budget is not None:
            from dprobes.engines.hits.probe_hits import ProgramGuard

            guard = ProgramGuard(start.budget)
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
            guard,
            thread_count,
            stores,
            start.wants_images,
            principal,
            native,
            start.globals,
        )

    def enter(self, sites: Sites, file: tuple[int, int], warn: Callable[[str, str | None], None]) -> list[Probe]:
        """
        Add the probepoints and handlers of the client's reply about a file to the program.

        ``file`` is the device and inode number. Return the probepoints that were removed before they were added.
        """
        found: tuple[Site | WatchSite, ...] = (*sites.sites, *sites.watches)
        removed = []
        for site in found:
            if site.probe >= 0 and site.probe not in self.probes:
                limits, counts = self.definitions[site.definition], self.counters.tally(site.probe)
                probe = probe_hits.Probe(self, site.probe, site.definition, limits, file, counts)
                self.probes[site.probe] = probe
                if self.native is not None:
                    probe.shared = self.native.hits_of(site.probe, limits)
                if self.guard is not None:
                    probe.load = self.guard.new_load()
                if site.probe in self._removed:
                    probe.state = ProbeState.REMOVED
                    removed.append(probe)
        if sites.code is not None:
            word_size = sites.code.image.word_size
            if word_size not in self.handlers:
                self.handlers[word_size] = Handlers(sites.code.image, sites.code.architecture, warn)
        return removed

    def change(self, changes: Sequence[ValueChange], count: int) -> None:
        """Change variables and tables at the client's request; ``count`` is the number of the request."""
        apply_changes(changes, self.counters.variables.local, self.keyed_tables)
        self.counters.note_changes(count)

    def probe(self, number: int) -> Probe | None:
        """Return the probepoint with a number, or None for -1, the number of the engine's own sites."""
        return self.probes[number] if number >= 0 else None

    def remove(self, numbers: Iterable[int]) -> list[Probe]:
        """Return the present probepoints with ``numbers``, to be removed; those added later are never active."""
        self._removed.update(numbers)
        return [self.probes[number] for number in numbers if number in self.probes]


class Programs(list[InsertedProgram]):
    """The programs of a tracer, in the order of their insertion."""

    def numbered(self, number: int) -> InsertedProgram | None:
        """Return the program with a number, None if it was removed."""
        return next((program for program in self if program.number == number), None)

    def forget_thread(self, tid: int) -> None:
        """Free the variables of a thread that has ended or executes another program."""
        for program in self:
            if program.native is not None:
                program.native.forget_thread(tid)

    @property
    def want_images(self) -> bool:
        """True if at least one program needs reports of the mappings of processes."""
        return any(program.wants_images for program in self)

    def look_after_load(self) -> tuple[float | None, list[tuple[InsertedProgram, Verdict, dict[int, float]]]]:
        """Check the load of programs; return the seconds until the next check, None for never, and the verdicts."""
        guards = [(program, program.guard) for program in self if program.guard is not None]
        if not guards:
            return None, []
        now = time.monotonic()
        found = []
        if due := [(program, guard) for program, guard in guards if guard.due_in(now) <= 0]:
            hits = sum(probe.occurrences for program in self for probe in program.probes.values())
            found = [(program, *guard.look(program.probes, hits)) for program, guard in due]
        return min(guard.due_in(now) for _, guard in guards), found

    def is_the_end(self, message: object) -> bool:
        """Return whether a message requests the removal of the last program."""
        return isinstance(message, End) and [message.program] == [program.number for program in self]


class FileSites:
    """
    Sites of programs in files, which the client sends on request.

    There is one request for each file and program. While the client is stopped, the tracer does not wait for replies:
    it uses them when they arrive.
    """

    def __init__(self, connection: Connection, programs: Programs) -> None:
        self._connection = connection
        self._programs = programs
        self._questions = 0
        self._unanswered: dict[tuple[InsertedProgram, FileKey], int] = {}

    def of_file(
        self, key: FileKey, pid: int, programs: Sequence[InsertedProgram]
    ) -> list[tuple[InsertedProgram, Sites]]:
        """Return the sites of programs in a file that a process maps, except programs whose reply is outstanding."""
        asked: dict[InsertedProgram, int] = {}
        for program in programs:
            if key not in program.known:
                number = self._unanswered.get((program, key))
                asked[program] = self._ask(program, key, pid) if number is None else number
        for program, number in asked.items():
            answer = self._connection.await_answer(number, self._programs.is_the_end)
            if answer is None:
                self._unanswered[program, key] = number
            else:
                self._settle(program, key, answer)
        return [(program, program.known[key]) for program in programs if key in program.known]

    def complete(self, program: InsertedProgram, key: FileKey, pid: int) -> bool:
        """Request a program's sites in a file before its insertion; return False if the client does not reply."""
        answer = self._connection.await_answer(self._ask(program, key, pid), self._programs.is_the_end)
        if answer is None:
            return False
        self.enter(program, answer, key)
        return True

    def everywhere(self, program: InsertedProgram, word_size: int, trouble: str) -> Sites | None:
        """Return a program's watchpoints of all processes; if there are none, warn its user of the ``trouble``."""
        match program.everywhere.get(word_size):
            case Sites() as sites:
                self._enter(program, sites, EVERYWHERE)
                return sites
            case str(problem):
                del program.everywhere[word_size]
                self._connection.send(Warned(trouble, program=program.number, details=problem))
        return None

    def answered(self, sites: Sites) -> FileKey | None:
        """
        Record the client's reply about a file for which the tracer did not wait, and return the key of the file.

        None: no such reply is outstanding.
        """
        known = next((known for known, number in self._unanswered.items() if number == sites.number), None)
        if known is None:
            return None
        program, key = known
        self._settle(program, key, sites)
        return key

    def enter(self, program: InsertedProgram, sites: Sites, key: FileKey) -> None:
        """Record the sites of a program in a file."""
        program.known[key] = sites
        self._enter(program, sites, key)

    def forget(self, program: InsertedProgram) -> None:
        """Ignore outstanding replies for a program."""
        for known in [known for known in self._unanswered if known[0] is program]:
            del self._unanswered[known]

    def _ask(self, program: InsertedProgram, key: FileKey, pid: int) -> int:
        device, inode, path = key
        self._questions += 1
        self._connection.send(ModuleMapped(self._questions, pid, path, device, inode, program.number))
        return self._questions

    def _settle(self, program: InsertedProgram, key: FileKey, sites: Sites) -> None:
        self.enter(program, sites, key)
        if self._unanswered.pop((program, key), None) is not None and sites.code is not None:
            message = f"hits in '{key[2]}' were missed while dprobes was stopped: it could not be asked about that file"
            self._connection.send(Warned(message, program=program.number))

    def _enter(self, program: InsertedProgram, sites: Sites, key: FileKey) -> None:
        def warn(message: str, hint: str | None) -> None:
            self._connection.send(Warned(message, hint, program.number))

        for probe in program.enter(sites, key[:2], warn):
            self._connection.send(ProbeStatus(program.number, (probe.number,), 0, ProbeState.REMOVED))
