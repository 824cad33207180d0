"""The programs of a tracer: their processes, variables and probepoints, and what the client says of files to them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dprobes.engines.engine_interface import carry_out
from dprobes.engines.hits import probe_hits
from dprobes.engines.hits.probe_hits import Handlers, RecordBuilder
from dprobes.engines.ptrace.breakpoint_sites import Sites
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.engines.ptrace.tracer_messages import End, ModuleMapped, ProbeStatus, Warned
from dprobes.engines.shared_globals import MappedCells
from dprobes.resolve.probe_state import ProbeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence

    from dprobes.engines.engine_interface import Change
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
"""Stands for all files where a program is about none."""

Probe = probe_hits.Probe["InsertedProgram"]
"""A probepoint of one of the tracer's programs."""

Handled = probe_hits.Handled["InsertedProgram"]
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
    guard: ProgramGuard | None = None
    thread_count: int = 0
    """How many variables each thread has."""
    keyed_tables: Sequence[KeyedStore] = ()
    wants_images: bool = False
    principal: InsertedProgram | None = None
    """The program whose variables and tables it uses."""
    native: NativeState | None = None
    """What handlers in the probed processes have in common with those here."""
    globals_file: int = -1
    """The descriptor of the global variables, if other programs have them, too."""
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
        Return the program that a message describes, before it has probepoints.

        One that takes the place of a ``former`` one has its processes and its place in the order, and its global
        variables if they are its own. One with a ``principal`` uses the variables and tables of that. ``native`` is
        what it has in common with handlers in the probed processes. Raise ``EngineError`` if one of its extensions
        cannot be loaded.
        """
        local_count, global_count, cpu_count, thread_count = start.variables
        extensions: dict[str, Extension] = {}
        if start.extensions:
            # Before anything is traced, because that may take its time.
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
        """Note the probepoints and handlers that an answer brings; return those that somebody has removed already."""
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

    def change(self, changes: Sequence[Change], count: int) -> None:
        """Change variables and tables as the client asks; it has asked ``count`` times."""
        carry_out(changes, self.counters.variables.local, self.keyed_tables)
        self.counters.note_changes(count)

    def probe(self, number: int) -> Probe | None:
        """Return the probepoint of a site, None for one of the engine's own."""
        return self.probes[number] if number >= 0 else None

    def remove(self, numbers: Iterable[int]) -> list[Probe]:
        """Return probepoints that are to be removed, by their numbers; those that are yet to come will be inactive."""
        self._removed.update(numbers)
        return [self.probes[number] for number in numbers if number in self.probes]


class Programs(list[InsertedProgram]):
    """The programs of a tracer, in the order of their insertion."""

    def numbered(self, number: int) -> InsertedProgram | None:
        """Return the program that the client gave a number, None if it is not there any more."""
        return next((program for program in self if program.number == number), None)

    def forget_thread(self, tid: int) -> None:
        """Take away what a thread has that is no more, or executes another program."""
        for program in self:
            if program.native is not None:
                program.native.forget_thread(tid)

    @property
    def want_images(self) -> bool:
        """Whether the client of any is to be told what processes map."""
        return any(program.wants_images for program in self)

    def look_after_load(self) -> tuple[float | None, list[tuple[InsertedProgram, Verdict, dict[int, float]]]]:
        """Return in how many seconds to ask again what hits take, None if never, and what is to be done now."""
        guards = [(program, program.guard) for program in self if program.guard is not None]
        if not guards:
            return None, []
        now = time.monotonic()
        found = []
        if due := [(program, guard) for program, guard in guards if guard.due_in(now) <= 0]:
            hits = sum(probe.counts.hits for program in self for probe in program.probes.values())
            found = [(program, *guard.look(program.probes, hits)) for program, guard in due]
        return min(guard.due_in(now) for _, guard in guards), found

    def is_the_end(self, message: object) -> bool:
        """Return whether a message asks for the last program to be taken away."""
        return isinstance(message, End) and [message.program] == [program.number for program in self]


class FileSites:
    """
    What programs have in which files, as the client answers.

    It answers once for each file and program. While it is stopped nobody waits for it: then its answer comes later.
    """

    def __init__(self, connection: Connection, programs: Programs) -> None:
        self._connection = connection
        self._programs = programs
        self._questions = 0
        self._unanswered: dict[tuple[InsertedProgram, FileKey], int] = {}

    def of_file(
        self, key: FileKey, pid: int, programs: Sequence[InsertedProgram]
    ) -> list[tuple[InsertedProgram, Sites]]:
        """Return what programs have in a file that a process maps, as far as the client answers."""
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
        """Let a program that is not inserted yet know a file; return False if the client does not answer."""
        answer = self._connection.await_answer(self._ask(program, key, pid), self._programs.is_the_end)
        if answer is None:
            return False
        self.enter(program, answer, key)
        return True

    def everywhere(self, program: InsertedProgram, word_size: int, trouble: str) -> Sites | None:
        """Return what a program has in all processes; tell its user of the ``trouble`` if that cannot be."""
        match program.everywhere.get(word_size):
            case Sites() as sites:
                self._enter(program, sites, EVERYWHERE)
                return sites
            case str(problem):
                del program.everywhere[word_size]
                self._connection.send(Warned(trouble, program=program.number, details=problem))
        return None

    def answered(self, sites: Sites) -> FileKey | None:
        """Take an answer that was not waited for, because the client was stopped, and return the file that it is of."""
        known = next((known for known, number in self._unanswered.items() if number == sites.number), None)
        if known is None:
            return None
        program, key = known
        self._settle(program, key, sites)
        return key

    def enter(self, program: InsertedProgram, sites: Sites, key: FileKey) -> None:
        """Note what a program has in a file."""
        program.known[key] = sites
        self._enter(program, sites, key)

    def forget(self, program: InsertedProgram) -> None:
        """Take no answer any more that is for a program."""
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
