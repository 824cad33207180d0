"""
Stub that sessions share: its connection, its target, and the loop that drives the target.

A target stops for all programs together. One thread at a time waits for the stop and handles it: the first one that
polls its session::

    let it run ─► stop ─► which is it?
        ▲                    │
        └── step over it ◄── handlers, or new files

The program of the first member determines the kind of target.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

from dprobes.engines.gdb.remote_protocol import (
    SIGBUS,
    SIGFPE,
    SIGILL,
    SIGINT,
    SIGSEGV,
    SIGTRAP,
    Exited,
    NoThreads,
    Stopped,
    ThreadId,
)
from dprobes.engines.gdb.stub_transports import ConnectionLostError
from dprobes.engines.hits.probe_hits import CORE_DUMP, is_last, skipping
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.engines.gdb.remote_protocol import StopReply
    from dprobes.engines.gdb.stub_connection import StubConnection
    from dprobes.engines.gdb.stub_member import Inferior, StubMember
    from dprobes.engines.gdb.stub_program import StubProgram
    from dprobes.engines.gdb.stub_registers import Registers
    from dprobes.engines.gdb.stub_requests import Stub
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.gdb.stub_transports import DebuggerRelay
    from dprobes.engines.hits.probe_hits import Handled

__all__ = ["SharedStub", "TargetDriver"]

_LOOK = 0.1
"""Maximum number of seconds to wait for a stop, or for the thread that drives the target."""
_STILL_PATIENCE = 20.0
"""Maximum number of seconds to wait for the target to stop before a program is inserted or removed."""
_NEXT = 0.001
_PATIENCE = 2.0
"""Seconds after which a warning reports that the target does not stop."""
_UNDER_WAY = 0.5
"""Seconds within which an interrupt reaches a running target."""
_CHANGES = ("fork", "vfork", "vforkdone", "exec")
"""Reasons of stops that report a change of the process: fork or exec."""
_FAULTS = frozenset({SIGILL, SIGFPE, SIGBUS, SIGSEGV})


class SharedStub:
    """The stub of a ``connection``, shared by ``members``: the programs whose probepoints are in the target."""

    def __init__(self, connection: StubConnection) -> None:
        self.connection = connection
        connection.warn = self.warn
        self.members: list[StubMember] = []
        self.driver = TargetDriver(self)
        self.lock = threading.Lock()
        """Lock that is held while handlers run."""
        self.is_over = False
        """True if all sessions end now."""
        self.status: int | None = None
        """Wait status of the target, None if the stub has not reported one."""
        self.is_left = False
        """True if the target was left to a debugger, at any probepoint."""
        self.relay: DebuggerRelay | None = None
        """Relay through which a debugger takes over the target, None if no handler has requested it."""
        self._has_begun = False
        self._driving = threading.RLock()
        self._counting = threading.Lock()
        """Lock that is held while ``_holds`` changes."""
        self._holds = 0
        """Number of callers that need the target to be stopped; only they drive it."""
        self._delayed: tuple[int, ThreadId | None] | None = None
        """Arguments for resuming the target once ``_holds`` is 0 again: signal and thread."""

    @property
    def target(self) -> StubTarget:
        """The target behind the stub."""
        target = self.connection.target
        assert target is not None, "the driver has set it"
        return target

    @property
    def is_open(self) -> bool:
        """True if another program can use the connection as well."""
        return bool(self.members) and not self.is_over

    @property
    def needed(self) -> set[int]:
        """Addresses at which breakpoints are needed."""
        first, *others = self.members
        return first.needed.union(*(each.needed for each in others))

    @property
    def is_wanted(self) -> bool:
        """True if a program or a caller waits until the target is stopped."""
        return bool(self._holds) or any(each.wants_stop for each in self.members)

    @property
    def is_stopping(self) -> bool:
        """True if the end of all members has been requested."""
        return all(each.is_stopping for each in self.members)

    def patience(self) -> float:
        """Return the seconds, at most 0.1, to wait for a stop before a member may need the target to stop."""
        if self.is_wanted:
            return _LOOK
        due = min((each.due for each in self.members), default=math.inf)
        return max(0.0, min(_LOOK, due - time.monotonic()))

    def warn(self, message: str, hint: str | None = None) -> None:
        """Add a warning to the events of the first member."""
        if self.members:
            self.members[0].events.warn(message, hint)

    # Joining and leaving

    def join(self, member: StubMember) -> None:
        """Insert the probepoints of another program, while the target is stopped."""
        self.members.append(member)
        try:
            self.driver.begin(member)
        except BaseException:
            self.withdraw(member)
            raise

    def withdraw(self, member: StubMember) -> None:
        """Remove the probepoints of one program, while the target is stopped."""
        member.withdraw()
        self.members.remove(member)
        self.driver.remove_unneeded()

    def begin(self) -> None:
        """Resume the target from its first stop, if it has not been resumed yet."""
        if self._has_begun:
            return
        with self._driving:
            if not self._has_begun:
                self._has_begun = True
                self.resume()

    def resume(self, signal: int = 0, thread: ThreadId | None = None) -> None:
        """
        Resume the target with a signal, 0 for none, that ``thread`` receives.

        If callers need it to be stopped (``standing_still``), it is resumed when the last one has finished.
        """
        if self._holds:
            self._delayed = signal, thread
        else:
            self.target.resume(signal, thread)

    def turn(self) -> bool:
        """Wait briefly for the target to stop and handle the stop; return whether anything may have happened."""
        while self._holds:
            time.sleep(_NEXT)  # the caller that holds the target drives it
        if not self._driving.acquire(timeout=_LOOK):
            return False
        try:
            return self._turn()
        finally:
            self._driving.release()

    def _turn(self) -> bool:
        if self.is_over or not self.members:
            return True
        try:
            return self.driver.turn()
        except BaseException:
            self.is_over = True
            raise

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Keep the target stopped between two hits; raise ``EngineError`` if it does not stop or has ended."""
        with self._counting:
            self._holds += 1
        try:
            with self._driving:
                until = time.monotonic() + _STILL_PATIENCE
                while self.target.is_running and not self.is_over and time.monotonic() < until:
                    self._turn()
                if self.is_over or self.target.is_over:
                    raise EngineError(f"what is behind the stub {self.target.stub.name} has ended")
                if self.target.is_running:
                    raise EngineError(
                        f"the target behind the stub {self.target.stub.name} does not stop",
                        hint="QEMU's emulation of a process stops at probepoints only",
                    )
                self.driver.forget_request()
                yield
        finally:
            with self._counting:
                self._holds -= 1
            with self._driving:
                if not self._holds and self._delayed is not None and not self.is_over:
                    delayed, self._delayed = self._delayed, None
                    self.target.resume(*delayed)


