"""
The code of handlers for one process: routines, and a trampoline for each probepoint, where there is room for them.

::

    handler in eBPF ─► its trampoline's size ─► a place for it near the instruction ─► machine code for that place
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dprobes.bpf.map_layouts import MapName
from dprobes.engines.inline.handler_trampolines import Trampoline, make_displacing_trampoline, size_bound
from dprobes.engines.inline.handler_trials import obstacle_in_process
from dprobes.engines.ptrace.site_patches import OF_64_BITS
from dprobes.errors import DprobesError, TargetError
from dprobes.native.generated_code import MapPlace, Part, ProcessFacts, Surroundings
from dprobes.native.handler_trampoline import make_trampoline
from dprobes.native.process_page import PROCESS_SIZE
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.platform.linux.procfs import first_stack_of, without_waiting
from dprobes.platform.x86.patches.branch_targets import ModuleCode
from dprobes.platform.x86.patches.patch_placer import MANY, Placement, Placer, Shared
from dprobes.platform.x86.patches.patch_plans import Method, Refusal
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.process_maps import PAGE_SIZE, growth_of, run_time_address

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dprobes.bpf.bpf_assembler import Assembled
    from dprobes.engines.inline.handler_hits import Borrowed, HandlerMaps
    from dprobes.engines.inline.handler_trials import Trial
    from dprobes.engines.ptrace.client.site_answers import Answers
    from dprobes.engines.ptrace.tracer_messages import MemoryShared
    from dprobes.native.generated_code import Fixup, Runtime
    from dprobes.native.routines.handler_ring import RingShape
    from dprobes.native.routines.shared_hash_table import TableShape
    from dprobes.target.probed_module import Module
    from dprobes.target.process_maps import Mapping as MemoryMapping

__all__ = [
    "CodeWriter",
    "CodeWriters",
    "Families",
    "ModuleKey",
    "PlacedJump",
    "Postponed",
    "SiteHandler",
    "tid_place_in",
    "tid_place_of",
]

_MANY = MANY // 2
"""From so many instructions on windows come first: the page of a punned jump is one more mapping of the process."""

_SLACK = 64
"""Bytes by which the size of code may differ between two addresses, since numbers have short forms."""

_REACH = 1 << 30
_NO_MEMORY = "no memory near it is free"


_DISPLACED_MAX = 112 + len(OF_64_BITS)
"""Bytes that displaced instructions take at most, with the jump back: five or six of them, most of one or two bytes."""

_LOOK_SIZE = 32
"""Bytes of code, for each of several handlers, that finds out before a trial whether there is anybody who has it."""


class SiteHandler(NamedTuple):
    """A handler of an instruction, and what its code finds ``around`` it: None for that of the writer's program."""

    assembled: Assembled
    around: Surroundings | None = None


class PlacedJump(NamedTuple):
    """A jump to the handlers of the instructions at ``sites``, and what it leads to."""

    sites: tuple[int, ...]
    placement: Placement
    trampoline: Trampoline


