"""
What the client asks of handlers that run in the probed process, for an engine that has such.

A breakpoint is placed first, though not always written (``tracer.placement``). When it is, the process maps memory for
handlers, and jumps take the place of those breakpoints for which there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dprobes.engines.interface import Counts, Notice
    from dprobes.engines.linux.threadidentity import ThreadIdentity
    from dprobes.engines.ptrace.client.answers import Answers
    from dprobes.engines.ptrace.nativestate import NativeState, NativeStatePlan
    from dprobes.engines.ptrace.reports import MemoryReleased, MemoryShared, SitesPatched
    from dprobes.engines.ptrace.requests import PatchSites, ReleaseMemory, ShareMemory
    from dprobes.resolve.probestate import ProbeState

    Batch = Sequence[tuple[int, bytes]]
    Request = ShareMemory | PatchSites

__all__ = ["NativeSide"]


class NativeSide(Protocol):
    """The handlers of one program; all but ``take`` and ``counts`` are called in the order in which things happen."""

    @property
    def state(self) -> NativeState | None:
        """What they have in common with handlers that the tracer interprets; None if there are no such handlers."""

    @property
    def plan(self) -> NativeStatePlan | None:
        """The same, to be sent to the tracer."""

    def join(self, rank: int, neighbours: Callable[[], Iterable[object]]) -> None:
        """Take notice of the place in the order of programs, and of who gives those beside this one."""

    def native_probes(self, probes: Iterable[int], answers: Answers) -> frozenset[int]:
        """Return those of some probepoints for which jumps will be asked for when they are placed."""

    def placed(
        self, program: int, pid: int, probes: Sequence[int], answers: Answers
    ) -> ShareMemory | PatchSites | None:
        """Take notice of breakpoints in a process; return what to ask of the tracer."""

    def shared(self, message: MemoryShared, answers: Answers) -> PatchSites | None:
        """Take notice of memory that a process has mapped; return what to ask next."""

    def patched(self, program: int, message: SitesPatched) -> ShareMemory | None:
        """Take notice of jumps; return what to ask of the tracer if it was asked in vain."""

    def copied(self, pid: int, parent: int) -> None:
        """Take notice that a process has a copy of its parent's memory, jumps and all."""

    def left(self, pid: int) -> None:
        """Take notice that a process has ended, or executes another program: nothing of it is needed any more."""

    @property
    def is_due(self) -> bool:
        """Whether something is to be asked of the tracer because it is time to."""

    def due(self, answers: Answers) -> ShareMemory | PatchSites | None:
        """Return what is to be asked of the tracer because it is time to."""

    def told(self, identity: ThreadIdentity) -> None:
        """Take notice of what a thread is called, and whose it is."""

    @property
    def is_busy(self) -> bool:
        """Whether so much has come that there is more already."""

    def to_be_released(self, program: int) -> ReleaseMemory | None:
        """Return what to ask of the tracer if handlers seem to have left something that others wait for."""

    def released(self, message: MemoryReleased) -> None:
        """Take notice of the answer."""

    def take(self, *, is_over: bool) -> tuple[list[Batch], list[tuple[int, ProbeState]]]:
        """
        Return the records that have come, each with its probepoint, and the probepoints that have had their last hit.

        With ``is_over`` nothing comes any more.
        """

    def add_counts(self, counts: Sequence[Counts]) -> None:
        """Add what happened without the tracer."""

    def notices(self) -> Iterator[Notice]:
        """Iterate over what a user should hear at the end."""

    def disable(self) -> None:
        """Let no handler run any more, as the tracer is gone that sees to their faults."""

    def remove(self, pids: Iterable[int]) -> int:
        """Put the bytes of files back wherever a jump is in the memory of processes; return how many there were."""

    def close(self) -> None:
        """Give up what is not looked at after the end; may be called more than once."""