class TargetDriver:
    """Driver of the target of a ``shared`` stub: interrupts it, handles its stops for all members, resumes it."""

    _inferior: Inferior

    def __init__(self, shared: SharedStub) -> None:
        self._shared = shared
        self._asked_at: float | None = None
        """Monotonic time in seconds of the last interrupt, None if no stop is needed."""
        self._is_overtaken = False
        """True if the target has stopped for another reason since the interrupt."""
        self._has_complained = False

    def set_up(self, stub: Stub) -> None:
        """Find the target behind the stub and insert the probepoints of all members into it."""
        shared, members = self._shared, self._shared.members
        self._inferior = members[0].find(stub, shared.connection.tell, shared.warn)
        shared.connection.target = self._inferior.target
        for each in members:
            each.take_over(self._inferior)
        for each in members:
            self._begin(each)

    def begin(self, member: StubMember) -> None:
        """Insert the probepoints of another member, while the target is stopped."""
        member.take_over(self._inferior)
        self._begin(member)

    def _begin(self, member: StubMember) -> None:
        member.begin()
        self._settle()

    def _settle(self) -> None:
        """Make the inserted breakpoints match those that members need, after one of them has placed its own."""
        self.remove_unneeded()
        target = self._inferior.target
        for address in sorted(self._shared.needed - target.inserted):  # members' breakpoints went with a module
            target.insert(address)

    def remove_unneeded(self) -> None:
        """Remove the breakpoints that no member needs any more."""
        shared, target = self._shared, self._inferior.target
        for address in sorted(target.inserted - shared.needed):
            target.remove(address)
        self._inferior.stepper.sees_accesses = any(each.watches for each in shared.members)

    # Stops

    def turn(self) -> bool:
        """Wait briefly for the target to stop and handle the stop; return whether it stopped."""
        shared = self._shared
        try:
            self._ask_to_stop()
            reply = self._inferior.target.await_stop(shared.patience())
            is_over = isinstance(reply, Exited | NoThreads) or (reply is not None and self._on_stop(reply))
        except ConnectionLostError as error:
            reply, is_over = None, not self._has_returned(error)
        if reply is not None:
            self._is_overtaken = True
            if shared.members[0].is_machine and any(each.due < math.inf for each in shared.members):
                self.forget_request()  # QEMU drops an interrupt that arrives just after the machine stopped
        if isinstance(reply, Exited):
            shared.status = reply.signal if reply.signal is not None else (reply.status or 0) << 8
        shared.is_over |= is_over
        return reply is not None

    def _has_returned(self, error: ConnectionLostError) -> bool:
        """Connect again to a stub whose connection was lost. Return True if that succeeded and the run continues."""
        shared = self._shared
        stub = None if shared.is_stopping else shared.connection.reopen()
        if stub is None:
            self._inferior.target.is_over = True
            for each in shared.members:
                each.events.warn(f"{error.message}: the run ends")
            return False
        for each in shared.members:
            each.events.warn(f"{error.message}, and was reached again: hits meanwhile are missed")
            each.forget_calls()
        self.set_up(stub)
        shared.resume()
        return True

    def _ask_to_stop(self) -> None:
        """Interrupt the target if it must stop; repeat the interrupt only if the first one was lost."""
        now = time.monotonic()
        if not self._shared.is_wanted:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at, self._is_overtaken = now, False
            self._inferior.target.interrupt()
        elif self._is_overtaken and now > self._asked_at + _UNDER_WAY:
            # The interrupt was sent just after the target stopped and is lost: otherwise it would have arrived by now.
            self._is_overtaken = False
            self._inferior.target.interrupt()
        elif now > self._asked_at + _PATIENCE and not self._has_complained:
            self._has_complained = True
            self._shared.warn("the target does not stop when it is interrupted: waiting until it reaches a probepoint")

    def forget_request(self) -> None:
        """Forget the pending interrupt, because the target has stopped. A further stop needs another request."""
        self._asked_at = None

    def _on_stop(self, reply: StopReply) -> bool:
        """Handle a stop and resume the target; return whether the run is over instead."""
        assert isinstance(reply, Stopped)
        target, stepper = self._inferior.target, self._inferior.stepper
        with self._shared.lock:
            if reply.reason in _CHANGES:
                self._on_change(reply)
                self._shared.resume()
                return False
            thread = reply.thread or target.stub.current_thread()
            registers = target.registers(thread)
            if reply.address is not None:
                self._on_access(reply, thread, registers)
                return self._after_step(reply, thread)
            at = stepper.breakpoint_of(reply, registers, self._shared.needed)
            is_ours = target.has_answered(reply)
            if at is None:
                return self._on_signal(reply, thread, is_ours=is_ours)
            return self._on_hit(at, thread, registers)

    def _on_signal(self, reply: Stopped, thread: ThreadId | None, *, is_ours: bool) -> bool:
        """
        Do the work that waits for a stop, and resume the target; if the run is over instead, return True.

        The target resumes with the signal that stopped it, unless this tool caused the signal.
        """
        self._take_samples()
        if self._shared.is_left:
            return True
        self._carry_out_wishes()
        if self._may_end():
            return True
        self._shared.resume(0 if is_ours or reply.signal == SIGTRAP else reply.signal, thread)
        return False

    def _on_hit(self, at: int, thread: ThreadId | None, registers: Registers) -> bool:
        """
        Run the handlers of the breakpoint at ``at`` and resume the target; return True if the run is over instead.

        ``registers`` are the registers of ``thread``, which has hit it. ``thread`` is None if the stub has no threads.
        """
        if self._goes_on_before(at, thread, registers):
            return False
        shared = self._shared
        for each in shared.members:
            each.select(thread, registers)
        for each in shared.members:
            if at in each.own_places:
                each.place_probes()
                self._settle()
        for each in shared.members:
            self._see_returns(each, at, thread, registers)
            if shared.is_left:
                return True
            each.see_entry(at, thread, registers)
        owners = [owner for each in shared.members for owner in each.placed.at.get(at, ())]
        outcome = self._inferior.runner.run(owners) if owners else ()
        leader = shared.members[0]
        if self._hand_over(leader, outcome, at, registers):
            return True  # the instruction has not been executed
        uncounted = self._leave_core(leader, outcome, at, registers)
        return self._leave_breakpoint(at, thread, registers, outcome, uncounted)

    def _leave_breakpoint(
        self,
        at: int,
        thread: ThreadId | None,
        registers: Registers,
        outcome: Sequence[Handled[StubProgram]],
        uncounted: Sequence[Handled[StubProgram]],
    ) -> bool:
        """
        Execute the instruction under the breakpoint at ``at``, or leave its function, and resume the target.

        ``outcome`` are the results of the handlers, ``uncounted`` those whose hits are counted after the instruction.
        Return True if the run is over instead.
        """
        target, stepper = self._inferior.target, self._inferior.stepper
        if (skip := skipping(outcome)) is not None and skip.outcome is not None:
            reply: StopReply = stepper.leave_function(skip.outcome.value, thread, registers)
        elif stepper.carries_out(at, self._raw(at), registers):
            if not (self._shared.is_wanted or is_last(outcome)):
                target.resume_with(thread, registers, stepper.processor.pc)
                self._count(uncounted)
                return False
            target.write_back(thread, registers)
            reply = Stopped(SIGTRAP, thread, {})
        else:
            reply = stepper.step_over(at, self._raw(at), thread, registers, self._shared.needed)
        self._count(uncounted, has_faulted=isinstance(reply, Stopped) and reply.signal in _FAULTS)
        if isinstance(reply, Stopped) and reply.address is not None:
            self._on_access(reply, thread, target.registers(thread))
        self._carry_out_wishes()
        return self._after_step(reply, thread)

    def _raw(self, at: int) -> bytes | None:
        """Return the bytes of the instruction under the breakpoint ``at``; None if no member has a probepoint there."""
        return next((raw for each in self._shared.members if (raw := each.placed.raw.get(at)) is not None), None)

    def _goes_on_before(self, at: int, thread: ThreadId | None, registers: Registers) -> bool:
        """
        If handlers need only the registers, resume the target before they run, and return True.

        QEMU translates the code again after each stop. So it does this while the handlers run.
        """
        (member, *others), stepper = self._shared.members, self._inferior.stepper
        is_ours = member.awaits_return_at(at) or at in member.own_places
        if not stepper.runs_ahead or at not in member.placed.detached or is_ours or self._shared.is_wanted or others:
            return False
        before = registers.copy()
        if not stepper.carries_out(at, self._raw(at), registers):
            return False
        self._inferior.target.resume_with(thread, registers, stepper.processor.pc)
        member.select(thread, before)
        self._count(self._inferior.runner.run(member.placed.at[at]))
        return True

    def _on_change(self, reply: Stopped) -> None:
        """Handle a stop for a fork, whose child is detached, or an exec, after which probepoints are inserted anew."""
        target, members = self._inferior.target, self._shared.members
        match reply.reason:
            case "fork" | "vfork":
                target.leave_fork(ThreadId.parse(reply.data), shares_memory=reply.reason == "vfork")
            case "vforkdone":
                target.end_sharing()
            case "exec":
                target.begin_anew()
                for each in members:
                    each.leave_places()
                for each in members:
                    self._begin(each)

    def _see_returns(self, member: StubMember, at: int, thread: ThreadId | None, registers: Registers) -> None:
        """Run a program's handlers for the calls from which ``thread`` returns to ``at``, and count the hits."""
        context = self._inferior.context
        for call in member.returned_calls(at, thread, registers):
            context.entry = call.entry
            handled = self._inferior.runner.run([(call.probe, member.placed.points[call.probe])])
            context.entry = None
            if self._hand_over(member, handled, at, registers):
                return
            self._count(self._leave_core(member, handled, at, registers))

    def _on_access(self, reply: Stopped, thread: ThreadId | None, registers: Registers) -> None:
        """Run the handlers of the watchpoints on the accessed memory."""
        assert reply.address is not None
        members, target = self._shared.members, self._inferior.target
        for each in members:
            each.select(thread, registers)
        owners = [owner for each in members for owner in each.concerned(reply.address, reply.reason)]
        outcome = self._inferior.runner.run(owners)
        pc = registers[self._inferior.stepper.processor.pc]
        if not self._hand_over(members[0], outcome, pc, registers):
            uncounted = self._leave_core(members[0], outcome, pc, registers)
            target.write_back(thread, registers)
            self._count(uncounted)

    def _take_samples(self) -> None:
        """Run the handlers of samplers that are due."""
        pc = self._inferior.stepper.processor.pc
        for each in self._shared.members:
            for thread, registers, owners in each.samples():
                outcome = self._inferior.runner.run(owners)
                if self._hand_over(each, outcome, registers[pc], registers):
                    return
                self._inferior.target.write_back(thread, registers)
                self._count(outcome)

    def _hand_over(
        self, member: StubMember, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers
    ) -> bool:
        """Leave the target stopped for a debugger if handlers request that; return whether that ends the run."""
        if not member.is_handed_over(handled):
            return False
        where = next((each.probe.program.place_of(each.probe) for each in handled), "")
        self._count(handled)
        self._inferior.target.write_back(self._inferior.context.thread, registers)
        self._shared.relay = member.hand_over(at, where, registers)
        self._shared.is_left = True
        return True

    def _leave_core(
        self, member: StubMember, handled: Sequence[Handled[StubProgram]], at: int, registers: Registers
    ) -> Sequence[Handled[StubProgram]]:
        """Write the core of a process if a handler requests it; return the hits that are still to be counted."""
        if member.is_machine or not any(each.outcome and each.outcome.exit_code == CORE_DUMP for each in handled):
            return handled
        self._count(handled)
        self._inferior.target.write_back(self._inferior.context.thread, registers)
        member.write_core(at, registers)
        return ()

    def _count(self, handled: Sequence[Handled[StubProgram]], *, has_faulted: bool = False) -> None:
        """
        Count the hits of handlers, and remove the breakpoints of probepoints that become inactive.

        With ``has_faulted`` the probed instruction faulted, so most hits do not count.
        """
        members = self._shared.members
        if len(members) == 1:
            has_gone = members[0].count(handled, has_faulted=has_faulted)
        else:
            has_gone = False
            for member in members:
                own = [each for each in handled if each.probe.program is member.program]
                has_gone |= member.count(own, has_faulted=has_faulted)
        if has_gone:
            self.remove_unneeded()

    def _carry_out_wishes(self) -> None:
        """Remove the probepoints whose removal was requested, and the programs that end while others stay."""
        members = self._shared.members
        if any([each.carry_out_removals() for each in members]):  # noqa: C419 - those of all members
            self.remove_unneeded()
        for each in [each for each in members if each.is_stopping]:
            if len(members) > 1:
                self._shared.withdraw(each)

    def _may_end(self) -> bool:
        """
        Return whether the run can end here: no interrupt of the tool is still on its way to the target.

        An interrupt that is sent just after the target stopped is lost, or raises its signal as soon as the target
        resumes.
        """
        if not self._shared.is_stopping:
            return False
        target, asked = self._inferior.target, self._asked_at
        is_under_way = target.interrupts > 0 and target.stub.raises_signals
        return not is_under_way or asked is None or time.monotonic() > asked + _UNDER_WAY

    def _after_step(self, reply: StopReply, thread: ThreadId | None) -> bool:
        """
        Resume the target after the instruction of a hit was executed, with the stop ``reply``.

        A process receives the signal of the stop, unless the step caused it. Return True if the run is over instead.
        """
        if not isinstance(reply, Stopped) or self._shared.is_left or self._may_end():
            return True
        is_ours = self._shared.members[0].is_machine or reply.signal in (SIGTRAP, SIGINT)
        self._shared.resume(0 if is_ours else reply.signal, reply.thread or thread)
        return False