class CodeWriter:
    """The writer of code for the probepoints in one module of a process."""

    def __init__(
        self,
        module: ModuleCode,
        space: AddressSpace,
        facts: ProcessFacts,
        maps: Mapping[MapName, MapPlace],
        rings: RingShape,
        tables: Mapping[MapName, TableShape],
    ) -> None:
        self.module = module
        self.space = space
        self._facts = facts
        self._maps = maps
        self._rings = rings
        self._tables = tables
        self._runtime: Runtime | None = None
        self._mapped: set[int] = set()
        self._placer = Placer(module, space, 0)
        self._trials: dict[int, Trial] = {}
        """What comes before the handlers of instructions, by their addresses."""
        self._handlers: dict[int, dict[int, Sequence[SiteHandler]]] = {}
        """The handlers that each jump leads to, by where it is: by the addresses of their instructions."""
        self._sizes: dict[tuple[tuple[int, ...], ...], int] = {}
        """How many bytes handlers take, about, by the operations that they consist of."""
        self._has_switches = False

    def anew(self) -> CodeWriter:
        """
        Return a writer for the same module and memory that knows of no jump, for handlers of several programs.

        It uses the routines of this one, which has them.
        """
        other = CodeWriter(self.module.unchanged(), self.space, self._facts, self._maps, self._rings, self._tables)
        other._runtime, other._mapped, other._has_switches = self._runtime, self._mapped, True
        return other

    def new_regions(self) -> list[tuple[int, int]]:
        """Return (start, end) of all that is to be mapped, and was not returned before."""
        wanted = {page for start, end in self.space.regions() for page in range(start, end, PAGE_SIZE)}
        runs: list[tuple[int, int]] = []
        for page in sorted(wanted - self._mapped):
            if runs and runs[-1][1] == page:
                runs[-1] = runs[-1][0], page + PAGE_SIZE
            else:
                runs.append((page, page + PAGE_SIZE))
        self._mapped |= wanted
        return runs

    @property
    def runtime(self) -> Runtime | None:
        """The routines, once there is a handler."""
        return self._runtime

    @property
    def fixups(self) -> tuple[Fixup, ...]:
        """Where threads go on that fault in them."""
        return () if self._runtime is None else self._runtime.code.fixups

    def place(
        self,
        handlers: Mapping[int, Sequence[SiteHandler]],
        bound: Iterable[Collection[int]] = (),
        others: Collection[int] = (),
        trials: Mapping[int, Trial | str] = MappingProxyType({}),
    ) -> tuple[list[PlacedJump], dict[int, str]]:
        """
        Return the jumps to handlers of instructions, and why some have none.

        Of the instructions that are ``bound`` to each other all have jumps, or none. A jump that leads to handlers of
        several instructions is given out anew when one is added. The ``others`` are instructions with breakpoints,
        which no jump should displace. Before handlers come ``trials``, or these say why they cannot.
        """
        refused = {site: trial for site, trial in trials.items() if isinstance(trial, str)}
        self._trials.update((site, trial) for site, trial in trials.items() if not isinstance(trial, str))
        for site, each in handlers.items():
            problems = (obstacle_in_process(assembled, self._facts) for assembled, _ in each)
            if (problem := next(filter(None, problems), None)) is not None:
                refused[site] = problem
        if (problem := self.prepare(min(handlers))) is not None:
            return [], dict.fromkeys(handlers, problem)
        groups = {site: group for group in bound for site in group}
        live = set(self._handlers)
        known = frozenset((*handlers, *others))
        placed: dict[int, Placement] = {}
        for site in sorted(handlers.keys() - refused.keys(), reverse=True):
            found = self._placement(site, handlers[site], known, set() if site not in groups else live)
            if isinstance(found, str):
                refused[site] = found
            else:
                placed[found.plan.start] = found
        jumps: dict[int, PlacedJump] = {}
        for start, placement in placed.items():
            jump = self._jump(placement, self._handlers[start])
            if jump is None:
                refused |= dict.fromkeys(self._handlers[start], _NO_MEMORY)
                self._forget(placement)
            else:
                jumps[start] = jump
        self._keep_bound(jumps, refused, groups)
        return list(jumps.values()), refused

    def _keep_bound(
        self, jumps: dict[int, PlacedJump], refused: dict[int, str], groups: Mapping[int, Collection[int]]
    ) -> None:
        """Give up the jumps whose handlers are bound to such as have none."""
        while True:
            for site in list(refused):
                refused |= {other: refused[site] for other in groups.get(site, ()) if other not in refused}
            gone = [start for start, jump in jumps.items() if not refused.keys().isdisjoint(jump.sites)]
            if not gone:
                return
            for start in gone:
                jump = jumps.pop(start)
                reason = next(refused[site] for site in jump.sites if site in refused)
                refused |= {site: reason for site in jump.sites if site not in refused}
                self._forget(jump.placement)

    def _forget(self, placement: Placement) -> None:
        """Give up what was placed, and not written."""
        del self._handlers[placement.plan.start]
        self._placer.remove(placement)

    def _placement(
        self, site: int, handlers: Sequence[SiteHandler], others: Collection[int], avoided: Collection[int]
    ) -> Placement | str:
        """Return the placement of the jump that leads to some handlers, not one of those at ``avoided`` places."""
        (found,) = self._placer.place(
            [site],
            # A punned jump of another program may have the only addresses that there are.
            windows_first=self._has_switches or len(others) > _MANY,
            room=self._room({site: handlers}),
            others=others,
        )
        if isinstance(found, Refusal):
            return found.reason
        placement = found.placement if isinstance(found, Shared) else found
        start = placement.plan.start
        if isinstance(found, Shared):
            there = self._handlers.get(start, {})
            if there.get(site) == handlers:
                return placement  # its module is back where it was, without the jump
            if start in avoided or site in there or site < start:
                return "it is displaced for another probe"
            larger = self._placer.enlarge(placement, self._room({**there, site: handlers}))
            if larger is None:
                return "it is displaced for another probe, and no memory is free for both"
            placement = larger
        elif found.plan.crosses_page and found.plan.site != start:
            # No breakpoint is where it begins: half of it could be written when the tracer is killed.
            self._placer.remove(found)
            return "its jump would lie in two pages"
        self._handlers.setdefault(start, {})[site] = handlers
        return placement

    def _jump(self, placement: Placement, handlers: Mapping[int, Sequence[SiteHandler]]) -> PlacedJump | None:
        parts = {site: self._parts(each) for site, each in handlers.items()}
        try:
            trampoline = make_displacing_trampoline(
                placement.plan, placement.trampoline, parts, self._trials, has_switches=self._has_switches
            )
        except OverflowError:
            return None  # a punned jump leads so far that its handler cannot call routines
        if len(trampoline.code.code) > placement.room:
            needed = len(trampoline.code.code) + _SLACK
            larger = None if placement.plan.method is Method.PUN else self._placer.enlarge(placement, needed)
            return None if larger is None else self._jump(larger, handlers)
        return PlacedJump(tuple(sorted(handlers)), placement, trampoline)

    def _room(self, handlers: Mapping[int, Sequence[SiteHandler]]) -> int:
        """Return how many bytes are enough for some handlers and what is displaced."""
        assert self._runtime is not None
        near = self._runtime.code.address
        total = _DISPLACED_MAX
        for site, each in handlers.items():
            shape = tuple(tuple(insn.opcode for insn in assembled.code) for assembled, _ in each)
            size = self._sizes.get(shape)
            if size is None:
                made = make_trampoline(
                    X86Operations(near), site, self._parts(each), lambda _: None, has_switches=self._has_switches
                )
                size = len(made.code) + _SLACK + (_LOOK_SIZE * len(each) if len(each) > 1 else 0)
                self._sizes[shape] = size
            total += size + size_bound(self._trials.get(site))
        return total

    def _parts(self, handlers: Sequence[SiteHandler]) -> list[Part]:
        own = self.around
        return [Part(assembled, own if around is None else around) for assembled, around in handlers]

    @property
    def around(self) -> Surroundings:
        """What the code of its program's handlers finds around it, once there are routines."""
        runtime = self._runtime
        assert runtime is not None
        facts = self._facts
        return Surroundings(
            self._maps, runtime.routines, runtime.map_routines, facts.has_rdpid, self._rings, facts.life_mark
        )

    def prepare(self, site: int) -> str | None:
        """Place the routines near an instruction, unless they are placed; return why that cannot be."""
        if self._runtime is not None:
            return None
        facts, rings, tables = self._facts, self._rings, self._tables
        size = len(make_runtime(X86Operations(site), facts, rings, tables).code.code) + _SLACK
        address = self.space.allocate(max(0, site - _REACH), site + _REACH, size)
        if address is None:
            return _NO_MEMORY
        self._runtime = make_runtime(X86Operations(address), facts, rings, tables)
        return None


