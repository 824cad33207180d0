"""
Returns of functions behind a stub: a breakpoint at the address to which a call returns, for as long as that is awaited.

At the entry of a function its return address lies on top of the stack, or in a register. The call has returned when
the same thread arrives there with the stack as high as the return leaves it; so tail calls and recursion are told
apart, and nothing of the target's is changed. A call that is left by ``longjmp`` or an exception is forgotten when its
frame is entered again, or when there are too many.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dprobes.engines.gdb.program import StubProbe
    from dprobes.engines.gdb.stopreplies import ThreadId

__all__ = ["AwaitedReturns", "CallEntry", "PendingCall"]

_CALLS_MAX = 1 << 14
"""How many calls are kept; of more the oldest ones are forgotten. The ptrace engine keeps as many."""


class CallEntry(NamedTuple):
    """Hold the beginning of a call: the time, and registers by their index."""

    time: int
    registers: Mapping[int, int]


class PendingCall(NamedTuple):
    """A call of a probed function: where it returns, and the stack pointer then, if it drops no arguments."""

    thread: ThreadId | None
    address: int
    top: int
    probe: StubProbe
    entry: CallEntry


class AwaitedReturns:
    """The calls that have not returned, of functions that may take ``dropped`` bytes of arguments from the stack."""

    def __init__(self, dropped: int) -> None:
        self._slack = dropped
        self._calls: dict[tuple[ThreadId | None, StubProbe, int], PendingCall] = {}
        self._addresses: Counter[int] = Counter()

    @property
    def addresses(self) -> set[int]:
        """Where breakpoints have to be."""
        return set(self._addresses)

    def enter(self, call: PendingCall) -> None:
        """Await the return of a call."""
        key = call.thread, call.probe, call.top
        self._forget(key)
        if len(self._calls) >= _CALLS_MAX:
            self._forget(next(iter(self._calls)))
        self._calls[key] = call
        self._addresses[call.address] += 1

    def arrive(self, thread: ThreadId | None, address: int, top: int) -> list[PendingCall]:
        """Return the calls that have returned to an address, the inner ones first; they are awaited no longer."""
        found = [
            (key, call)
            for key, call in self._calls.items()
            if key[0] == thread and call.address == address and 0 <= top - call.top <= self._slack
        ]
        for key, _ in found:
            self._forget(key)
        return [call for _, call in reversed(found)]

    def drop(self, probe: StubProbe) -> None:
        """Forget the calls of a probepoint."""
        for key in [key for key in self._calls if key[1] is probe]:
            self._forget(key)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._addresses.clear()

    def _forget(self, key: tuple[ThreadId | None, StubProbe, int]) -> None:
        call = self._calls.pop(key, None)
        if call is not None:
            self._addresses[call.address] -= 1
            if not self._addresses[call.address]:
                del self._addresses[call.address]
