"""The pipes between client and tracer: frames, and the messages in them."""

from __future__ import annotations

import enum
import pickle
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dprobes.resolve.probe_state import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.map_layouts import CallTable
    from dprobes.engines.engine_interface import Change, HandedOver
    from dprobes.engines.hits.hit_lifecycle import ProbeLimits
    from dprobes.engines.overload_guard import Verdict
    from dprobes.engines.ptrace.breakpoint_sites import Sites
    from dprobes.engines.ptrace.shared_counters import NativeStatePlan
    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.extensions.extension_registry import Registration
    from dprobes.platform.x86.debug_registers import Watch
    from dprobes.rpn.keyed_tables import Table
    from dprobes.target.process_maps import Mapping

__all__ = [
    "RECORD",
    "RECORD_FRAME",
    "Attach",
    "Attached",
    "ChangeRequest",
    "Done",
    "Dumped",
    "End",
    "Ended",
    "Failed",
    "Forked",
    "FrameReader",
    "InPlace",
    "Insert",
    "Kind",
    "Left",
    "Lowered",
    "Mapped",
    "MemoryReleased",
    "MemoryShared",
    "ModuleMapped",
    "NotInserted",
    "Overloaded",
    "PatchSites",
    "Placed",
    "ProbeStatus",
    "Raised",
    "Refused",
    "ReleaseMemory",
    "Remove",
    "Removed",
    "Replace",
    "Replaced",
    "ShareMemory",
    "SitesPatched",
    "Start",
    "Warned",
    "Watched",
    "load_message",
    "pack_message",
    "unpack_record",
]

_FRAME = struct.Struct("=IB")
RECORD = struct.Struct("=II")
"""The part of that which is the frame's payload."""
RECORD_FRAME = struct.Struct("=IBII")
"""What a frame with a record of a program's probepoint begins with: length, kind, program, probepoint."""


class Kind(enum.IntEnum):
    """
    What a frame holds.

    A frame is ``u32 length | u8 kind | payload``, in host byte order. Records are the only frequent ones and are packed
    by hand; all other payloads are pickled dataclasses. Both ends are our own
    processes, on pipes that nobody else can reach.
    """

    MESSAGE = 0
    RECORD = 1


def pack_message(message: object) -> bytes:
    """Return the frame of a message."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _FRAME.pack(len(payload), Kind.MESSAGE) + payload


def unpack_record(payload: bytes) -> tuple[int, int, bytes]:
    """Return the program, its probepoint and the record in the payload of a RECORD frame."""
    program, probe = RECORD.unpack_from(payload)
    return program, probe, payload[RECORD.size :]


class FrameReader:
    """The frames in a byte stream, however it is split."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Add bytes and iterate over the frames that they complete."""
        pending = self._pending
        pending += data
        while len(pending) >= _FRAME.size:
            length, kind = _FRAME.unpack_from(pending)
            end = _FRAME.size + length
            if len(pending) < end:
                break
            payload = bytes(pending[_FRAME.size : end])
            # At once: who stops iterating gets the next frame the next time.
            del pending[:end]
            yield Kind(kind), payload


def load_message(payload: bytes) -> Any:
    """Return the message in the payload of a MESSAGE frame."""
    return pickle.loads(payload)  # noqa: S301 - both ends are ours


@dataclass(frozen=True, slots=True)
class Start:
    """A program: the limits of its probe definitions, and which header items records carry."""

    number: int
    """How many programs there were before."""
    definitions: tuple[ProbeLimits, ...]
    items: int
    """``record.log_record.Item`` flags."""
    variables: tuple[int, int, int, int]
    """How many local, global, per-CPU and per-thread variables the program has."""
    counters: int
    """The descriptor of the memory for counts and variables (``shared_counters``)."""
    extensions: tuple[Registration, ...] = ()
    """What the program may call by ``callk``, in order."""
    core_directory: str = "."
    """Where core files are written to."""
    follow: bool = True
    """Whether the processes that a process starts are in scope as well."""
    budget: float | None = None
    """The share of a CPU that hits may take; None: as much as they do."""
    globals: int = -1
    """The descriptor of the global variables, if others have them, too."""
    principal: int = -1
    """The number of the program whose variables and tables this one uses instead of its own."""
    everywhere: dict[int, Sites | str] = field(default_factory=dict)
    """What is watched in every process, whatever that maps, by word size; a text is why it cannot be."""
    tables: tuple[Table, ...] = ()
    """The program's keyed tables, which are in the memory for counts and variables."""
    wants_images: bool = False
    """Whether the client is to be told what processes map (``Mapped``, ``Forked``)."""
    restorer: tuple[int, int] = (-1, 0)
    """Pipe to the process that cleans up after a killed tracer (``restorer_messages``), and that process's id."""
    native: NativeStatePlan | None = None
    """What handlers in the probed processes have in common with those of the tracer, if there are any."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A request to take over a process; ``launching`` is one that has not yet executed its program."""

    pid: int
    launching: bool


@dataclass(frozen=True, slots=True)
class Remove:
    """
    A request to take probepoints of a program away, in all processes and in those to come.

    It answers by ``ProbeStatus``, or not at all if another program has taken the place of that one.
    """

    program: int
    probes: tuple[int, ...]
    state: ProbeState = ProbeState.REMOVED
    """DISABLED if they have had as many hits as they may."""


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A request to change variables and tables of a program, the ``count``th; the memory that both see answers it."""

    program: int
    count: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    """
    A request to insert one more program, into the process ``pid`` and what that has started.

    It opens the ``counters`` and ``native`` of ``start`` in the client, and has ``globals`` already. ``known`` says
    what is in files that it has asked about.
    """

    start: Start
    pid: int
    known: dict[tuple[int, int, str], Sites]
    """By device, inode and path."""


@dataclass(frozen=True, slots=True)
class Replace:
    """A request to put a program in the place of another one, ``former``; the rest is as for ``Insert``."""

    start: Start
    former: int
    known: dict[tuple[int, int, str], Sites]


@dataclass(frozen=True, slots=True)
class ShareMemory:
    """
    A request to let a process map memory for handlers that run in it; ``MemoryShared`` answers it.

    ``descriptor`` is a file of the client's. ``calls`` are what handlers keep in memory of the process alone, and
    ``others`` more files, with their sizes, which belong to other programs as well. ``globals`` are the bytes of global
    variables that all programs have, and the tracer too: they come last.
    """

    program: int
    pid: int
    descriptor: int
    size: int
    calls: CallTable | None = None
    others: tuple[tuple[int, int], ...] = ()
    globals: int = 0


@dataclass(frozen=True, slots=True)
class PatchSites:
    """
    A request to put jumps in the place of breakpoints in a process; ``SitesPatched`` answers it.

    ``memories`` are (program, page of ``MemoryShared``) of those whose handlers the code has: it knows the process by
    these, and another page means that the process executes another program.
    ``pages`` are what is to be mapped for ``code``, (start, end) each; ``fixups`` are for what may fault in it.
    ``postponed`` are the probepoints whose jumps have to wait for what the process is yet to map.
    """

    program: int
    pid: int
    memories: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]
    code: tuple[tuple[int, bytes], ...]
    fixups: tuple[tuple[int, int], ...]
    patches: tuple[SitePatch, ...]
    postponed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """
    A request to find out whether all handlers that are under way end, or were left without an end.

    If no thread is in a handler for a moment, ``words`` of the memory of ``ShareMemory`` become 0 then, (offset, size)
    each. ``MemoryReleased`` answers.
    """

    program: int
    words: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class End:
    """A request to take a program away, and with the last one to detach from everything and to end."""

    program: int


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
