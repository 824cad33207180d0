"""
Places of the threads of an address space, checked before code changes under them.

A jump over several instructions must not be written while a thread is after its first byte, or may return there. A
thread that is there is moved to the displaced code. If a stack contains an address there, in the frame of a signal, the
jump has to wait.

Nor may a thread be in the trampoline of an earlier jump, which would return it to a place after the first byte.

A thread that was stopped on request may have run into a breakpoint at the same time. The kernel reports the request
first: ``get_signal`` looks for JOBCTL_TRAP_MASK before it takes a synchronous signal. Its instruction pointer is after
the breakpoint's byte, which may be the beginning of the next instruction, and it must be there when its SIGTRAP
arrives.
"""

from __future__ import annotations

import contextlib
import signal
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from dprobes.engines.hits.hit_lifecycle import HitState
from dprobes.engines.ptrace.site_patches import Patches
from dprobes.engines.ptrace.tracer.call_injection import MUNMAP
from dprobes.engines.ptrace.tracer.tracer_state import ThreadState
from dprobes.errors import TargetError
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.procfs import process_field, thread_state
from dprobes.platform.linux.ptrace_calls import Register
from dprobes.target.process_maps import PAGE_SIZE, mapping_finder, mappings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from io import FileIO

    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.call_injection import Call
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Slot
    from dprobes.engines.ptrace.tracer.tracer_state import Thread
    from dprobes.target.process_maps import Mapping

__all__ = ["ThreadPlaces", "is_left", "is_outside", "stack_words", "stacks_from", "unmap_native", "unmap_program"]

# Contexts that a process may return to: those on the stacks of threads, and those that it has saved elsewhere.
#
# Stacks are searched from the stack pointers to the ends of the mappings. If a signal has interrupted a thread on
# another stack, the frame of that signal contains the other stack pointer, and that stack is searched as well. A
# program that switches contexts by itself stores them anywhere in its memory (``saved_parts``).


_STACK_MAX = 16 << 20
_FRAMES_MAX = 256
"""Maximum number of signal frames on a stack: a program can fill it with data that looks like frames."""
_SAVED_MAX = 64 << 20
"""Maximum bytes of resident memory that are searched for saved contexts: this takes a quarter of a second."""
_MAPPED_MAX = 16 << 30
"""Maximum bytes of mappings for which the kernel is asked which pages are resident."""
_WRITABLE_MAX = 1 << 13
"""Maximum number of mappings for which the kernel is asked that: two system calls each."""
_RUN_MAX = 1 << 20
_RED_ZONE = 128
_PRESENT = 1 << 63 | 1 << 62
"""Bits of a pagemap entry: page present, or swapped (Documentation/admin-guide/mm/pagemap.rst)."""
_WORD = 8
_SELECTORS = bytes.fromhex("3300 0000 0000 2b00")
"""Words after the flags in a signal frame: cs, gs, fs and ss (``struct sigcontext_64``)."""
_SP_BEFORE = 24
"""Distance in bytes from the interrupted stack pointer in the frame to the selectors."""


def stacks_from(
    space: AddressSpace, mapping_at: Callable[[int], Mapping | None], pointers: Iterable[int]
) -> list[bytes] | None:
    """
    Return the contents of stacks, from each pointer to the end of its mapping.

    Return None if a stack is too large, or cannot be read. Pointers are rounded down to words. ``mapping_at`` returns
    the mapping that contains an address.
    """
    found: list[bytes] = []
    waiting = list(pointers)
    seen: dict[int, int] = {}
    while waiting:
        pointer = waiting.pop() & -_WORD
        stack = mapping_at(pointer)
        if stack is None or stack.end - pointer > _STACK_MAX:
            return None
        end = seen.get(stack.start, stack.end)
        if pointer >= end:
            continue
        try:
            data = space.read(pointer, end - pointer)
        except OSError:
            return None
        seen[stack.start] = pointer
        found.append(data)
        pointers = set(islice(_interrupted(data), _FRAMES_MAX + 1))
        if len(pointers) > _FRAMES_MAX:
            return None
        waiting += (sp for sp in pointers if (place := mapping_at(sp)) and place.start != stack.start)
    return found


def _mapping_of(mappings: Sequence[Mapping], address: int) -> Mapping | None:
    return next((mapping for mapping in mappings if mapping.start <= address < mapping.end), None)


