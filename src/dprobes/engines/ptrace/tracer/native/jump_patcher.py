"""
Replacement of breakpoints by jumps, on the client's request, and of jumps that cannot stay by breakpoints.

The client plans and generates code; this module writes it. A breakpoint is always placed first: a jump is only a faster
way to the same handler, and cases that it cannot handle are left to the breakpoint. All threads of the address space
are stopped when code changes; none may be in bytes that are overwritten, or in the middle of a hit there. If that
condition is not met, writing is retried, at growing intervals and for a limited time.

Jumps are checked regularly: a uprobe that was inserted over a jump leaves invalid code when it is removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.ptrace.breakpoint_sites import Role
from dprobes.engines.ptrace.site_patches import TRAP_OF_32_BITS
from dprobes.engines.ptrace.tracer.address_spaces import PageReader
from dprobes.engines.ptrace.tracer.breakpoint_placement import end_joining
from dprobes.engines.ptrace.tracer.call_injection import InjectionError, OccupiedError, ThreadBusyError, may_inject
from dprobes.engines.ptrace.tracer.held_signals import move_fault
from dprobes.engines.ptrace.tracer.native.handler_memory import (
    NO_ROOM,
    add_calls,
    announce,
    begin_ids,
    lacks_ids,
    map_code,
    share_memory,
)
from dprobes.engines.ptrace.tracer.native.thread_places import ThreadPlaces
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3
from dprobes.engines.ptrace.tracer.tracer_state import ThreadGoneError
from dprobes.engines.ptrace.tracer_messages import MemoryShared, PatchSites, ShareMemory, SitesPatched
from dprobes.errors import reason_of
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.ptrace_calls import Register

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dprobes.engines.ptrace.site_patches import NativeMemory, SitePatch
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Entry
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread, TracerState
    from dprobes.platform.linux.ptrace_calls import RegisterWords

__all__ = ["Patcher", "Retries", "adapted", "fitting", "groups_of", "obstacle_to"]

_PAUSE, _PAUSE_MAX = 0.01, 2.0
"""Seconds until a retry: the first pause, and the maximum, as each pause is twice the previous one."""
_ATTEMPTS = 18
"""Maximum number of attempts, which last about twenty seconds."""


class _Retry(NamedTuple):
    """A request that is retried at ``due``, in seconds of the monotonic clock; ``attempts`` are those made so far."""

    message: ShareMemory | PatchSites
    due: float
    attempts: int


class Retries:
    """Requests to map memory or to write jumps that failed for a temporary reason, and when to try again."""

    def __init__(self) -> None:
        self._waiting: list[_Retry] = []

    def add(self, message: ShareMemory | PatchSites, attempts: int) -> bool:
        """Schedule another attempt of a request after ``attempts`` ones; return False if these are too many."""
        if attempts >= _ATTEMPTS:
            return False
        pause = min(_PAUSE * 2**attempts, _PAUSE_MAX)
        self._waiting.append(_Retry(message, time.monotonic() + pause, attempts + 1))
        return True

    def take_due(self) -> list[tuple[ShareMemory | PatchSites, int]]:
        """Remove and return the requests that are due, each with the number of attempts."""
        if not self._waiting:
            return []
        now = time.monotonic()
        due = [(each.message, each.attempts) for each in self._waiting if each.due <= now]
        self._waiting = [each for each in self._waiting if each.due > now]
        return due

    def delay(self) -> float | None:
        """Return the seconds until the next retry, None if there is none."""
        now = time.monotonic() if self._waiting else 0.0
        return min((max(0.0, each.due - now) for each in self._waiting), default=None)


DIFFERS = "memory differs from the file"
"""Reason that may be temporary: the jump may rely on bytes of another jump, which is not written yet."""


def groups_of(patches: Iterable[SitePatch]) -> Iterator[list[SitePatch]]:
    """Iterate over groups of patches that must be written together, in the order of their first members."""
    left = dict.fromkeys(patches)
    members: dict[tuple[int, int], list[SitePatch]] = {}
    for patch in left:
        for group in patch.groups:
            members.setdefault(group, []).append(patch)
    for first in tuple(left):
        if first not in left:
            continue
        found, waiting = [], [first]
        while waiting:
            patch = waiting.pop()
            if patch in left:
                del left[patch]
                found.append(patch)
                waiting += (other for group in patch.groups for other in members[group])
        yield sorted(found, key=lambda each: -each.start)


def adapted(space: AddressSpace, patch: SitePatch) -> SitePatch:
    """Return a jump without the handlers of probepoints that were removed since it was planned, as far as possible."""
    if patch.place is not None:
        patch = space.patches.known.get(patch.place, patch)
    return patch.only(
        (program, probe, address) for address in patch.addresses for program, probe in _present(space, address)
    )


def _present(space: AddressSpace, address: int) -> set[tuple[int, int]]:
    breakpoint_ = space.breakpoints.get(address)
    return set() if breakpoint_ is None else {(each.program.number, each.number) for each in breakpoint_.probes()}


def obstacle_to(space: AddressSpace, patch: SitePatch) -> str | None:
    """Return the reason why a jump is not equivalent to the breakpoints that it replaces, or None if it is."""
    for address in patch.addresses:
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None:
            return "the breakpoint no longer exists"
        if breakpoint_.waiting or breakpoint_.own or any(site.role is Role.JUMP for _, site in breakpoint_.exits):
            return "the breakpoint has another use as well"
        present, served = _present(space, address), patch.probes_at(address)
        needed = present - space.joining.get(address, frozenset())
        if not {program for program, _ in needed} <= patch.programs:
            return "several programs use it"
        if not needed <= served <= present:
            return "the breakpoint is needed for another probepoint as well"
    if space.watchpoints and any(stop.has_frame for stop in patch.stops):
        return "the code before its handler would hit watchpoints"
    displaced, written = patch.displaced_bytes(), patch.written_bytes()
    if any(place in space.breakpoints and place not in patch.addresses for place in displaced):
        return "another breakpoint is in the code that it displaces"
    used = patch.used_bytes()
    for other in space.patches.near(min(used), max(used) + 1):
        is_same = set(other.addresses) <= set(patch.addresses)
        if not is_same and not {*displaced, *written}.isdisjoint((*other.displaced_bytes(), *other.written_bytes())):
            return "its bytes belong to the jump of another probe"
    return None


def fitting(space: AddressSpace, jumps: Iterable[SitePatch]) -> list[SitePatch]:
    """
    Return jumps that are equivalent to the breakpoints that are present now, the first one for each place.

    Of jumps that belong together either all or none are returned. They are sorted by descending address: a punned jump
    relies on bytes of the jump after it.
    """
    left = [made for jump in jumps if (made := adapted(space, jump)).sites]
    members: dict[tuple[int, int], set[int]] = {}
    for jump in left:
        for group in jump.groups:
            mine = (address for program, _, address in jump.sites if program == group[0])
            members.setdefault(group, set()).update(mine)
    while True:
        found: list[SitePatch] = []
        there = set(space.patches.by_site)
        for jump in left:
            if there.isdisjoint(jump.addresses) and obstacle_to(space, jump) is None:
                there.update(jump.addresses)
                found.append(jump)
        torn = {group for group, addresses in members.items() if not addresses <= there}
        gone = {jump for jump in found if not torn.isdisjoint(jump.groups)}
        if not gone:
            return sorted(found, key=lambda jump: -jump.start)
        left = [jump for jump in left if jump not in gone]


def write_jump(space: AddressSpace, patch: SitePatch, places: ThreadPlaces) -> str | None:
    """Write one jump; return the reason if that is not possible, otherwise None."""
    try:
        if _code_at(space, patch.start, len(patch.code)) != patch.code:
            return DIFFERS
        address, shared = patch.relied_on
        if shared and space.read(address, len(shared)) != shared:
            return DIFFERS
        places.move(patch)
        if len(patch.writes) > 1 and patch.start in space.unwritten:
            os.pwrite(space.memory, INT3, patch.start)  # no thread may execute the part in one page alone
        space.patches.write(space.memory, patch)
        space.unwritten.difference_update(patch.addresses)  # a reader of memory sees the jump there
        space.end_joining({address: patch.probes_at(address) for address in patch.addresses})
    except OSError as error:
        return reason_of(error)
    return None


def _code_at(space: AddressSpace, address: int, size: int) -> bytes:
    """Return the bytes of memory without the engine's breakpoints and jumps; raise OSError if it is not mapped."""
    found = bytearray(space.read(address, size))
    space.patches.hide(address, found)
    for place in range(address, address + len(found)):
        breakpoint_ = space.breakpoints.get(place)
        if breakpoint_ is not None and found[place - address] == INT3[0]:
            found[place - address] = breakpoint_.original
    return bytes(found)


