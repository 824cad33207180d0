"""
Traced threads and processes: their creation and end, and seizing of processes that run already.

The kernel stops a new thread or process before it runs, and reports it twice: by that stop, and by an event of the
parent. Either may arrive first, and if the parent is killed at that moment the event never arrives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace, PageReader
from dprobes.engines.ptrace.tracer.breakpoint_placement import tell_placed
from dprobes.engines.ptrace.tracer.native.handler_memory import enter_thread, leave_thread, own_pages
from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint
from dprobes.engines.ptrace.tracer.probe_removal import tell_lowered
from dprobes.engines.ptrace.tracer.tracer_state import Thread, ThreadState
from dprobes.engines.ptrace.tracer_messages import (
    Attached,
    Failed,
    Forked,
    MemoryCopied,
    Placed,
    Raised,
    Removed,
    Warned,
    Watched,
)
from dprobes.engines.refusals import is_dprobes
from dprobes.errors import reason_of, system_error
from dprobes.platform.linux import process_calls, ptrace_calls
from dprobes.platform.linux.process_calls import processes_in_memory_of
from dprobes.platform.linux.procfs import (
    children_of,
    identity_of,
    living_thread,
    process_field,
    process_of,
    program_of,
    thread_state,
    threads_of,
    without_waiting,
)
from dprobes.platform.linux.ptrace_calls import NEW_TASK_EVENTS, Event, StopKind, classify_stop
from dprobes.platform.x86.debug_registers import CONTROL

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.engines.ptrace.tracer.module_breakpoints import ModuleBreakpoints
    from dprobes.engines.ptrace.tracer.native.handler_ends import JumpWaits
    from dprobes.engines.ptrace.tracer.native.jump_patcher import Patcher
    from dprobes.engines.ptrace.tracer.thread_stopper import Stopper
    from dprobes.engines.ptrace.tracer.tracer_state import ThreadTable, TracerState

__all__ = ["ORPHAN_AGE", "Attachment", "Identities", "ProcessTree", "Seizer", "word_size_of"]


class Identities:
    """
    Reporter of the names and user ids of threads, through ``send``.

    The client reads them itself from /proc, with two exceptions. A new process may soon call execve. The /proc entry of
    a thread that has ended exists only until the tracer waits for the thread.
    """

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send

    def born(self, pid: int, space: AddressSpace) -> None:
        """Report a process that has not run yet."""
        if space.patches.memories and (identity := identity_of(pid, pid)) is not None:
            self._send(identity._replace(program=program_of(pid)))

    def ended(self, thread: Thread) -> None:
        """Report a thread that has ended and has not been waited for: until then its ids are not reused."""
        if thread.space.patches.memories and (identity := identity_of(thread.pid, thread.tid)) is not None:
            self._send(identity)
        leave_thread(thread.space, thread.tid)


ORPHAN_AGE = 0.5
"""Seconds after which a parent's event for a child is no longer expected."""