def _interrupted(data: bytes) -> Iterator[int]:
    """
    Iterate over the stack pointers that signal frames in ``data``, the contents of a stack, have saved.

    A signal frame is recognized by its segment selectors, so other data may be taken for one.
    """
    place = data.find(_SELECTORS)
    while place >= 0:
        if place >= _SP_BEFORE and not place % _WORD:
            yield int.from_bytes(data[place - _SP_BEFORE : place - _SP_BEFORE + _WORD], "little")
        place = data.find(_SELECTORS, place + 1)


def saved_parts(
    space: AddressSpace, tid: int, mappings: Sequence[Mapping], pointers: Iterable[int], limit: int = _SAVED_MAX
) -> Iterator[bytes] | None:
    """
    Return all memory that the program may have written to, in parts.

    Return None if that is more than ``limit`` bytes, or if the writable mappings are too many or too large. Omitted are
    the engine's own memory, and memory below the red zones of the stack ``pointers``. The iteration raises OSError if
    memory cannot be read.
    """
    ours = space.patches.ranges()
    tops = {stack.start: pointer for pointer in pointers if (stack := _mapping_of(mappings, pointer)) is not None}
    writable = [mapping for mapping in mappings if mapping.permissions.startswith("rw")]
    if len(writable) > _WRITABLE_MAX or sum(mapping.end - mapping.start for mapping in writable) > _MAPPED_MAX:
        return None
    runs: list[tuple[int, int]] = []
    with open(f"/proc/{tid}/pagemap", "rb", buffering=0) as pagemap:
        for mapping in writable:
            if not any(start <= mapping.start < end for start, end in ours):
                live = (tops.get(mapping.start, mapping.start + _RED_ZONE) - _RED_ZONE) & -_WORD
                runs += [(max(start, live), end) for start, end in _used_runs(pagemap, mapping) if end > live]
    if sum(end - start for start, end in runs) > limit:
        return None
    return (space.read(start, end - start) for start, end in runs)


