"""
Cleanup of traced processes by another process, after the tracer was killed: debug registers, jumps, handlers' memory.

Memory is unmapped by a thread of the process (``call_injection``), while all threads are stopped and none can return
into it. It is unmapped only if it is still a mapping of the shared memory file. If the tracer was killed while it
unmapped memory, some of it is already unmapped, in the order of ``thread_places``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.site_patches import NativeMemory, without_jump
from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
from dprobes.engines.ptrace.tracer.call_injection import InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.native.thread_places import is_left, unmap_native
from dprobes.engines.ptrace.tracer.process_tree import word_size_of
from dprobes.engines.ptrace.tracer.thread_stopper import Stopper, await_stop
from dprobes.engines.ptrace.tracer.thread_watchpoints import DebugRegisters
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadGoneError, ThreadState, ThreadTable
from dprobes.errors import DprobesError
from dprobes.platform.linux import ptrace_calls
from dprobes.platform.linux.procfs import process_field, threads_of
from dprobes.platform.linux.ptrace_calls import StopKind, classify_stop
from dprobes.platform.x86.debug_registers import CONTROL, SLOTS, STATUS, decode, slot_mask, slots_hit
from dprobes.target.process_maps import mappings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from dprobes.engines.ptrace.restorer_messages import FilesShared
    from dprobes.engines.ptrace.site_patches import Patches, SitePatch
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.target.process_maps import Mapping as MappedRange

__all__ = ["SHARED_MEMORY", "UNMAPPING_PATIENCE", "clear_processes", "remove_jumps", "unmap_left_memory"]

# Removal of watchpoints from debug registers after the tracer was killed.
#
# The kernel resumes a dead tracer's threads with their debug registers set, and an access would end the program by a
# SIGTRAP. So every thread is seized again, stopped, cleared, and detached. Threads that are created meanwhile need
# nothing: the kernel gives them empty registers.


PATIENCE = 2.0
"""Maximum number of seconds to wait until the kernel has released a dead tracer's threads, and until one stops."""

_PAUSE = 0.0002


def clear_processes(watches: Mapping[int, tuple[Watch, ...]]) -> tuple[int, int]:
    """
    Clear the debug registers with the watches of each process, in all its threads; ``watches`` is keyed by process id.

    Return the number of threads that had any, and of threads that may keep some because they could not be stopped.
    """
    threads = ThreadTable()
    stopper = Stopper(threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)
    missed = 0
    until = time.monotonic() + PATIENCE
    for pid in watches:
        space = AddressSpace.closed(8)
        with contextlib.suppress(OSError):
            for tid in threads_of(pid):
                try:
                    if seize_again(tid, until):
                        threads[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
                except OSError:
                    missed += 1
    cleared = 0
    while threads:
        for thread in stopper.stop([t for t in threads.values() if t.state is ThreadState.RUNNING]):
            with contextlib.suppress(OSError):
                cleared += _let_go(thread, watches[thread.pid], stopper)
            del threads[thread.tid]
        while stopper.deferred:
            tid, status = stopper.oldest_deferred()
            thread = threads.pop(tid)
            with contextlib.suppress(OSError):
                cleared += _let_go_at(thread, status, watches[thread.pid], stopper)
        for thread in [t for t in threads.values() if t.state is ThreadState.ENDED]:
            del threads[thread.tid]
        if time.monotonic() > until:
            missed += len(threads)
            break
    return cleared, missed


def seize_again(tid: int, until: float) -> bool:
    """
    Seize a thread when its dead tracer has released it, before the monotonic time ``until``.

    Return False if the thread has ended.
    """
    while True:
        try:
            ptrace_calls.seize(tid, follow=False)
        except OSError as error:
            if error.errno == errno.ESRCH or process_field(tid, "State")[:1] in ("Z", "X", ""):
                return False
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)
        else:
            return True


def _let_go(thread: Thread, watches: tuple[Watch, ...], stopper: Stopper) -> bool:
    """
    Clear the debug registers with ``watches`` of a thread that stopped on request, and detach it.

    Return whether any was set.
    """
    was_set, hit = _clear(thread.tid, watches)
    if hit and _has_pending_trap(thread.tid):
        # The pending SIGTRAP is delivered before the thread executes any code.
        ptrace_calls.resume(thread.tid)
        status = await_stop(thread.tid)
        return _let_go_at(thread, status, watches, stopper) or was_set
    stopper.waits.hide_interruption(thread)
    ptrace_calls.detach(thread.tid)
    return was_set


