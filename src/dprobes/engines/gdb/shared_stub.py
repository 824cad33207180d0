"""
What the sessions at one stub share: its connection, what stands behind it, and the turns that they take in driving it.

A target stops for all of them at once, so one thread at a time waits for that and sees to it: whichever asks for its
session's events first. The first member leads: what concerns the target as a whole is done by its methods.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.remote_protocol import ThreadId
    from dprobes.engines.gdb.stub_connection import StubConnection
    from dprobes.engines.gdb.stub_program import StubProbe, StubProgram
    from dprobes.engines.gdb.stub_target import StubTarget
    from dprobes.engines.gdb.stub_transports import DebuggerRelay

__all__ = ["Member", "SharedStub"]

_LOOK = 0.1
"""Seconds after which a session looks whether others have something for it."""
_PATIENCE = 20.0
"""Seconds in which a target has to stop so that a program can be inserted or removed."""
_NEXT = 0.001


class Member(Protocol):
    """A session whose probepoints are in the target."""

    @property
    def program(self) -> StubProgram:
        """Its program."""

    @property
    def own_needed(self) -> set[int]:
        """Where breakpoints have to be for it."""

    @property
    def wants_stop(self) -> bool:
        """Whether the target has to stop for what was asked of it."""

    @property
    def due(self) -> float:
        """When it will want the target to stop by itself, by the clock that never goes back."""

    def turn(self) -> bool:
        """Wait for the target to stop, for a short time, and see to that; return whether it did."""

    def forget_request(self) -> None:
        """Take notice that the target has stopped: whoever wants it to stop again has to ask again."""

    def warn(self, message: str, hint: str | None = None) -> None:
        """Tell its user something, and what to do about it."""


MemberT = TypeVar("MemberT", bound=Member)


class SharedStub(Generic[MemberT]):
    """The stub behind a ``connection``; ``members`` are the sessions whose probepoints are in the target."""

    def __init__(self, connection: StubConnection) -> None:
        self.connection = connection
        connection.warn = self.warn
        self.members: list[MemberT] = []
        self.lock = threading.Lock()
        """Held while handlers run."""
        self.is_over = False
        """Whether all sessions come to their end now."""
        self.status: int | None = None
        """The wait status of what was behind the stub, if it has told one."""
        self.is_left = False
        """Whether the target was left to a debugger, at whatever probepoint."""
        self.relay: DebuggerRelay | None = None
        """Where a debugger takes over, if a handler wants that."""
        self._has_begun = False
        self._driving = threading.RLock()
        self._counting = threading.Lock()
        """Held while ``_holds`` changes."""
        self._holds = 0
        """How many want the target to stand still, by whom nobody else drives it."""
        self._delayed: tuple[int, ThreadId | None] | None = None
        """How the target is to go on when nobody wants it to stand still any more."""

    @property
    def target(self) -> StubTarget:
        """What stands behind the stub."""
        target = self.connection.target
        assert target is not None, "a member has set it"
        return target

    @property
    def is_open(self) -> bool:
        """Whether others can join."""
        return bool(self.members) and not self.is_over

    @property
    def needed(self) -> set[int]:
        """Where breakpoints have to be."""
        first, *others = self.members
        return first.own_needed.union(*(each.own_needed for each in others))

    @property
    def is_wanted(self) -> bool:
        """Whether the target has to stop."""
        return bool(self._holds) or any(each.wants_stop for each in self.members)

    def patience(self) -> float:
        """Return how long a stop can be awaited before a member may want one; 0.1 s at most."""
        if self.is_wanted:
            return _LOOK
        due = min((each.due for each in self.members), default=math.inf)
        return max(0.0, min(_LOOK, due - time.monotonic()))

    def owner(self, probe: StubProbe) -> MemberT:
        """Return the member whose probepoint that is."""
        return next(each for each in self.members if each.program is probe.program)

    def warn(self, message: str, hint: str | None = None) -> None:
        """Tell the user of the first member something."""
        if self.members:
            self.members[0].warn(message, hint)

    # Driving

    def begin(self) -> None:
        """Let the target go on from where the first members have begun, unless it was let go on already."""
        if self._has_begun:
            return
        with self._driving:
            if not self._has_begun:
                self._has_begun = True
                self.resume()

    def resume(self, signal: int = 0, thread: ThreadId | None = None) -> None:
        """Let the target go on, now or when nobody wants it to stand still any more."""
        if self._holds:
            self._delayed = signal, thread
        else:
            self.target.resume(signal, thread)

    def turn(self) -> bool:
        """Wait for the target to stop, for a short time, and see to that; return whether anything may have happened."""
        while self._holds:
            time.sleep(_NEXT)  # who wants the target to stand still drives it
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
            return self.members[0].turn()
        except BaseException:
            self.is_over = True
            raise

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Have the target stand still, between two hits; raise ``EngineError`` if it does not stop, or has ended."""
        with self._counting:
            self._holds += 1
        try:
            with self._driving:
                until = time.monotonic() + _PATIENCE
                while self.target.is_running and not self.is_over and time.monotonic() < until:
                    self._turn()
                if self.is_over or self.target.is_over:
                    raise EngineError(f"what is behind the stub {self.target.stub.name} has come to its end")
                if self.target.is_running:
                    raise EngineError(
                        f"the target behind the stub {self.target.stub.name} does not stop",
                        hint="QEMU's emulation of a process stops at probepoints only",
                    )
                if self.members:
                    self.members[0].forget_request()
                yield
        finally:
            with self._counting:
                self._holds -= 1
            with self._driving:
                if not self._holds and self._delayed is not None and not self.is_over:
                    delayed, self._delayed = self._delayed, None
                    self.target.resume(*delayed)