def _used_runs(pagemap: FileIO, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Iterate over the ranges (start, end) of resident pages of a mapping."""
    pagemap.seek(mapping.start // PAGE_SIZE * _WORD)
    data = pagemap.read((mapping.end - mapping.start) // PAGE_SIZE * _WORD)
    start = None
    for number, entry in enumerate(memoryview(data).cast("Q")):
        place = mapping.start + number * PAGE_SIZE
        if not entry & _PRESENT:
            if start is not None:
                yield start, place
            start = None
        elif start is None:
            start = place
        elif place - start >= _RUN_MAX:
            yield start, place
            start = place
    if start is not None:
        yield start, mapping.start + len(data) // _WORD * PAGE_SIZE


# Unmapping of memory that handlers ran in, when no thread can return into it.
#
# A thread may be in a handler, or in a signal handler that has interrupted one: then the address is on its stack, in
# the signal frame. So the stacks of all threads are searched (``thread_places``); a stack that is too large for that
# counts as in use. So is the rest of the memory, where a program may have saved a context to return to.


_ENDED = ("Z", "X")
"""States of threads that execute no more code, though their end may not be handled yet."""
_LOOKED_THROUGH_MAX = 256 << 20
"""Maximum bytes of memory that are searched, at about 1 GB/s; a larger process keeps the code."""
_GRANULE = 16
"""Number of low bits of an address that are not searched for: the others are six bytes, which are found quickly."""


def is_left(space: AddressSpace, threads: Sequence[Thread], ranges: Sequence[tuple[int, int]] | None = None) -> bool:
    """
    Return whether no thread of a space can return into the engine's code, all of it or that in ``ranges``.

    All threads must be stopped.
    """
    if not all(is_outside(space, thread, ranges) for thread in threads):
        return False
    if ranges is None:
        ranges = space.patches.code_ranges()
    return not ranges or _is_saved_nowhere(space, threads, ranges)


def _is_saved_nowhere(space: AddressSpace, threads: Sequence[Thread], ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether the program has certainly saved no address in ``ranges``, with a context or by itself."""
    pointers: list[int] = []
    registers = ptrace_calls.Registers()
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            ptrace_calls.get_registers(thread.tid, registers)
            pointers.append(registers[Register.RSP])
    for thread in threads:
        try:
            parts = saved_parts(space, thread.tid, mappings_of(thread.tid), pointers, _LOOKED_THROUGH_MAX)
            return parts is not None and not any(names_address(part, *each) for part in parts for each in ranges)
        except (OSError, TargetError):
            continue  # it has ended
    return True


def is_outside(space: AddressSpace, thread: Thread, ranges: Sequence[tuple[int, int]] | None = None) -> bool:
    """
    Return whether a stopped or ended thread can certainly not return into the engine's code.

    ``ranges`` restricts the code that is considered.
    """
    if ranges is None:
        ranges = space.patches.code_ranges()
    if not ranges:
        return True
    registers = ptrace_calls.Registers()
    try:
        ptrace_calls.get_registers(thread.tid, registers)
        if any(start <= registers[Register.RIP] < end for start, end in ranges):
            return False
        stacks = stacks_from(space, mapping_finder(thread.tid), [registers[Register.RSP]])
    except (OSError, TargetError):
        return thread_state(thread.tid) in _ENDED
    return stacks is not None and not any(names_address(data, *each) for data in stacks for each in ranges)


def names_address(data: bytes, start: int, end: int) -> bool:
    """Return whether eight bytes anywhere in ``data`` are an address from ``start`` to ``end`` (excluded)."""
    for granule in range(start >> _GRANULE, (end - 1 >> _GRANULE) + 1):
        pattern = granule.to_bytes(6, "little")
        place = data.find(pattern)
        while place >= 0:
            if place >= 2 and start <= int.from_bytes(data[place - 2 : place + 6], "little") < end:
                return True
            place = data.find(pattern, place + 1)
    return False


def unmap_native(space: AddressSpace, call: Call) -> None:
    """Unmap all memory of handlers in a space; no thread may be able to return into it."""
    patches = space.patches
    for number in patches.code.keys() | patches.memories.keys():
        unmap_program(space, call, number)
    space.patches = Patches()


def unmap_program(space: AddressSpace, call: Call, number: int) -> None:
    """
    Unmap the memory of the handlers of one program.

    If the tracer is killed meanwhile, other processes unmap the rest (``outside_removal``). The region is unmapped
    before the page, which cannot be distinguished from memory that the program may map there next. The manifest, which
    lists everything, is the last.
    """
    number_of_call, patches = MUNMAP[space.word_size], space.patches
    for start, end in patches.code.get(number, ()):
        call(number_of_call, start, end - start)
    memory = patches.memories.get(number)
    if memory is not None:
        (region, size), *rest = memory.shared
        for address, length in ((region, size), (memory.page, memory.own), *rest):
            if length:
                call(number_of_call, address, length)
    patches.forget_program(number)


_SLEEPS = "a thread sleeps in the instruction"
_CANNOT_STOP = "a thread cannot be stopped"
_BUSY = "a thread is just executing the instruction"
_COMES_BACK = "a thread is in the code of another jump, which leads to code that would be displaced"
_ON_STACK = "a signal handler returns into code that would be displaced"
_SAVED = "a context that the program has saved may be in code that would be displaced"


class _Place(NamedTuple):
    """Place of a thread; ``is_trapping`` means that it has run into a breakpoint, but has not stopped for it yet."""

    thread: Thread
    pc: int
    slot: Slot | None
    is_trapping: bool = False


class ThreadPlaces:
    """
    Places of all threads of a space, read once; all those that can stop must be stopped.

    ``patches`` are the jumps that are to be written.
    """

    def __init__(self, space: AddressSpace, threads: Iterable[Thread], patches: Iterable[SitePatch]) -> None:
        self._space = space
        self._threads = list(threads)
        self._places: list[_Place] = []
        self._unknown = False
        inside = [original for patch in patches for original, _ in patch.moves]
        self._leading_back: dict[int, list[tuple[int, int]]] = {}
        """Ranges of trampolines, by the address to which they return."""
        for former in space.patches.displaced.values() if inside else ():
            if former.begin:
                self._leading_back.setdefault(former.back, []).append((former.begin, former.end))
        self._kept: frozenset[int] = frozenset()
        self._saved: frozenset[int] | None = frozenset()
        self._look(space)
        if inside and not self._unknown:
            pointers = [pointer for thread in self._threads for pointer in self._pointers(thread)]
            found = stack_words(space, self._threads[0].tid, pointers, min(inside), max(inside))
            self._unknown = found is None
            self._kept = found or frozenset()
        resumed = frozenset(original for patch in patches if not patch.traps for original, _ in patch.moves)
        if resumed and not self._unknown:
            self._saved = self._words_saved(resumed)

    def _words_saved(self, wanted: frozenset[int]) -> frozenset[int] | None:
        """Return those of the ``wanted`` addresses that memory contains as words; None if that cannot be determined."""
        tid = self._threads[0].tid
        try:
            pointers = [pointer for thread in self._threads for pointer in self._pointers(thread)]
            parts = saved_parts(self._space, tid, mappings_of(tid), pointers)
            if parts is None:
                return None
            found = (wanted.intersection(memoryview(part[: len(part) & -_WORD]).cast("Q")) for part in parts)
            return frozenset().union(*found)
        except (TargetError, OSError):
            return None

    def _look(self, space: AddressSpace) -> None:
        registers = ptrace_calls.Registers()
        for thread in self._threads:
            if thread.state in (ThreadState.ENDED, ThreadState.NEWBORN):
                continue
            try:
                ptrace_calls.get_registers(thread.tid, registers)
            except OSError:
                self._unknown = True
                continue
            pc = registers[Register.RIP]
            slot = space.slots.holding(pc) if space.slots.by_address else None
            is_behind = pc - 1 in space.breakpoints or pc - 1 in space.former
            is_trapping = is_behind and not thread.trapped and _has_trap_pending(thread)
            self._places.append(_Place(thread, pc, slot, is_trapping))

    @staticmethod
    def _pointers(thread: Thread) -> Iterator[int]:
        registers = ptrace_calls.Registers()
        try:
            ptrace_calls.get_registers(thread.tid, registers)
        except OSError:
            return  # it has ended, or has not begun
        yield registers[Register.RSP]

    def obstacle(self, patch: SitePatch) -> str | None:
        """Return the temporary reason why a jump cannot be written now, or None if it can."""
        sites = patch.addresses
        for thread in self._threads:
            # Other threads that have run into the breakpoint can continue where they are, with or without it.
            if thread.hit.is_late and thread.hit.breakpoint.address in sites:
                return _SLEEPS
            if thread.restarting in sites:
                return _SLEEPS
        return self._obstacle_to_moves(patch) if patch.moves else None

    def _obstacle_to_moves(self, patch: SitePatch) -> str | None:
        """Return the reason why code cannot be displaced now, or None if it can."""
        if self._unknown:
            return _CANNOT_STOP
        if any(original in self._kept for original, _ in patch.moves):
            return _ON_STACK
        if not patch.traps and (self._saved is None or any(original in self._saved for original, _ in patch.moves)):
            return _SAVED
        ranges = [each for original, _ in patch.moves for each in self._leading_back.get(original, ())]
        if ranges and not all(is_outside(self._space, thread, ranges) for thread in self._threads):
            return _COMES_BACK
        return _BUSY if any(_is_busy(place, patch) for place in self._places) else None

    def move(self, patch: SitePatch) -> None:
        """Move threads in instructions that a jump displaces to the copies; raise OSError for one that has ended."""
        for thread, pc, slot, _ in self._places:
            to: int | None = pc
            if thread.trapped:
                if thread.trapped in patch.addresses:
                    to = patch.way_on(thread.trapped)
            elif slot is not None:
                # The outcome of a pending hit is determined from its slot.
                if slot.site in patch.addresses and thread.hit.state is not HitState.PENDING:
                    to = patch.copy_of(slot.site) if pc == slot.address else patch.way_on(slot.following)
            else:
                to = patch.way_on(pc)
            if to is not None and to != pc:
                ptrace_calls.set_instruction_pointer(thread.tid, to)


def _is_busy(place: _Place, patch: SitePatch) -> bool:
    """Return whether a thread is in the middle of an instruction that a jump displaces."""
    thread, pc, slot, is_trapping = place
    if is_trapping and (pc - 1 in patch.addresses or patch.way_on(pc) != pc):
        return True
    if slot is None or slot.site not in patch.addresses or thread.trapped:
        return False
    return pc not in (slot.address, slot.end) or bool(slot.trap) or thread.hit.state is HitState.PENDING


def _has_trap_pending(thread: Thread) -> bool:
    pending = process_field(thread.tid, "SigPnd")
    return bool(pending) and bool(int(pending, 16) & 1 << signal.SIGTRAP - 1)


def stack_words(space: AddressSpace, tid: int, pointers: Iterable[int], first: int, last: int) -> frozenset[int] | None:
    """Return the words from ``first`` to ``last`` on the stacks of threads, or None if one cannot be searched."""
    try:
        stacks = stacks_from(space, mapping_finder(tid), pointers)
    except TargetError:
        return None
    if stacks is None:
        return None
    words = (memoryview(data[: len(data) & -_WORD]).cast("Q") for data in stacks)
    return frozenset(word for each in words for word in each if first <= word <= last)
