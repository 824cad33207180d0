"""
The absence of jumps while programs come and go: breakpoints are what changes, and jumps come back where they can.

All threads of the address space stand still meanwhile. So none of them meets a breakpoint, at which it would end if we
were killed before we had heard of it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.placement import end_joining

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.native.handlerends import HandlerEnds
    from dprobes.engines.ptrace.tracer.native.jumpwaits import JumpWaits
    from dprobes.engines.ptrace.tracer.native.patcher import Patcher
    from dprobes.engines.ptrace.tracer.state import Thread, TracerState
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["JumpAbsence"]


class JumpAbsence:
    """The times without jumps."""

    def __init__(
        self, state: TracerState, stopper: Stopper, patcher: Patcher, handler_ends: HandlerEnds, jump_waits: JumpWaits
    ) -> None:
        self._threads = state.threads
        self._stopper = stopper
        self._patcher = patcher
        self._handler_ends = handler_ends
        self._jump_waits = jump_waits
        self._still: set[AddressSpace] = set()

    def is_still(self, space: AddressSpace) -> bool:
        """Return whether all threads of a space stand still, and can wait for jumps then."""
        return space in self._still

    def end_joining(self, space: AddressSpace) -> None:
        """Let breakpoints take the place of jumps that lack probepoints for which no others have come."""
        self._patcher.end_joining(space)

    @contextlib.contextmanager
    def in_space(self, space: AddressSpace, sites: Collection[int] | None = None) -> Iterator[None]:
        """Have no jumps in a space, at all or at some ``sites`` and what they belong to."""
        patches = space.patches
        may_change = patches.known_at(sites) or patches.bound_to(patches.by_site if sites is None else sites)
        if not space.is_open or not may_change:
            yield
            return
        held = self._stopper.stop(self._threads.in_space(space))
        try:
            taken = self._patcher.restore(space, sites)
            yield
            self._patcher.bring_back(space, taken, sites)
        finally:
            self._release(held)

    @contextlib.contextmanager
    def everywhere(self, go_on: Callable[[], int] | None = None) -> Iterator[None]:
        """
        Have no jumps in any space; with ``go_on``, which handles stops, no handler is under way either.

        Then threads also wait for the jumps of breakpoints that are ``unwritten`` at the end.
        """
        spaces = [space for space in self._threads.spaces() if space.is_open and space.patches.memories]
        held, taken = self._hold(spaces, go_on)
        self._still = set() if go_on is None else set(spaces)
        try:
            yield
            for space, jumps in taken:
                self._patcher.bring_back(space, jumps)
                end_joining(space, [site for site in space.joining if site not in space.patches.by_site])
            for space in self._threads.spaces() if go_on is not None else ():
                self._jump_waits.hold(space, held)
        finally:
            self._still = set()
            self._release(thread for thread in held if not self._jump_waits.holds(thread))

    def _hold(
        self, spaces: list[AddressSpace], go_on: Callable[[], int] | None
    ) -> tuple[list[Thread], list[tuple[AddressSpace, list[SitePatch]]]]:
        """Hold all threads of spaces, and take the jumps out; return both."""
        held = None if go_on is None else self._handler_ends.hold_outside(spaces, go_on)
        if held is None and go_on is None:
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        taken = [(space, self._patcher.restore(space)) for space in spaces]
        if held is None and go_on is not None:
            # A thread never was outside when it was looked at: without jumps it does not come back.
            self._handler_ends.let_end(go_on)
            held = self._stopper.stop([thread for space in spaces for thread in self._threads.in_space(space)])
        return held or [], taken

    def _release(self, threads: Iterable[Thread]) -> None:
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                self._stopper.release(thread)
