"""
Code of the handlers for one process: routines, and a trampoline for each probepoint, if there is free memory nearby.

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
from dprobes.engines.inline.access_guards import GUARD_SIZE
from dprobes.engines.inline.handler_templates import HandlerAssembler
from dprobes.engines.inline.handler_trampolines import make_displacing_trampoline, size_bound
from dprobes.engines.inline.handler_trials import obstacle_in_process
from dprobes.engines.ptrace.site_patches import OF_64_BITS
from dprobes.errors import DprobesError, TargetError
from dprobes.native.generated_code import MapPlace, ProcessFacts, Surroundings
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
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from dprobes.engines.inline.handler_hits import Borrowed, HandlerMaps
    from dprobes.engines.inline.handler_pieces import NumberedCode, SiteHandler
    from dprobes.engines.inline.handler_trampolines import PieceCode, Trampoline
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
    "tid_place_in",
    "tid_place_of",
]

_MANY = MANY // 2
"""Number of instructions from which on windows are tried before punned jumps, each of which needs a mapping."""

_SLACK = 64
"""Bytes by which the size of code may differ between two addresses, because displacements have short forms."""

_REACH = 1 << 30
_NO_MEMORY = "no memory near it is free"


_DISPLACED_MAX = 112 + len(OF_64_BITS)
"""Maximum size in bytes of displaced instructions and the jump back: five or six instructions, most of 1 or 2 bytes."""

_LOOK_SIZE = 32
"""Size in bytes of the code before a trial that checks, for each of several handlers, whether it is enabled."""


class PlacedJump(NamedTuple):
    """Jump to the handlers of the instructions at ``sites``, and its trampoline."""

    sites: tuple[int, ...]
    placement: Placement
    trampoline: Trampoline


class CodeWriter:
    """Writer of code for the probepoints in one module of a process."""

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
        """The trials before handlers, by the addresses of the instructions."""
        self._handlers: dict[int, dict[int, Sequence[SiteHandler]]] = {}
        """The handlers of each jump: by the jump's address, and then by the addresses of the instructions."""
        self._sizes: dict[tuple[NumberedCode, ...], int] = {}
        """The approximate size in bytes of handlers, by their code."""
        self._obstacles: dict[NumberedCode, str | None] = {}
        """The reasons why code cannot run in the process."""
        self._assembler: HandlerAssembler | None = None
        self._has_switches = False

    def anew(self) -> CodeWriter:
        """
        Return a writer for the same module and memory, without jumps, for jumps to handlers of several programs.

        It uses the routines of this writer, which must have been placed.
        """
        other = CodeWriter(self.module.unchanged(), self.space, self._facts, self._maps, self._rings, self._tables)
        other._runtime, other._mapped, other._has_switches = self._runtime, self._mapped, True
        return other

    def new_regions(self) -> list[tuple[int, int]]:
        """Return the ranges, (start, end), that must be mapped and that no earlier call has returned."""
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
        """The routines; None before the first handler."""
        return self._runtime

    @property
    def fixups(self) -> tuple[Fixup, ...]:
        """The fix-ups of the routines; empty before the first handler."""
        return () if self._runtime is None else self._runtime.code.fixups

    def place(
        self,
        handlers: Mapping[int, Sequence[SiteHandler]],
        bound: Iterable[Collection[int]] = (),
        others: Collection[int] = (),
        trials: Mapping[int, Trial | str] = MappingProxyType({}),
    ) -> tuple[list[PlacedJump], dict[int, str]]:
        """
        Return the jumps to handlers of instructions, and the reasons why some have none.

        Of each group in ``bound``, all instructions have jumps, or none. A jump to handlers of several instructions is
        returned again when a handler is added. ``others`` are instructions with breakpoints, which no jump should
        displace. ``trials`` precede handlers; a string is the reason why a trial is impossible.
        """
        refused = {site: trial for site, trial in trials.items() if isinstance(trial, str)}
        self._trials.update((site, trial) for site, trial in trials.items() if not isinstance(trial, str))
        for site, each in handlers.items():
            for handler in each:
                if (problem := self._obstacle_to(handler.code)) is not None:
                    refused[site] = problem
                    break
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

    def _obstacle_to(self, code: NumberedCode) -> str | None:
        if code not in self._obstacles:
            self._obstacles[code] = obstacle_in_process(code.assembled, self._facts)
        return self._obstacles[code]

    def _keep_bound(
        self, jumps: dict[int, PlacedJump], refused: dict[int, str], groups: Mapping[int, Collection[int]]
    ) -> None:
        """
        Remove from ``jumps`` those whose handlers would run without others of their group.

        ``groups`` has, by site, the sites of its group, of which all have jumps or none. ``refused`` has the reason for
        each site without a jump, and is updated.
        """
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
        """Remove a placement whose jump was not written."""
        del self._handlers[placement.plan.start]
        self._placer.remove(placement)

    def _placement(
        self, site: int, handlers: Sequence[SiteHandler], others: Collection[int], avoided: Collection[int]
    ) -> Placement | str:
        """
        Return the placement of the jump that leads to handlers of ``site``, or the reason against it.

        A jump at one of the ``avoided`` addresses is not extended.
        """
        (found,) = self._placer.place(
            [site],
            # A punned jump of another program may occupy the only possible addresses.
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
                return placement  # its module is mapped again where it was, without the jump
            if start in avoided or site in there or site < start:
                return "it is displaced for another probe"
            larger = self._placer.enlarge(placement, self._room({**there, site: handlers}))
            if larger is None:
                return "it is displaced for another probe, and no memory is free for both"
            placement = larger
        elif found.plan.crosses_page and found.plan.site != start:
            # The jump begins at no breakpoint, so a tracer killed in between would leave half of it.
            self._placer.remove(found)
            return "its jump would cross a page boundary"
        self._handlers.setdefault(start, {})[site] = handlers
        return placement

    def _jump(self, placement: Placement, handlers: Mapping[int, Sequence[SiteHandler]]) -> PlacedJump | None:
        def piece(address: int, site: int, rest: Callable[[int], bytes]) -> PieceCode:
            return self.assembler.piece_at(address, site, handlers[site], self._trials.get(site), rest)

        try:
            trampoline = make_displacing_trampoline(placement.plan, placement.trampoline, handlers, piece)
        except OverflowError:
            return None  # the target of a punned jump is too far from the routines
        if len(trampoline.code.code) > placement.room:
            needed = len(trampoline.code.code) + _SLACK
            larger = None if placement.plan.method is Method.PUN else self._placer.enlarge(placement, needed)
            return None if larger is None else self._jump(larger, handlers)
        return PlacedJump(tuple(sorted(handlers)), placement, trampoline)

    def _room(self, handlers: Mapping[int, Sequence[SiteHandler]]) -> int:
        """Return the size in bytes that suffices for handlers and displaced instructions."""
        assert self._runtime is not None
        near = self._runtime.code.address
        total = _DISPLACED_MAX
        for site, each in handlers.items():
            codes = tuple([handler.code for handler in each])
            size = self._sizes.get(codes)
            if size is None:
                plain = [handler._replace(guard=None) for handler in each]
                made = self.assembler.piece_at(near, site, plain, None)
                size = len(made.code) + _SLACK + (_LOOK_SIZE * len(each) if len(each) > 1 else 0)
                self._sizes[codes] = size
            total += size + size_bound(self._trials.get(site))
            total += GUARD_SIZE if each[0].guard is not None else 0
        return total

    @property
    def assembler(self) -> HandlerAssembler:
        """The assembler of handlers; the routines must be placed."""
        if self._assembler is None:
            self._assembler = HandlerAssembler(self.around, self.module.bias, has_switches=self._has_switches)
        return self._assembler

    @property
    def around(self) -> Surroundings:
        """The surroundings of the code of the program's handlers; the routines must be placed."""
        runtime = self._runtime
        assert runtime is not None
        facts = self._facts
        return Surroundings(
            self._maps, runtime.routines, runtime.map_routines, facts.has_rdpid, self._rings, facts.life_mark
        )

    def prepare(self, site: int) -> str | None:
        """Place the routines near an instruction, unless they are placed; return the reason of a failure or None."""
        if self._runtime is not None:
            return None
        facts, rings, tables = self._facts, self._rings, self._tables
        size = len(make_runtime(X86Operations(site), facts, rings, tables).code.code) + _SLACK
        address = self.space.allocate(max(0, site - _REACH), site + _REACH, size)
        if address is None:
            return _NO_MEMORY
        self._runtime = make_runtime(X86Operations(address), facts, rings, tables)
        return None


# The offset of a thread's id in the data of a process's C library.
#
# glibc describes it for debuggers (nptl_db): ``_thread_db_pthread_tid`` in libc.so.6 describes the member ``tid`` of
# ``struct pthread``: bits, number of elements, and the offset from the thread pointer, a 32-bit number each
# (nptl_db/db_info.c). musl, since 1.2.2, reads it in ``gettid`` (src/linux/gettid.c). These are the ids of the
# process's own PID namespace; for a nested one, ``native.process_page`` has the ids in the client's namespace.


_SYMBOL = "_thread_db_pthread_tid"
_FIELD = struct.Struct("<III")

_LIBRARIES = ("libc.so", "libc-", "libpthread", "ld-musl-")
_LINKER = ("ld-", "ld.so")
"""Prefixes of the file names of dynamic linkers; without one, the C library is linked statically."""
_GETTID = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\x64\x48\x8b\x04\x25\0{4}\x8b(?:\x40(.)|\x80(.{4}))\xc3", re.DOTALL)
"""``mov rax, fs:[0]``, ``mov eax, [rax + N]`` and ``ret``, optionally after an ``endbr64``."""
_GETTID_SIZE = 20


def tid_place_in(pid: int, mappings: list[MemoryMapping]) -> int | None:
    """Return the offset of a thread's id from the thread pointer in a process, in bytes; None if it is unknown."""
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
    """Return the offset in bytes of a thread's id in a C library; None if it is unknown; raise as ``Module.load``."""
    from dprobes.target.probed_module import Module

    module = Module.load(path)
    with contextlib.suppress(TargetError):
        bits, _, place = _FIELD.unpack(_read(path, module, _SYMBOL, _FIELD.size))
        return int(place) if bits == 32 else None
    found = _GETTID.match(_read(path, module, "gettid", _GETTID_SIZE))
    return None if found is None else int.from_bytes(found[1] or found[2], "little", signed=True)


def _read(path: Path, module: Module, symbol: str, size: int) -> bytes:
    """Return the first ``size`` bytes of the function ``symbol`` of a module, from its file."""
    with open(path, "rb", opener=without_waiting) as file:
        file.seek(module.file_offset(module.address_of(symbol)))
        return file.read(size)


_FIRST_DELAY, _LAST_DELAY = 0.01, 20.0
"""Delay in seconds before the first retry, doubled for each further one, and the maximum after which there is none."""


@dataclass(slots=True)
class _Waiting:
    """
    Probepoints of a process that wait for the C library to be mapped.

    A process is probed from execve on, before its libraries are mapped. The jumps are requested again when the dynamic
    linker has mapped a file. If the linker reports nothing, the process is checked at the monotonic time ``due``, 0 if
    none is planned. ``delay`` is the pause before the next check that is planned. Both are in seconds.
    """

    probes: set[int] = field(default_factory=set)
    delay: float = _FIRST_DELAY
    due: float = 0.0


class Postponed:
    """Probepoints whose jumps could not be planned, by process, and the times at which planning is tried again."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(self, pid: int, probes: Iterable[int]) -> bool:
        """Postpone the jumps of probepoints in a process; return False if they have been postponed too often."""
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
        """True if the jumps of postponed probepoints should be planned again now."""
        waiting = tuple(self._waiting.values())
        return bool(waiting) and any(each.probes and time.monotonic() >= each.due for each in waiting)

    def take_due(self) -> tuple[int, set[int]] | None:
        """Return a process and those of its postponed probepoints that are due; None if there are none."""
        if not self._waiting:
            return None
        now = time.monotonic()
        for pid, waiting in self._waiting.items():
            if waiting.probes and now >= waiting.due:
                probes, waiting.probes, waiting.due = waiting.probes, set(), 0.0
                return pid, probes
        return None

    def drop(self, pid: int, probes: Iterable[int]) -> None:
        """Remove probepoints from the postponed ones."""
        if (waiting := self._waiting.get(pid)) is not None:
            waiting.probes.difference_update(probes)
            if not waiting.probes:
                waiting.due = 0.0

    def forget(self, pid: int) -> None:
        """Forget the postponed probepoints and delays of a process."""
        self._waiting.pop(pid, None)


class Families:
    """
    Numbered groups of processes that have the same code at the same addresses, because they were forked.

    A plan for one process of a group is valid for all. It is obsolete when the last process has ended or called execve.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[int, int] = {}

    def of(self, pid: int) -> int:
        """Return the number of a process's group, which is a new one if the process is unknown."""
        if pid not in self._of:
            self._of[pid] = next(self._numbers)
        return self._of[pid]

    def copied(self, pid: int, parent: int) -> None:
        """Put a forked process, which has a copy of its parent's memory, into its parent's group."""
        if parent in self._of:
            self._of[pid] = self._of[parent]

    def left(self, pid: int) -> int | None:
        """
        Remove a process that has ended or called execve from its group.

        Return the number of the group if it is empty now, else None.
        """
        family = self._of.pop(pid, None)
        return None if family in self._of.values() else family


ModuleKey = tuple[int, tuple[int, int], int]
"""Key of a module in processes: their group, its file, and its load bias."""


class CodeWriters:
    """Writers of one program's code, by module."""

    def __init__(self, borrowed: Borrowed) -> None:
        self._borrowed = borrowed
        self._writers: dict[ModuleKey, CodeWriter] = {}
        self._modules: dict[tuple[int, int], ModuleCode] = {}
        """The code of modules, by file, at their last address; its analysis is valid at other addresses, too."""

    def find(self, key: ModuleKey) -> CodeWriter | None:
        """Return the writer for a module; None if there is none yet."""
        return self._writers.get(key)

    def forget(self, family: int) -> None:
        """Forget the writers for a group whose processes have all ended."""
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
        """
        Return the writer of the code for a probepoint's module in a process; None if the module is not mapped any more.

        ``family`` is the group of the process (``Families``), ``memory`` the memory that it has mapped for handlers.
        """
        site, first = answers.compiled[probe], answers.probes[probe].instruction
        mine = [m for m in mappings if (m.device, m.inode) == site.file]
        start = run_time_address(mine, first.offset)
        if start is None:
            return None
        bias = start - first.address
        key = family, site.file, bias
        if key not in self._writers:
            # ``places`` sets the address of the region, on which the addresses of its parts below depend.
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
