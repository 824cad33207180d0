"""What the tracer reports to the client: the messages in that direction (``wire``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.engines.interface import HandedOver
    from dprobes.engines.overload import Verdict
    from dprobes.engines.x86.debugregs import Watch
    from dprobes.resolve.probestate import ProbeState
    from dprobes.target.processmaps import Mapping

__all__ = [
    "Attached",
    "Done",
    "Dumped",
    "Ended",
    "Failed",
    "Forked",
    "InPlace",
    "Left",
    "Lowered",
    "Mapped",
    "MemoryReleased",
    "MemoryShared",
    "ModuleMapped",
    "NotInserted",
    "Overloaded",
    "Placed",
    "ProbeStatus",
    "Raised",
    "Refused",
    "Removed",
    "Replaced",
    "SitesPatched",
    "Warned",
    "Watched",
]


@dataclass(frozen=True, slots=True)
class Attached:
    """A report that a process is traced and its probepoints are in place."""

    pid: int


@dataclass(frozen=True, slots=True)
class ModuleMapped:
    """
    A question: which sites of a program a file has that a process maps executable.

    The process is stopped until the answer comes, unless it is one that is about to be attached to (``learn``).
    """

    number: int
    pid: int
    path: str
    device: int
    inode: int
    program: int = 0


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a process has mapped of files as code; ``since`` is when it began to execute what it does, or 0."""

    pid: int
    since: int
    mappings: tuple[Mapping, ...]


@dataclass(frozen=True, slots=True)
class Forked:
    """A report that a process has a copy of its parent's memory."""

    pid: int
    parent: int
    when: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A report that breakpoints are about to be written: (address, original byte) pairs, for the crash restorer."""

    pid: int
    breakpoints: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """A report that the memory of ``pid`` has no breakpoints at these addresses any more; without any, none at all."""

    pid: int
    addresses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Raised:
    """A report that semaphores are about to be raised: (semaphore, a breakpoint that needs it), for crash restorers."""

    pid: int
    semaphores: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A report that semaphores in the memory of ``pid`` are not raised any more."""

    pid: int
    semaphores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """What the threads of a process are about to watch in their debug registers, instead of what they did."""

    pid: int
    watches: tuple[Watch, ...]


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """
    The state of a program's probepoints in one process, or with pid 0 in all.

    Several have one message only where there is nothing else to say of them.
    """

    program: int
    probes: tuple[int, ...]
    pid: int
    state: ProbeState
    path: str = ""
    offset: int = 0
    found: bytes = b""
    """For MISMATCH and CONFLICT: the bytes that memory holds."""
    reason: str = ""
    """Why it could not be inserted, where the state does not say all: CONFLICT and the states of watchpoints."""


@dataclass(frozen=True, slots=True)
class Overloaded:
    """A report that hits of a program took too much of a CPU: what is done, and hits a second by probepoint."""

    program: int
    verdict: Verdict
    rates: dict[int, float]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A report that a program has taken the place of another one, of which nothing more will be heard."""

    program: int


@dataclass(frozen=True, slots=True)
class InPlace:
    """A report that a program inserted among others, or instead of one, has its probepoints in all processes."""

    program: int


@dataclass(frozen=True, slots=True)
class NotInserted:
    """
    A report that all is as before without a program, and why: what is in the way of a probepoint, or else.

    If there is nothing to be said, the process is none of those that are traced.
    """

    program: int
    message: str = ""
    obstacle: ProbeStatus | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """
    A report that a program was taken away while others stay: nothing more will be heard of it.

    It is ``complete`` if that is because all its processes are gone.
    """

    program: int
    complete: bool = False


@dataclass(frozen=True, slots=True)
class MemoryShared:
    """A report where a process has the memory of ``ShareMemory``, or why it has not: then both are 0."""

    program: int
    pid: int
    page: int = 0
    region: int = 0
    problem: str = ""
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """A report whether all threads were seen outside of handlers after ``ReleaseMemory``."""

    program: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class SitesPatched:
    """
    A report which probepoints have jumps in a process now, and why others have not.

    ``probes`` are (program, probepoint) each, and ``refused`` such pairs with the reason. With ``is_outdated`` the
    process executes another program by now, which has no memory for handlers yet. With ``is_occupied`` it has mapped
    something where their code was to be, and they are to be planned again.
    """

    program: int
    pid: int
    probes: tuple[tuple[int, int], ...]
    refused: tuple[tuple[tuple[int, int], str], ...] = ()
    is_outdated: bool = False
    is_occupied: bool = False

    @property
    def programs(self) -> set[int]:
        """The programs that it is about."""
        return {program for program, _ in (*self.probes, *(pair for pair, _ in self.refused))}

    def probes_of(self, program: int) -> list[int]:
        """Return the probepoints of a program that have jumps."""
        return [probe for number, probe in self.probes if number == program]

    def refused_of(self, program: int) -> dict[int, str]:
        """Return why others of it have none."""
        return {probe: reason for (number, probe), reason in self.refused if number == program}


@dataclass(frozen=True, slots=True)
class Done:
    """
    The end of the conversation: everything is taken away and all processes are detached or gone.

    ``complete`` says that they are gone, ``problem`` what went wrong in the tracer, if anything. The counts are in the
    shared counters.
    """

    complete: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for the user of a program, or of all of them."""

    message: str
    hint: str | None = None
    program: int | None = None
    details: str = ""
    """More lines below the message."""


@dataclass(frozen=True, slots=True)
class Left:
    """A report that a process is not traced any more, because a program's handler has it handed to the debugger."""

    program: int
    process: HandedOver


@dataclass(frozen=True, slots=True)
class Dumped:
    """A report that the core of a process was written for a program, or the problem that it has met."""

    program: int
    pid: int
    name: str
    path: str
    size: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A report that the tracer cannot run its first program, and ends; nothing was traced."""

    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """
    A report that a process could not be taken over, and why; ``number`` is the errno.

    It is to be taken over as it ``shares_with`` another one the memory that is probed, if that is not 0.
    """

    pid: int
    message: str
    number: int = 0
    shares_with: int = 0