# Where the C library of a process has the id of a thread.
#
# glibc says so for debuggers (nptl_db): ``_thread_db_pthread_tid`` in libc.so.6 describes the member ``tid`` of
# ``struct pthread``: bits, number of elements, and the offset from the thread pointer, a 32-bit number each
# (nptl_db/db_info.c). musl, since 1.2.2, has it where its ``gettid`` takes it from (src/linux/gettid.c). These are the
# ids of the process's own PID namespace; if that is a nested one, ``native.process_page`` has those of ours.


_SYMBOL = "_thread_db_pthread_tid"
_FIELD = struct.Struct("<III")

_LIBRARIES = ("libc.so", "libc-", "libpthread", "ld-musl-")
_LINKER = ("ld-", "ld.so")
"""How names of dynamic linkers begin: a program without one has its C library in itself."""
_GETTID = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\x64\x48\x8b\x04\x25\0{4}\x8b(?:\x40(.)|\x80(.{4}))\xc3", re.DOTALL)
"""``mov rax, fs:[0]``, ``mov eax, [rax + N]`` and ``ret``, perhaps behind an ``endbr64``."""
_GETTID_SIZE = 20


def tid_place_in(pid: int, mappings: list[MemoryMapping]) -> int | None:
    """Return where threads of a process have their id, in bytes from the thread pointer; None if nobody knows."""
    files = {mapping.path: mapping.inode for mapping in mappings if mapping.is_file}
    libraries = [path for path in files if Path(path).name.startswith(_LIBRARIES)]
    for path in libraries:
        if (place := _place(f"/proc/{pid}/root{path}", files[path])) is not None:
            return place
    is_dynamic = libraries or any(Path(path).name.startswith(_LINKER) for path in files)
    return None if is_dynamic or not files else _place(f"/proc/{pid}/exe", _inode_of(f"/proc/{pid}/exe"))


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