class ProcessTree:
    """Table of the traced processes, updated as threads and processes begin and end, and of the programs' scopes."""

    def __init__(
        self,
        state: TracerState,
        stopper: Stopper,
        modules: ModuleBreakpoints,
        patcher: Patcher,
        jump_waits: JumpWaits,
        identities: Identities,
    ) -> None:
        self._patcher = patcher
        self._jump_waits = jump_waits
        self._identities = identities
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._stopper = stopper
        self._modules = modules
        self._parents: dict[int, int] = {}
        """Parents of processes that were created while traced, as long as both exist."""
        self.has_idle_programs = False
        """True if the last process of a program has ended."""
        self._unreported: dict[int, tuple[int, float]] = {}
        self._taken: dict[int, int] = {}
        """Children that were registered before their parent's event was handled, by the parent thread's id."""

    @property
    def has_unreported(self) -> bool:
        """True if a thread has stopped that no parent has reported."""
        return bool(self._unreported)

    def note_unreported(self, tid: int, status: int) -> None:
        """Keep the first stop of a new thread until an event of its parent, which arrives later, reports the thread."""
        self._unreported[tid] = (status, time.monotonic())

    def add_child(self, parent: Thread, event: Event, tid: int) -> None:
        """Register the thread or process that ``parent`` has just created."""
        if self._taken.pop(parent.tid, None) == tid or tid in self._threads:
            return
        unreported = self._unreported.pop(tid, None)
        if unreported is not None and classify_stop(unreported[0])[0] is StopKind.EXITED:
            return
        pid = process_of(tid)
        space = parent.space
        if pid != parent.pid:
            self._parents[pid] = parent.pid
            if self._programs.want_images or parent.space.patches.memories:
                self._connection.send(Forked(pid, parent.pid, time.monotonic_ns()))
            for program in self._programs:
                if program.reach.follow and parent.pid in program.reach.pids:
                    program.reach.pids.add(pid)
            shared = process_calls.same_memory(parent.tid, tid)
            if not (event is Event.VFORK if shared is None else shared):
                space = self._copied_space(parent.space, tid, pid)
            if space is parent.space and event is not Event.VFORK:
                space.has_sharers = True
                self._patcher.restore(space)  # handlers in memory require that it belongs to one process
            space.pids.add(pid)
            if space.watchpoints:
                self._connection.send(Watched(pid, tuple(w.watch for w in space.watchpoints if not w.by_page)))
        self._enter_newborn(tid, pid, space, unreported[0] if unreported is not None else None)
        self._threads[tid].is_outside = not self._is_in_scope(pid)
        if pid != parent.pid:
            # It continues where its parent does, on a copy of the stack.
            self._threads[tid].returns = [replace(pending) for pending in parent.returns]
        if space is not parent.space and not self._threads[tid].is_outside:
            self._await_jumps(self._threads[tid], parent.pid)

    def take_children(self, space: AddressSpace) -> None:
        """Register the children that stopped threads of a space have just created, before their events are handled."""
        for tid, status in list(self._stopper.deferred.items()):
            thread, (kind, number) = self._threads.get(tid), classify_stop(status)
            if thread is None or thread.space is not space or kind is not StopKind.EVENT:
                continue
            if number in NEW_TASK_EVENTS:
                with contextlib.suppress(OSError):
                    child = ptrace_calls.event_message(tid)
                    if self._taken.get(tid) != child:
                        self.add_child(thread, Event(number), child)
                        self._taken[tid] = child

    def _copied_space(self, original: AddressSpace, tid: int, pid: int) -> AddressSpace:
        try:
            space = original.copy_for_child(tid)
        except OSError:
            return AddressSpace.closed(original.word_size)  # it was killed already
        own_pages(space, pid)
        self._identities.born(pid, space)
        for program in self._programs:
            if pid not in program.reach.pids:
                space.drop_program(program)
        placed = [(b.address, b.original) for b in space.breakpoints.values()] + space.slots.traps()
        if placed:
            self._connection.send(Placed(pid, tuple(placed)))
        if space.semaphores:
            self._connection.send(Raised(pid, tuple(space.semaphores.items())))
        if space.patches.memories or space.slots.areas:
            self._connection.send(MemoryCopied(pid, min(original.pids)))
        return space

    def _await_jumps(self, child: Thread, parent: int) -> None:
        """
        Let a child wait for jumps that were about to be written to its parent when the kernel copied the memory.

        If that memory already contained the handlers' memory, jumps written for the parent are written to the child as
        well (``Patcher``). Otherwise the child is treated like a process after an exec.
        """
        space = child.space
        if not space.unwritten:
            return
        self._jump_waits.begin(child)
        space.copied_from = parent
        late = {probe for address in space.unwritten for probe in space.breakpoints[address].probes()}
        alone = [probe for probe in late if probe.program.number not in space.patches.memories]
        tell_placed(self._connection, child.pid, alone)

    def _enter_newborn(self, tid: int, pid: int, space: AddressSpace, status: int | None) -> None:
        """Register a thread that has not run yet; ``status`` is its first stop, or None before that."""
        if not enter_thread(space, pid, tid):
            self._patcher.give_up(space, list(space.patches.by_site))
        self._threads[tid] = Thread(tid, pid, space, ThreadState.NEWBORN)
        if status is not None:
            self._stopper.defer(tid, status)

    def adopt_orphans(self, age: float = 0) -> None:
        """Register the threads that stopped at least ``age`` seconds ago and that no parent has reported."""
        now = time.monotonic()
        for tid, (status, since) in list(self._unreported.items()):
            if now - since < age:
                continue
            del self._unreported[tid]
            if classify_stop(status)[0] is not StopKind.EXITED:
                with contextlib.suppress(OSError):
                    self._adopt(tid, status)

    def _adopt(self, tid: int, status: int) -> None:
        pid = process_of(tid)
        self._into_scopes(pid)
        for thread in self._threads.values():
            if thread.pid == pid or process_calls.same_memory(thread.tid, tid):
                space = thread.space
                break
        else:
            registers = ptrace_calls.Registers()
            ptrace_calls.get_registers(tid, registers)
            word_size = ptrace_calls.word_size(registers)
            space = AddressSpace.of_thread(tid, word_size)
            thread = Thread(tid, pid, space, ThreadState.STOPPED)
            space.pids.add(pid)
            self._modules.inherit(space, thread)
        space.pids.add(pid)
        self._enter_newborn(tid, pid, space, status)

    def reconsider(self, tid: int) -> None:
        """Pass on a stop that ``note_unreported`` has kept, so that it is handled now."""
        if (unreported := self._unreported.pop(tid, None)) is not None:
            self._stopper.defer(tid, unreported[0])

    def share_with_vfork(self, space: AddressSpace, pid: int) -> None:
        """Remove all breakpoints from memory in which ``pid``, which is no longer traced, continues to run."""
        addresses = tuple(space.breakpoints)
        space.awaited += tuple(b for b in space.breakpoints.values() if b.waiting)
        space.withdraw_all()
        space.files.clear()
        space.shared_with.add(pid)
        tell_lowered(self._connection, space)
        for user in space.pids if addresses else ():
            self._connection.send(Removed(user, addresses))

    def take_back(self, thread: Thread) -> None:
        """Place breakpoints again in the memory of a stopped thread if all processes that shared it have left it."""
        space = thread.space
        space.shared_with = {pid for pid in space.shared_with if process_calls.same_memory(thread.tid, pid)}
        if not space.shared_with:
            self._modules.update(space, thread)
            self._await_again(space, thread)

    def _await_again(self, space: AddressSpace, thread: Thread) -> None:
        """Place the breakpoints at return addresses again that were removed for a vfork child in the same memory."""
        awaited, space.awaited = space.awaited, ()
        for old in awaited:
            waiting = {probe for probe in old.waiting if probe.is_active}
            present = space.breakpoints.get(old.address)
            if present is not None:
                present.waiting |= waiting
                space.register(present)
            elif waiting:
                with contextlib.suppress(OSError):
                    if PageReader(space.memory).read(old.address, 1)[0] == old.original:
                        self._connection.send(Placed(thread.pid, ((old.address, old.original),)))
                        space.place(Breakpoint(old.address, old.original, old.site, waiting=waiting))

    def remove(self, thread: Thread) -> None:
        """Forget a thread that ended, and its process if it was the last one."""
        thread.end()
        self._threads.pop(thread.tid, None)
        self._taken.pop(thread.tid, None)
        self._programs.forget_thread(thread.tid)
        if not self._threads.of_process(thread.pid):
            self.leave_space(thread)
            self._leave_scopes(thread.pid)

    def leave_space(self, thread: Thread) -> None:
        """Record that the process of ``thread`` no longer runs in its address space."""
        space = thread.space
        space.pids.discard(thread.pid)
        self._connection.send(Removed(thread.pid))
        if not space.pids:
            space.close()

    # Scopes

    def tree_of(self, pid: int) -> set[int]:
        """Return a process and its descendants, as far as they are traced."""
        tree = {thread.pid for thread in self._threads.of_process(pid)}
        found = tree
        while found:
            found = {child for child, parent in self._parents.items() if parent in found} - tree
            tree |= found
        return tree

    def rescope(self) -> set[int]:
        """Determine again which processes are in no scope; return the ids of processes that have left the last one."""
        left = set()
        for thread in self._threads.values():
            was_outside, thread.is_outside = thread.is_outside, not self._is_in_scope(thread.pid)
            if thread.is_outside and not was_outside:
                left.add(thread.pid)
        return left

    def enter_descendant(self, pid: int, parent: int) -> None:
        """Record a process that ``parent`` had started before it was traced, in the programs that follow processes."""
        self._parents[pid] = parent
        self._into_scopes(pid)

    def _is_in_scope(self, pid: int) -> bool:
        return any(pid in program.reach.pids for program in self._programs)

    def _into_scopes(self, pid: int) -> None:
        """Add a process whose parent is unknown to the scope of all programs that follow processes."""
        for program in self._programs:
            if program.reach.follow:
                program.reach.pids.add(pid)

    def _leave_scopes(self, pid: int) -> None:
        """Forget a process that has ended; its children count as children of its parent."""
        for program in self._programs:
            if pid in program.reach.pids:
                program.reach.pids.discard(pid)
                self.has_idle_programs |= not program.reach.pids
        parent = self._parents.pop(pid, None)
        for child in [child for child, other in self._parents.items() if other == pid]:
            if parent is None:
                del self._parents[child]
            else:
                self._parents[child] = parent