_GONE = "the process is no longer traced"
_ANOTHER = "the process executes another program"
_BUSY = "no thread of the process can make a system call for it now"
_SHARED = "several processes share the memory"
_NOT_ALLOWED = "system calls cannot be made in the process"

_TRAPS = (signal.SIGILL, signal.SIGSEGV)
"""Signals that invalid and privileged instructions raise (``trampoline_space.TRAPS``)."""

_PLANS = 4
"""Number of times that the planned place for code may be occupied, until breakpoints are kept instead."""

_CHANGED = "another tool has inserted uprobes over jumps of this run, which have been written again"
_CHANGED_BY = "hits in between may be missing, and the other tool sees none here: --engine ebpf shares places"

_BETWEEN_LOOKS = 0.2
"""Minimum seconds from one check of the jumps to the next one."""
_SHARE_OF_LOOKS = 50
"""Minimum ratio of the time between two checks to the duration of a check."""

_ATTEMPTS_BEFORE_BREAKPOINTS = 7
"""Number of attempts to write jumps before breakpoints are written in their place: about a second."""


class Patcher:
    """
    Writer of jumps that lead from probed instructions to handlers in the process, in place of breakpoints.

    ``take_children`` registers the children that threads of a space have just created: their memory is a copy of the
    state before a change.
    """

    def __init__(
        self,
        state: TracerState,
        stopper: Stopper,
        modules: ModuleBreakpoints,
        take_children: Callable[[AddressSpace], None],
    ) -> None:
        self._modules = modules
        self._take_children = take_children
        self._connection = state.connection
        self._threads = state.threads
        self._programs = state.programs
        self._stopper = stopper
        self._retries = Retries()
        self._next_look = 0.0
        self._has_jumps = False

    def look_after(self) -> float | None:
        """Retry due requests, and mend jumps; return the seconds until the next call, None for never."""
        for message, attempts in self._retries.take_due():
            if isinstance(message, ShareMemory):
                self.share(message, attempts)
            else:
                self.patch(message, attempts)
        delays = self._retries.delay(), self._mend_jumps()
        return min((delay for delay in delays if delay is not None), default=None)

    def _mend_jumps(self) -> float | None:
        """Look for uprobes in jumps if a check is due; return the seconds until the next check, None without jumps."""
        now = time.monotonic()
        if now >= self._next_look:
            spaces = [space for space in self._threads.spaces() if space.patches.by_site]
            self._has_jumps = bool(spaces)
            for space in spaces:
                if space.patches.mend(space.memory, PageReader(space.memory).read):
                    pid = self._threads.in_space(space)[0].pid
                    self._connection.warn_once(f"process {pid}: {_CHANGED}", _CHANGED_BY)
            end = time.monotonic()
            self._next_look = end + max(_BETWEEN_LOOKS, _SHARE_OF_LOOKS * (end - now))
            now = end
        return self._next_look - now if self._has_jumps else None

    @contextlib.contextmanager
    def _process_held(self, pid: int) -> Iterator[list[Thread]]:
        with self._stopper.process_held(pid) as held:
            for thread in self._threads.of_process(pid)[:1]:
                self._take_children(thread.space)
            yield held

    def share(self, message: ShareMemory, attempts: int = 0) -> None:
        """Map the client's memory in a process, and report its address, unless the program has ended meanwhile."""
        number, pid = message.program, message.pid
        if self._programs.numbered(number) is None:
            return
        with self._process_held(pid) as held:
            known = held[0].space.patches.memories.get(number) if held else None
            if known is not None:  # in a copy of its parent's memory
                self._connection.send(_shared(number, pid, known))
                return
            if (problem := self._obstacle(pid, held)) is None:
                try:
                    files: list[tuple[int, int]] = []
                    try:
                        for descriptor, size in ((message.descriptor, message.size), *message.others):
                            files.append((self._connection.open(descriptor), size))
                        shared, tell = [*files, *self._globals(message)], self._connection.tell_restorer
                        memory = share_memory(held[0], shared, message.calls, tell)
                    finally:
                        for opened, _ in files:
                            os.close(opened)
                except (InjectionError, OSError, ThreadGoneError) as error:
                    problem = self._problem(held[0], error)
                else:
                    space = held[0].space
                    space.patches.memories[number] = memory
                    space.patches.begin_list(memory)
                    tids = [each.tid for each in self._threads.of_process(pid)]
                    problem = begin_ids(space, memory.page, pid, tids) or announce(self._connection, space, number)
                    if problem is None:
                        self._connection.send(_shared(number, pid, memory))
                        return
        if problem is _BUSY and self._retries.add(message, attempts):
            return
        self._write_breakpoints(pid)
        self._connection.send(MemoryShared(number, pid, problem=problem))

    def _problem(self, thread: Thread, error: InjectionError | OSError | ThreadGoneError) -> str:
        """
        Return the reason, a clause, why system calls could not be injected into a thread.

        If the thread has ended, its end is handled later.
        """
        if isinstance(error, ThreadGoneError):
            self._stopper.defer(thread.tid, error.status)
            return _GONE
        if isinstance(error, ThreadBusyError):
            return _BUSY
        return str(error) if isinstance(error, InjectionError) else reason_of(error)

    def _globals(self, message: ShareMemory) -> list[tuple[int, int]]:
        """Return (descriptor, size) of the file of global variables if a message requests it, else an empty list."""
        program = self._programs.numbered(message.program)
        return [] if program is None or not message.globals else [(program.globals_file, message.globals)]

    def _write_breakpoints(self, pid: int, but: Collection[int] = ()) -> None:
        """Write the withheld breakpoints of a process, except those in ``but``, whose jumps are still retried."""
        for thread in self._threads.of_process(pid)[:1]:
            self._modules.write_late(thread.space, thread, but)
            self.end_joining(thread.space)

    def end_joining(self, space: AddressSpace) -> None:
        """Replace jumps that lack handlers of a new program by breakpoints, unless jumps with these were written."""
        if space.joining:
            sites = list(space.joining)
            end_joining(space, sites)
            self.restore(space, sites)

    def patch(self, message: PatchSites, attempts: int = 0) -> None:
        """
        Write code and jumps to a process, and report the result; do nothing if the program has ended meanwhile.

        The same is written to copies of the process that wait for it.
        """
        self._patch(message, attempts)
        for space in self._threads.spaces():
            if space.copied_from == message.pid and message.program in space.patches.memories:
                self._patch(message._replace(pid=min(space.pids)))

    def _patch(self, message: PatchSites, attempts: int = 0) -> None:
        number, pid = message.program, message.pid
        if self._programs.numbered(number) is None:
            return
        done: Collection[tuple[int, int]] = ()
        refused: list[tuple[tuple[int, int], str]] = []
        waiting: list[SitePatch] = []
        with self._process_held(pid) as held:
            problem = self._obstacle(pid, held)
            if held and not _is_current(held[0].space, message):
                refused = [(probe, _ANOTHER) for patch in message.patches for probe in patch.probes]
                self._connection.send(SitesPatched(number, pid, (), tuple(refused), is_outdated=True))
                return
            if problem is None:
                space = held[0].space
                problem = announce(self._connection, space, number, message.pages, message.patches)
            if problem is None:
                try:
                    _write_code(held[0], message)
                except (InjectionError, OSError, ThreadGoneError) as error:
                    problem = self._problem(held[0], error)
                    if isinstance(error, OccupiedError):
                        space.patches.occupied += 1
                        if space.patches.occupied < _PLANS:
                            self._let_plan_again(message, problem)
                            return
            if problem is _BUSY and self._retries.add(message, attempts):
                return
            if problem is not None:
                refused = [(probe, problem) for patch in message.patches for probe in patch.probes]
            else:
                space.patches.fixups.update(message.fixups)
                space.patches.learn(message.patches)
                done, refused, waiting = self._write_jumps(space, message, attempts)
                space.postponed.update((number, probe) for probe in message.postponed)
            soon = waiting if attempts < _ATTEMPTS_BEFORE_BREAKPOINTS else ()
            self._write_breakpoints(pid, {address for patch in soon for address in patch.addresses})
        self._connection.send(SitesPatched(number, pid, tuple(sorted(done)), tuple(refused)))

    def _let_plan_again(self, message: PatchSites, why: str) -> None:
        """
        Ask the client to plan the jumps of a message at other addresses, because the process has mapped memory there.

        ``why`` is the reason, a clause for the user.
        """
        refused = tuple((probe, why) for patch in message.patches for probe in patch.probes)
        self._connection.send(SitesPatched(message.program, message.pid, (), refused, is_occupied=True))

    def _write_jumps(
        self, space: AddressSpace, message: PatchSites, attempts: int
    ) -> tuple[set[tuple[int, int]], list[tuple[tuple[int, int], str]], list[SitePatch]]:
        """
        Write jumps while all threads are stopped.

        Return the probepoints that have jumps, the reasons why others have not, and the jumps that are retried.
        """
        done: set[tuple[int, int]] = set()
        refused: list[tuple[tuple[int, int], str]] = []
        present = [made for patch in message.patches if (made := adapted(space, patch)).sites]
        places = ThreadPlaces(space, self._threads.in_space(space), present)
        replaced = self._make_room(space, present)
        waiting: list[SitePatch] = []
        for patches in groups_of(present):
            probes = {probe for patch in patches for probe in patch.probes}
            why = next(filter(None, map(places.obstacle, patches)), None)
            if why is not None:
                waiting += patches
            else:
                why = self._write_all(space, patches, places)
                if why is DIFFERS and waiting:  # it may rely on one of those
                    waiting += patches
            if why is None:
                done |= probes
            else:
                refused += [(probe, why) for probe in sorted(probes)]
        again = message._replace(pages=(), code=(), fixups=(), patches=tuple(waiting))
        if waiting and not self._retries.add(again, attempts):
            waiting = []
        if replaced:
            self._fill(space, replaced)
        return done, refused, waiting

    def _make_room(self, space: AddressSpace, patches: Sequence[SitePatch]) -> list[SitePatch]:
        """Remove jumps of single programs at sites where ``patches`` has jumps for several programs; return them."""
        shared = [patch for patch in patches if patch.switches]
        used = {place for patch in shared for place in patch.used_bytes()}
        sites = {address for patch in shared for address in patch.addresses}
        writes = {patch.writes for patch in shared}
        present = {patch for place in used for patch in space.patches.users.get(place, ())}
        gone = [p for p in present if sites.issuperset(p.addresses) and p.writes not in writes]
        return self.restore(space, [site for patch in gone for site in patch.addresses])

    def _fill(self, space: AddressSpace, jumps: Iterable[SitePatch]) -> None:
        """Write those of the removed ``jumps`` again at whose sites no other jump was written."""
        sites = [site for jump in jumps for site in jump.addresses if site not in space.patches.by_site]
        wanted = fitting(space, self._candidates(space, sites)) if sites else []
        places = ThreadPlaces(space, self._threads.in_space(space), wanted)
        for patches in groups_of(wanted):
            if not any(map(places.obstacle, patches)):
                self._write_all(space, patches, places)

    def _candidates(
        self, space: AddressSpace, sites: Collection[int] | None, taken: Iterable[SitePatch] = ()
    ) -> list[SitePatch]:
        """
        Return the jumps that may be written at ``sites``, None for all sites: the known ones, the latest first.

        They are followed by those of ``taken``, jumps that were just removed, that are unknown.
        """
        present = {program.number for program in self._programs}
        known = [p for p in space.patches.known_at(sites) if p.owner is None or p.owner in present]
        return [*known, *(patch for patch in taken if patch.place not in space.patches.known)]

    def bring_back(self, space: AddressSpace, jumps: Iterable[SitePatch], sites: Collection[int] | None = None) -> None:
        """
        Write removed jumps again after a change of programs, or others that match the breakpoints there now.

        Only the addresses ``sites`` and those of ``jumps`` are considered; None: all.
        """
        if sites is not None:
            sites = {*sites, *(site for jump in jumps for site in jump.addresses)}
        wanted = fitting(space, self._candidates(space, sites, jumps))
        pid = next((pid for pid in space.pids if self._threads.of_process(pid)), None)
        if not wanted or pid is None or not space.is_open or space.shared_with or lacks_ids(space):
            return
        if not space.is_one_process:
            return
        numbers = sorted({number for jump in wanted for number in jump.programs})
        memories = tuple((number, space.patches.memories[number].page) for number in numbers)
        message = PatchSites(numbers[0], pid, memories, (), (), (), tuple(wanted))
        with self._process_held(pid):
            self._write_jumps(space, message, 0)

    @staticmethod
    def _write_all(space: AddressSpace, patches: Sequence[SitePatch], places: ThreadPlaces) -> str | None:
        """Write jumps that belong together, and return None; if one fails, restore everything and return the reason."""
        written: list[int] = []
        for patch in patches:
            present = space.patches.by_site.get(patch.addresses[0])
            if present is not None and present.writes == patch.writes and present.sites == patch.sites:
                continue
            if (why := obstacle_to(space, patch)) is None:
                why = write_jump(space, patch, places)
            if why is not None:
                space.patches.restore(space.memory, written)
                space.renew()
                return why
            written += patch.addresses
        for site in written:
            _move_calls(space, site)
        return None

    def _obstacle(self, pid: int, held: list[Thread]) -> str | None:
        threads = self._threads.of_process(pid)
        if not threads:
            return _GONE
        if not held:
            return _BUSY
        space = held[0].space
        if not space.is_open or space.shared_with:
            return _GONE
        if not space.is_one_process:
            return _SHARED
        if lacks_ids(space):
            return NO_ROOM
        return None if may_inject(held[0]) else _NOT_ALLOWED

    def place_fault(self, thread: Thread) -> None:
        """
        Move a fault in displaced code to the original instruction; the thread has stopped for its signal.

        The program may return to that instruction. If a jump makes that impossible, breakpoints replace the jump.
        """
        if not thread.space.patches.starts:
            return
        registers = ptrace_calls.Registers()
        ptrace_calls.get_registers(thread.tid, registers)
        found = thread.space.patches.original_of(registers[Register.RIP])
        if found is None:
            return
        patch, place = found
        if not place.exact or ptrace_calls.get_signal_info(thread.tid, ptrace_calls.SignalInfo()) <= 0:
            return
        if any(place.original == original for original, _ in patch.moves):
            self.give_up(thread.space, patch.addresses)
        move_fault(thread, registers, place.original)

    def is_between_steps(self, thread: Thread, registers: RegisterWords) -> bool:
        """
        Return whether a thread that steps itself has trapped at an instruction that is not the program's.

        If it has reached an instruction of the program in displaced code, it is moved to the original, since it
        receives the trap. It will then return into the displaced bytes: if the jump does not trap it there, the jump is
        removed.
        """
        patches = thread.space.patches
        if not patches.starts:
            return False
        pc = registers[Register.RIP]
        if (found := patches.reached(pc)) is None:
            return patches.is_ours(pc)
        patch, original = found
        is_trapped = patch.traps and original in patch.written_bytes()
        if not is_trapped and any(original == inside for inside, _ in patch.moves):
            self.give_up(thread.space, patch.addresses)
        move_fault(thread, registers, original)
        return False

    def lead_on(self, thread: Thread, number: int) -> bool:
        """
        Move a thread that has trapped in the middle of a jump to the copy of the instruction that the jump overwrites.

        Such a thread has restored a context that was saved before the jump was written. ``number`` is the signal of its
        trap. Return whether it was moved.
        """
        if number not in _TRAPS or not thread.space.patches.by_site:
            return False
        registers = ptrace_calls.Registers()
        ptrace_calls.get_registers(thread.tid, registers)
        pc = registers[Register.RIP]
        if ptrace_calls.word_size(registers) == 4:
            return number == signal.SIGILL and self._lead_back(thread, pc)
        place = thread.space.patches.way_on(pc)
        if place == pc or ptrace_calls.get_signal_info(thread.tid, ptrace_calls.SignalInfo()) <= 0:
            return False
        ptrace_calls.set_instruction_pointer(thread.tid, place)
        return True

    def _lead_back(self, thread: Thread, pc: int) -> bool:
        """
        Move a thread in 32-bit code that has entered a jump's trampoline, at ``pc``, back to the breakpoint.

        The jump is removed. Return whether the thread was there.
        """
        begin = pc - TRAP_OF_32_BITS
        patch = next((each for each in thread.space.patches.displaced.values() if each.begin == begin), None)
        if patch is None:
            return False
        self.give_up(thread.space, patch.addresses)
        ptrace_calls.set_instruction_pointer(thread.tid, patch.copies[0].original)
        return True

    def make_way(self, thread: Thread, address: int, breakpoint_: Breakpoint | None) -> None:
        """
        Make the original code available to a thread that hit a breakpoint which a jump has replaced since.

        If the jump overwrites the instruction that follows, or one that the thread returns to after a fault,
        breakpoints replace it.
        """
        patch = thread.space.patches.by_site.get(address)
        if patch is None or breakpoint_ is None:
            return
        following = address + len(breakpoint_.site.original)
        if any(original in (address, following) for original, _ in patch.moves):
            self.give_up(thread.space, patch.addresses)

    def give_up(self, space: AddressSpace, sites: Collection[int]) -> None:
        """Replace the jumps at ``sites``, and those of their groups, by breakpoints, and never write them again."""
        for jump in self.restore(space, sites):
            space.patches.give_up(jump.addresses)

    def restore(self, space: AddressSpace, sites: Collection[int] | None = None) -> list[SitePatch]:
        """
        Replace jumps by breakpoints: all jumps, or those at ``sites`` and all jumps of their groups.

        Return the removed jumps, which can be written again.
        """
        mine = space.patches.bound_to(list(space.patches.by_site) if sites is None else sites)
        if not mine or not space.is_open:
            return []
        present = dict.fromkeys(space.patches.by_site.values())
        with self._stopper.holding(self._threads.in_space(space)):
            space.patches.restore(space.memory, mine)
            space.renew()
        left = set(space.patches.by_site.values())
        return [jump for jump in present if jump not in left]

    def keep_call(self, thread: Thread, breakpoint_: Breakpoint, probe: Probe, frame: int, entry: Entry) -> bool:
        """
        Store in the process a call that began at a breakpoint which a jump has replaced since.

        The thread ran into the breakpoint before the jump was written. Return False if the tracer must store the call.
        """
        space = thread.space
        memory = space.patches.memories.get(probe.program.number)
        if breakpoint_.address not in space.patches.by_site or memory is None or memory.calls is None:
            return False
        with self._stopper.others_stopped(space, thread):
            add_calls(space, memory, probe, [(frame, entry)])
        return True

    def give_way(self, space: AddressSpace, address: int) -> None:
        """Remove the jumps that share bytes with the instruction at ``address``, where a breakpoint will be written."""
        if sites := space.patches.relying_on(address):
            self.give_up(space, sites)


def _move_calls(space: AddressSpace, site: int) -> None:
    """Move the entries of active calls of the function at ``site`` from the tracer to the handlers in the process."""
    for probe, _ in space.breakpoints[site].entries:
        memory = space.patches.memories.get(probe.program.number)
        if memory is not None and memory.calls is not None:
            add_calls(space, memory, probe, space.entries.take_all(probe))


def _shared(program: int, pid: int, memory: NativeMemory) -> MemoryShared:
    """Return the message to the client that a process has mapped memory for handlers, with its addresses."""
    return MemoryShared(program, pid, memory.page, memory.region, others=tuple(at for at, _ in memory.others))


def _write_code(thread: Thread, message: PatchSites) -> None:
    """Map pages and write code to them; raise ``InjectionError`` or OSError if that is not possible."""
    if message.pages:
        map_code(thread, message.program, message.pages)
    for address, code in message.code:
        if thread.space.write(address, code) < len(code):
            raise InjectionError(f"there is no memory for code at {address:#x}")


def _is_current(space: AddressSpace, message: PatchSites) -> bool:
    """Return whether code was made for the program that a process executes."""
    return all((found := space.patches.memories.get(n)) is not None and found.page == p for n, p in message.memories)