@lru_cache(16)
def _place(path: str, inode: int) -> int | None:  # noqa: ARG001 - another file at the same path is another answer
    with contextlib.suppress(DprobesError, OSError, struct.error):
        return tid_place_of(Path(path))
    return None


def tid_place_of(path: Path) -> int | None:
    """Return where a C library has the id of a thread; None if it does not say so; raises as ``Module.load``."""
    from dprobes.target.probed_module import Module

    module = Module.load(path)
    with contextlib.suppress(TargetError):
        bits, _, place = _FIELD.unpack(_read(path, module, _SYMBOL, _FIELD.size))
        return int(place) if bits == 32 else None
    found = _GETTID.match(_read(path, module, "gettid", _GETTID_SIZE))
    return None if found is None else int.from_bytes(found[1] or found[2], "little", signed=True)


def _read(path: Path, module: Module, symbol: str, size: int) -> bytes:
    """Return the first bytes of what a symbol is about."""
    with open(path, "rb", opener=without_waiting) as file:
        file.seek(module.file_offset(module.address_of(symbol)))
        return file.read(size)


_FIRST_DELAY, _LAST_DELAY = 0.01, 20.0
"""Seconds until it is looked again, twice as long each time, and after which nobody waits any more."""


@dataclass(slots=True)
class _Waiting:
    """
    The probepoints that wait in a process.

    A program is probed as soon as it begins, and that is before its libraries are there. The tracer asks again when the
    program's loader says that it has mapped something; a program that nobody hears of that from is looked at now and
    then.
    """

    probes: set[int] = field(default_factory=set)
    delay: float = _FIRST_DELAY
    due: float = 0.0