def _let_go_at(thread: Thread, status: int, watches: tuple[Watch, ...], stopper: Stopper) -> bool:
    """
    Clear the debug registers with ``watches`` of a thread that stopped with the wait status ``status``, and detach it.

    A signal is delivered unless it is the trap of one of these watchpoints. Return whether any was set.
    """
    kind, number = classify_stop(status)
    if kind is StopKind.EXITED:
        return False
    was_set, _ = _clear(thread.tid, watches)
    deliver = number if kind is StopKind.SIGNAL else 0
    if deliver == signal.SIGTRAP:
        code = ptrace_calls.get_signal_info(thread.tid, ptrace_calls.SignalInfo())
        if code == ptrace_calls.TRAP_HWBKPT:
            deliver = 0
    stopper.waits.hide_interruption(thread, deliver)
    ptrace_calls.detach(thread.tid, deliver)
    return was_set


def _clear(tid: int, watches: tuple[Watch, ...]) -> tuple[bool, bool]:
    """Clear the debug registers with ``watches``; return whether there were any, and whether DR6 shows a hit of one."""
    control = before = ptrace_calls.get_debug_register(tid, CONTROL)
    mine = [s for s in SLOTS if decode(control, s, ptrace_calls.get_debug_register(tid, s)) in watches]
    for slot in mine:
        control &= ~slot_mask(slot)
    if control != before:
        ptrace_calls.set_debug_register(tid, CONTROL, control)
    hit = slots_hit(ptrace_calls.get_debug_register(tid, STATUS))
    return bool(mine), any(slot in mine for slot in hit)


def _has_pending_trap(tid: int) -> bool:
    pending = process_field(tid, "SigPnd")
    return bool(pending) and bool(int(pending, 16) & 1 << (signal.SIGTRAP - 1))


# Removal of jumps from code after the tracer was killed.
#
# Handlers in the process do no harm without a tracer, but are useless. Code is changed while no thread of the process
# runs: so each is seized again, and stopped, until the file's bytes are restored.


def remove_jumps(pid: int, patches: Sequence[SitePatch]) -> int:
    """Restore the file's bytes where memory of a process has one of the jumps; return the number of these jumps."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        present = [pieces for patch in patches if (pieces := _pieces_there(memory, patch))]
        return _remove(pid, memory, present) if present else 0
    finally:
        os.close(memory)


def _pieces_there(memory: int, patch: SitePatch) -> list[tuple[int, bytes]]:
    """
    Return the writes, (address, bytes) each, that remove a jump from the memory with the descriptor ``memory``.

    A jump across two pages may have been written in part: then only this part is restored.
    """
    found = []
    for (address, data), original in zip(reversed(patch.writes), reversed(patch.originals), strict=True):
        with contextlib.suppress(OSError):
            there = os.pread(memory, len(data), address)
            left = without_jump(there, data, original)
            if left is not None and left != there:
                found.append((address, left))
    return found


def _remove(pid: int, memory: int, jumps: Sequence[list[tuple[int, bytes]]]) -> int:
    with _stopped_again(pid, AddressSpace.closed(8)):
        for pieces in jumps:
            for address, original in pieces:
                with contextlib.suppress(OSError):
                    os.pwrite(memory, original, address)
    return len(jumps)


@contextlib.contextmanager
def _stopped_again(pid: int, space: AddressSpace, withheld: int = 0) -> Iterator[tuple[ThreadTable, list[Thread]]]:
    """
    Seize and stop the threads of a process as soon as its dead tracer has released them; detach them afterwards.

    Yield all threads, and those that stopped for no other reason than this request. A thread that stopped for a signal
    receives it at the end, except for the signal ``withheld``.
    """
    threads = ThreadTable()
    stopper = Stopper(threads, DebugRegisters(lambda _: None).program_and_report, lambda _: None)
    until = time.monotonic() + PATIENCE
    for tid in threads_of(pid):
        with contextlib.suppress(OSError):
            if seize_again(tid, until):
                threads[tid] = Thread(tid, pid, space, ThreadState.RUNNING)
    held = stopper.stop(list(threads.values()))
    try:
        yield threads, held
    finally:
        for thread in held:
            with contextlib.suppress(OSError):
                stopper.waits.hide_interruption(thread)
                ptrace_calls.detach(thread.tid)
        while stopper.deferred:
            tid, status = stopper.oldest_deferred()
            kind, number = classify_stop(status)
            if kind is not StopKind.EXITED:
                with contextlib.suppress(OSError):
                    ptrace_calls.detach(tid, number if kind is StopKind.SIGNAL and number != withheld else 0)


UNMAPPING_PATIENCE = 2.0
"""Maximum number of seconds to wait for threads to leave the memory: a thread may have to wait for a CPU."""
_PAUSE_AT_FIRST, _PAUSE_MAX = 0.02, 0.2
"""Seconds between two checks for threads in it: the first pause, and the maximum."""

SHARED_MEMORY = "/memfd:dprobes"
"""Prefix of the names of memory files that are shared with processes."""


def unmap_left_memory(pid: int, patches: Patches, until: float | None = None, begun: FilesShared | None = None) -> bool:
    """
    Unmap the memory of handlers in a process; return False if it stays mapped.

    It stays if threads did not leave it or could not be stopped, or if no system call can be injected into the process.
    It stays in 32-bit processes, because the search for addresses on stacks knows only 64-bit signal frames.

    Files of ``begun`` are unmapped at any address. Attempts are repeated until the monotonic time ``until``, by default
    for ``UNMAPPING_PATIENCE`` seconds; there is at least one.
    """
    until = time.monotonic() + UNMAPPING_PATIENCE if until is None else until
    pause = _PAUSE_AT_FIRST
    while not (is_unmapped := _unmap(pid, patches, begun)):
        if is_unmapped is None or time.monotonic() > until:
            return False
        # A thread makes no progress if it is stopped whenever it gets a CPU.
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX)
    return True


def _present(pid: int, patches: Patches, begun: FilesShared | None) -> Patches | None:
    """Return the part of the handlers' memory that is still mapped, including that of ``begun``, or None if none is."""
    try:
        mappings = mappings_of(pid)
    except DprobesError:
        return None
    ours = [mapping for mapping in mappings if mapping.path.startswith(SHARED_MEMORY)]
    shared = {mapping.start for mapping in ours}
    memories = {number: each for number, memory in patches.memories.items() if (each := _rest_of(memory, shared))}
    known = {start for memory in memories.values() for start, _ in memory.shared}
    if begun is not None:
        for mapping in ours:
            if (mapping.device, mapping.inode) in begun.files and mapping.start not in known:
                memories[mapping.start] = NativeMemory(0, 0, mapping.start, mapping.end - mapping.start)
        if _has_page(pid, *begun.page):
            memories[begun.page[0]] = NativeMemory(*begun.page, 0, 0)
    anonymous = [m for m in mappings if m.permissions in ("r-xp", "rw-p") and not m.inode]
    code = {number: [each for each in ranges if _has_code(anonymous, *each)] for number, ranges in patches.code.items()}
    return type(patches)(memories, {}, code) if memories or any(code.values()) else None