class SharingError(Exception):
    """Error that a process that shares the memory of a probed process cannot be seized."""

    def __init__(self, pid: int, error: OSError) -> None:
        super().__init__(pid, error)
        self.pid = pid
        self.error = error


class Seizer:
    """Seizer (PTRACE_SEIZE) of the threads of processes that run already."""

    def __init__(self, threads: ThreadTable, stopper: Stopper) -> None:
        self._threads = threads
        self._stopper = stopper

    def seize_all(self, pid: int) -> list[Thread]:
        """
        Seize and stop all threads of a process; return those that stopped for no other reason.

        If a thread is creating a thread or process, it has finished that when it stops, so no breakpoint gets into an
        untraced child. New threads may appear meanwhile, so this is repeated until there is none.
        """
        return self._seize(pid, None)

    def seize_sharing(self, pid: int) -> list[Thread]:
        """
        Seize other processes that run in the memory of a seized one (CLONE_VM), because its breakpoints affect them.

        They are in no program's scope. A child that a seized thread has just created is skipped, because its parent's
        event reports it. Raise ``SharingError`` for a process that cannot be seized.
        """
        held: list[Thread] = []
        first = self._threads.of_process(pid)[0]
        while others := [other for other in processes_in_memory_of(first.tid) if not self.is_known(other)]:
            for other in others:
                try:
                    held += self._seize(other, first.space)
                except ProcessLookupError:
                    continue
                except OSError as error:
                    raise SharingError(other, error) from error
                first.space.has_sharers = True
                for thread in self._threads.of_process(other):
                    thread.is_outside = True
        return held

    def is_known(self, pid: int) -> bool:
        """Return whether a process is traced by this tracer; its parent's event may not have arrived yet."""
        return bool(self._threads.of_process(pid)) or _is_traced_by_us(pid)

    def _seize(self, pid: int, space: AddressSpace | None) -> list[Thread]:
        held: list[Thread] = []
        while True:
            new: list[Thread] = []
            for tid in sorted(threads_of(pid) - self._threads.keys(), key=lambda tid: tid != pid):
                try:
                    ptrace_calls.seize(tid)
                except OSError as error:
                    # A thread may have ended, the first one as a zombie. All others must be traced: a breakpoint kills
                    # an untraced thread.
                    has_ended = error.errno == errno.ESRCH or thread_state(tid) in ("Z", "X")
                    if has_ended and threads_of(pid) != {tid}:
                        continue
                    if _is_traced_by_us(tid):
                        continue  # created by a thread that is traced already, whose event will arrive
                    raise
                if space is None:
                    space = AddressSpace.of_thread(tid, word_size_of(tid))
                space.pids.add(pid)
                new.append(self._threads.enter(tid, pid, space))
            if not new:
                break
            held += self._stopper.stop(new)
            for thread in new:
                with contextlib.suppress(OSError):  # it has not stopped
                    thread.debug.has_foreign = bool(ptrace_calls.get_debug_register(thread.tid, CONTROL))
            for thread in new:
                if thread.state is ThreadState.RUNNING and thread.tid not in self._stopper.deferred:
                    held += self._seize_vfork_child(thread)
        if space is None:
            raise system_error(errno.EPERM)
        return held

    def _seize_vfork_child(self, parent: Thread) -> list[Thread]:
        """Seize the child that runs in the memory of ``parent``, which cannot stop because it waits for the child."""
        held: list[Thread] = []
        for pid in children_of(parent.pid, parent.tid):
            if not process_calls.same_memory(parent.tid, pid) or pid in self._threads:
                continue
            ptrace_calls.seize(pid)
            parent.state = ThreadState.VFORKING
            parent.space.pids.add(pid)
            held += self._stopper.stop([self._threads.enter(pid, pid, parent.space)])
        return held