class Postponed:
    """What waits, by process."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(self, pid: int, probes: Iterable[int]) -> bool:
        """Let probepoints wait; return whether it makes sense."""
        waiting = self._waiting.setdefault(pid, _Waiting())
        if waiting.delay > _LAST_DELAY:
            return False
        waiting.probes.update(probes)
        if not waiting.due:
            waiting.due = time.monotonic() + waiting.delay
            waiting.delay *= 2
        return True

    @property
    def is_due(self) -> bool:
        """Whether something is to be tried again now."""
        waiting = tuple(self._waiting.values())
        return bool(waiting) and any(each.probes and time.monotonic() >= each.due for each in waiting)

    def take_due(self) -> tuple[int, set[int]] | None:
        """Return a process and those of its probepoints that have waited, and are to be tried again; None if none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        for pid, waiting in self._waiting.items():
            if waiting.probes and now >= waiting.due:
                probes, waiting.probes, waiting.due = waiting.probes, set(), 0.0
                return pid, probes
        return None

    def drop(self, pid: int, probes: Iterable[int]) -> None:
        """Let probepoints wait no longer."""
        if (waiting := self._waiting.get(pid)) is not None:
            waiting.probes.difference_update(probes)
            if not waiting.probes:
                waiting.due = 0.0

    def forget(self, pid: int) -> None:
        """Begin anew with a process."""
        self._waiting.pop(pid, None)


class Families:
    """
    Processes by family; families have numbers.

    What was planned for one of them holds for all: they have the same code at the same addresses. Nothing of it is
    needed when the last one has ended, or executes another program.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[int, int] = {}

    def of(self, pid: int) -> int:
        """Return the family of a process, which is the first one of a new family if it is not known."""
        if pid not in self._of:
            self._of[pid] = next(self._numbers)
        return self._of[pid]

    def copied(self, pid: int, parent: int) -> None:
        """Take notice that a process has a copy of its parent's memory."""
        if parent in self._of:
            self._of[pid] = self._of[parent]

    def left(self, pid: int) -> int | None:
        """Take notice that a process has its memory no longer; return its family if it was the last one there."""
        family = self._of.pop(pid, None)
        return None if family in self._of.values() else family


ModuleKey = tuple[int, tuple[int, int], int]
"""A module in processes: their family, its file, and how far above its link addresses it is."""


class CodeWriters:
    """The writers of one program's code, by module."""

    def __init__(self, borrowed: Borrowed) -> None:
        self._borrowed = borrowed
        self._writers: dict[ModuleKey, CodeWriter] = {}
        self._modules: dict[tuple[int, int], ModuleCode] = {}
        """The code of modules, by file, where they were mapped last: what is known of it holds elsewhere as well."""

    def find(self, key: ModuleKey) -> CodeWriter | None:
        """Return the writer for a module, None if there is none yet."""
        return self._writers.get(key)

    def forget(self, family: int) -> None:
        """Forget the writers of processes that are not there any more."""
        for key in [key for key in self._writers if key[0] == family]:
            del self._writers[key]

    def writer(
        self,
        family: int,
        memory: MemoryShared,
        probe: int,
        answers: Answers,
        mappings: list[MemoryMapping],
        maps: HandlerMaps,
    ) -> CodeWriter | None:
        """Return the writer for the module of a probepoint in a process, None if that does not map it any more."""
        site, first = answers.compiled[probe], answers.probes[probe].instruction
        mine = [m for m in mappings if (m.device, m.inode) == site.file]
        start = run_time_address(mine, first.offset)
        if start is None:
            return None
        bias = start - first.address
        key = family, site.file, bias
        if key not in self._writers:
            # Before anything in it is asked for its address.
            places = dict(maps.places(memory.region, self._borrowed, memory.others))
            places[MapName.ENTRIES] = MapPlace(memory.page + PROCESS_SIZE)
            known = self._modules.get(site.file)
            code = ModuleCode.of(site.resolved.module, bias) if known is None else known.mapped_at(bias)
            self._modules[site.file] = code
            self._writers[key] = CodeWriter(
                code,
                AddressSpace(
                    mappings, min(m.start for m in mine), max(m.end for m in mine), growth=growth_of(memory.pid)
                ),
                _facts(memory, mappings, maps),
                places,
                maps.rings.shape,
                maps.shapes,
            )
        return self._writers[key]


def _facts(memory: MemoryShared, mappings: list[MemoryMapping], maps: HandlerMaps) -> ProcessFacts:
    tid_place, first_stack = tid_place_in(memory.pid, mappings), first_stack_of(memory.pid)
    return ProcessFacts(
        memory.page, maps.clock.address, tid_place, life_mark=maps.life_mark.address, first_stack=first_stack
    )
