"""
What the tracer has in common with handlers in the probed processes, for an engine that has them.

The client's side of it is ``client.nativeside``. The first message about a program brings a plan, by which the tracer
finds it in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from dprobes.engines.hits.hitcontext import SharedHits
    from dprobes.engines.hits.probelimits import ProbeLimits
    from dprobes.engines.ptrace.sharedcounters import Variables
    from dprobes.keyed.store import KeyedStore

__all__ = ["NativeState", "NativeStatePlan"]


class NativeState(Protocol):
    """The variables, tables and numbers of hits of one program."""

    @property
    def variables(self) -> Variables:
        """The local variables, and those of each CPU."""

    @property
    def global_variables(self) -> MutableSequence[int]:
        """The global variables, where no other program has them, too."""

    @property
    def tables(self) -> Sequence[KeyedStore | None]:
        """The keyed tables; None for one that the tracer has for itself."""

    def thread_variables(self, tid: int) -> MutableSequence[int] | None:
        """Return the variables of a thread, which has some from now on; None if there is no room for them."""

    def forget_thread(self, tid: int) -> None:
        """Take away the variables of a thread that is no more."""

    def hits_of(self, probe: int, limits: ProbeLimits) -> SharedHits | None:
        """Return what is known everywhere of the hits of a probepoint; None if no handler in a process has any."""


class NativeStatePlan(Protocol):
    """What is known of it before it is mapped; ``descriptor`` is a file of the client's."""

    @property
    def descriptor(self) -> int:
        """The file."""

    def opened(self, descriptor: int) -> NativeState:
        """Return the state; ``descriptor`` is the file in this process, which belongs to the state from now on."""