def _has_code(anonymous: Sequence[MappedRange], start: int, end: int) -> bool:
    """Return whether a range is mapped for code, perhaps with data at its end (a gate), in ``anonymous`` mappings."""
    is_code = True
    for mapping in anonymous:
        if mapping.start <= start < mapping.end:
            if is_code and mapping.permissions != "r-xp":
                return False
            if end <= mapping.end:
                return True
            start, is_code = mapping.end, False
    return False


def _has_page(pid: int, start: int, size: int) -> bool:
    """Return whether exactly this range is mapped and wiped on fork (MADV_WIPEONFORK: ``wf`` in smaps, proc(5))."""
    is_it = False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
        for line in file if size else ():
            name, _, rest = line.partition(" ")
            if "-" in name:
                is_it = [int(each, 16) for each in name.split("-")] == [start, start + size]
            elif is_it and name == "VmFlags:":
                return "wf" in rest.split()
    return False


def _rest_of(memory: NativeMemory, shared: Collection[int]) -> NativeMemory | None:
    """
    Return the part of the memory of handlers that is still mapped, or None if nothing is.

    ``shared`` are the addresses of mappings of memory files.
    """
    size, own = (memory.size, memory.own) if memory.region in shared else (0, 0)
    others = tuple(each for each in memory.others if each[0] in shared)
    manifest = memory.manifest if memory.manifest is not None and memory.manifest[0] in shared else None
    rest = memory._replace(own=own, size=size, others=others, manifest=manifest)
    return rest if size or others or manifest else None


def _unmap(pid: int, patches: Patches, begun: FilesShared | None) -> bool | None:
    """
    Unmap the memory of handlers, ``patches`` and the files of ``begun``, by system calls injected into the process.

    Return True if it is gone, False if a later attempt may succeed, None if none can.
    """
    present = _present(pid, patches, begun)
    if present is None:
        return True
    word_size = word_size_of(pid)
    if word_size == 4:
        return None  # a thread may return into it: ``names_address`` finds no address of four bytes
    space = AddressSpace.of_thread(pid, word_size)
    space.patches = present
    with contextlib.closing(space), _stopped_again(pid, space, signal.SIGTRAP) as (threads, held):
        return _unmap_if_left(space, threads, held)


def _unmap_if_left(space: AddressSpace, threads: ThreadTable, held: list[Thread]) -> bool | None:
    living = [thread for thread in threads.values() if thread.state is not ThreadState.ENDED]
    if len(held) < len(living) or not is_left(space, held):
        return False
    for thread in held:
        with contextlib.suppress(InjectionError, ThreadGoneError, OSError):
            if not may_inject(thread):
                return None
            with injecting(thread) as call:
                unmap_native(space, call)
            return True
    return False