def _children(pid: int) -> list[int]:
    """Return the ids of the processes that the threads of a process have started; none if it has ended."""
    try:
        return sorted({child for tid in threads_of(pid) for child in children_of(pid, tid)})
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    """Return whether all threads of a process have ended; its parent may not have waited for it."""
    try:
        return thread_state(pid) in ("Z", "X") and len(threads_of(pid)) <= 1
    except OSError:
        return True


def _is_traced_by_us(tid: int) -> bool:
    return process_field(tid, "TracerPid") == str(os.getpid())


def word_size_of(tid: int) -> Literal[4, 8]:
    """Return the word size of the program that a thread runs; the thread need not be stopped."""
    with open(f"/proc/{tid}/exe", "rb", opener=without_waiting) as file:
        return 4 if file.read(5)[4:] == b"\x01" else 8  # EI_CLASS: ELFCLASS32


_PATIENCE = 30.0
"""Seconds to wait for jumps, before breakpoints are written instead."""

_NAMED_MAX = 10
"""Maximum number of processes that a note names."""


class Attachment:
    """
    Attachment of the tracer to the first process of a run: the command, or the process that the user names.

    ``detach`` detaches a process of which some threads cannot be traced.
    """

    def __init__(
        self,
        state: TracerState,
        stopper: Stopper,
        modules: ModuleBreakpoints,
        tree: ProcessTree,
        detach: Callable[[int], object],
    ) -> None:
        self._tree = tree
        self._detach = detach
        self._connection = state.connection
        self._programs = state.programs
        self._threads = state.threads
        self._stopper = stopper
        self._modules = modules
        self._seizer = Seizer(state.threads, stopper)
        self._pending: tuple[int, float] | None = None
        """Process for which jumps are awaited, and the end of the wait."""

    def begin(self, pid: int, *, launching: bool) -> None:
        """
        Seize all threads in the memory of a process. Report ``Attached`` once its jumps are written, or an error.

        The processes that it and its descendants have started before are seized, too, if a program follows processes.
        With ``launching``, the process has not called execve yet, so no breakpoints are placed in its present memory.
        """
        held: list[Thread] = []
        try:
            if not launching:
                # Do what takes time first, while the process runs.
                self._modules.learn(living_thread(pid))
            held = self._seizer.seize_all(pid)
            if not launching:
                held += self._seizer.seize_sharing(pid)
            for program in self._programs:
                program.reach.pids |= {thread.pid for thread in self._threads.values() if not thread.is_outside}
            if not launching:
                leader = next(iter(self._threads.values()))
                self._modules.begin(leader.space, leader)
        except OSError as error:
            self._connection.send(Failed(pid, reason_of(error), error.errno or 0))
            return
        except SharingError as failure:
            number = failure.error.errno or 0
            self._connection.send(Failed(failure.pid, reason_of(failure.error), number, shares_with=pid))
            return
        finally:
            self._stopper.release_all(held)
        if not launching and any(program.reach.follow for program in self._programs):
            self.begin_descendants(pid)
        self._pending = pid, time.monotonic() + _PATIENCE
        self.look_after()

    def begin_descendants(self, pid: int) -> None:
        """
        Attach to the descendants of a traced process, except processes of dprobes and what those have started.

        A process that was started meanwhile is traced already. A note names the processes of other runs of dprobes, a
        warning those that cannot be traced.
        """
        refused: list[tuple[int, OSError]] = []
        skipped: list[int] = []
        waiting = [pid]
        while waiting:
            parent = waiting.pop()
            for child in _children(parent):
                if child == self._connection.client:
                    continue
                if is_dprobes(child):
                    skipped.append(child)
                    continue
                try:
                    if not self._seizer.is_known(child):
                        self._begin_descendant(child, parent)
                except ProcessLookupError:
                    continue  # it has ended
                except OSError as error:
                    if _is_zombie(child):
                        continue
                    refused.append((child, error))
                waiting.append(child)
        if refused:
            first, problem = refused[0]
            others = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
            what = f"process {first} ({process_field(first, 'Name')}), a descendant of process {pid}, has no probes"
            self._connection.send(Warned(f"{what}: it cannot be traced: {reason_of(problem)}{others}"))
        if skipped:
            names = ", ".join(f"{each} ({process_field(each, 'Name')})" for each in skipped[:_NAMED_MAX])
            others = f" and {len(skipped) - _NAMED_MAX} more" if len(skipped) > _NAMED_MAX else ""
            text = f"descendants of process {pid} that belong to a dprobes have no probes: {names}{others}"
            self._connection.send(Warned(text, is_warning=False))

    def _begin_descendant(self, pid: int, parent: int) -> None:
        """Seize a process, and place breakpoints in it; raise OSError, with nothing changed, if that fails."""
        self._modules.learn(living_thread(pid))
        try:
            held = self._seizer.seize_all(pid)
            held += self._seizer.seize_sharing(pid)
        except (OSError, SharingError) as failure:
            for thread in self._threads.of_process(pid)[:1]:
                for user in list(thread.space.pids):
                    self._detach(user)
            raise failure.error if isinstance(failure, SharingError) else failure from None
        try:
            leader = self._threads.of_process(pid)[0]
            self._tree.enter_descendant(pid, parent)
            for child in leader.space.pids - {pid}:
                # A child of vfork(2), unlike other processes in this memory, needs probes after its exec.
                if not any(thread.is_outside for thread in self._threads.of_process(child)):
                    self._tree.enter_descendant(child, pid)
            self._modules.begin(leader.space, leader)
        finally:
            self._stopper.release_all(held)

    def look_after(self) -> float | None:
        """Report a process as attached once its jumps are written; return the seconds until the next check or None."""
        if self._pending is None:
            return None
        pid, until = self._pending
        remaining = until - time.monotonic()
        if remaining > 0 and any(space.unwritten for space in self._threads.spaces()):
            return remaining
        for space in self._threads.spaces():
            threads = self._threads.in_space(space)
            if threads and not any(thread.awaits_jumps for thread in threads):
                self._modules.write_late(space, threads[0])
        self._pending = None
        self._connection.send(Attached(pid))
        return None
