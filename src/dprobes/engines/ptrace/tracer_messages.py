"""Frames and messages on the pipes between client and tracer."""

from __future__ import annotations

import enum
import pickle
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dprobes.resolve.probepoints import ProbeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.map_layouts import CallTable
    from dprobes.engines.engine_interface import HandedOver, ValueChange
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
    "MemoryCopied",
    "MemoryReleased",
    "MemoryShared",
    "ModuleMapped",
    "NotInserted",
    "Overloaded",
    "PagesMapped",
    "PagesUnmapped",
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
"""Payload header of a RECORD frame: program, probepoint."""
RECORD_FRAME = struct.Struct("=IBII")
"""Header of a RECORD frame: payload length, kind, program, probepoint."""


class Kind(enum.IntEnum):
    """
    Kind of a frame's payload.

    A frame is ``u32 length | u8 kind | payload``, in host byte order. Records are the only frequent frames and are
    packed by hand; all other payloads are pickled messages. Unpickling is safe because both ends are processes of
    dprobes, on pipes that no other process can reach.
    """

    MESSAGE = 0
    RECORD = 1


def pack_message(message: object) -> bytes:
    """Return a message encoded as a frame for the pipe between client and tracer."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _FRAME.pack(len(payload), Kind.MESSAGE) + payload


def unpack_record(payload: bytes) -> tuple[int, int, bytes]:
    """Return the program, its probepoint and the record in the payload of a RECORD frame."""
    program, probe = RECORD.unpack_from(payload)
    return program, probe, payload[RECORD.size :]


class FrameReader:
    """Parser of frames from a byte stream that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Add received bytes; iterate over the frames that are complete with them, as pairs of kind and payload."""
        pending = self._pending
        pending += data
        while len(pending) >= _FRAME.size:
            length, kind = _FRAME.unpack_from(pending)
            end = _FRAME.size + length
            if len(pending) < end:
                break
            payload = bytes(pending[_FRAME.size : end])
            # Delete the frame before the yield: a caller that stops iterating gets the next frame on the next call.
            del pending[:end]
            yield Kind(kind), payload


def load_message(payload: bytes) -> Any:
    """Return the message in the payload of a MESSAGE frame."""
    return pickle.loads(payload)  # noqa: S301 - both ends are processes of dprobes


@dataclass(frozen=True, slots=True)
class Start:
    """A program to be run: its number, the limits of its probe definitions, and the header items of its records."""

    number: int
    """Number of programs that were sent before this one."""
    definitions: tuple[ProbeLimits, ...]
    items: int
    """``record.log_record.Item`` flags."""
    variables: tuple[int, int, int, int]
    """Numbers of local, global, per-CPU and per-thread variables of the program."""
    counters: int
    """Descriptor of the memory for counts and variables (``shared_counters``)."""
    extensions: tuple[Registration, ...] = ()
    """Extensions that the program may call by ``callk``, in order."""
    core_directory: str = "."
    """Directory for core files."""
    follow: bool = True
    """True if the descendants of a process in scope are in scope, too."""
    budget: float | None = None
    """Share of a CPU that hits may take; None for no limit."""
    globals: int = -1
    """Descriptor of the global variables if they are shared with other programs, or -1."""
    principal: int = -1
    """Number of the program whose variables and tables this one uses, or -1 if it uses its own."""
    everywhere: dict[int, Sites | str] = field(default_factory=dict)
    """Watchpoints for every process, regardless of its files, by word size; a string is the reason for none."""
    tables: tuple[Table, ...] = ()
    """Keyed tables of the program, which are in the memory for counts and variables."""
    wants_images: bool = False
    """True if the client needs reports of the mappings of processes (``Mapped``, ``Forked``)."""
    restorer: tuple[int, int] = (-1, 0)
    """Pipe to the process that cleans up after a killed tracer (``restorer_messages``), and that process's id."""
    native: NativeStatePlan | None = None
    """Plan of the state that handlers in the probed processes share with the tracer; None if no handlers run there."""


class Attach(NamedTuple):
    """A request to attach to a process; ``launching`` is True if it has not yet called execve."""

    pid: int
    launching: bool


class Remove(NamedTuple):
    """
    Request to remove probepoints of a program from all present and future processes.

    The reply is ``ProbeStatus``; there is none if the program was replaced by another one.
    """

    program: int
    probes: tuple[int, ...]
    state: ProbeState = ProbeState.REMOVED
    """State of the probepoints after the removal: DISABLED if they have reached maxhits."""


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """
    A request to change variables and tables of a program; ``count`` numbers the requests of the program from 1.

    The tracer's reply is ``SharedCounters.changes_made``, in shared memory.
    """

    program: int
    count: int
    changes: tuple[ValueChange, ...]


class Insert(NamedTuple):
    """
    Request to insert another program into the process ``pid`` and the processes that this process has started.

    The tracer opens the ``counters`` and ``native`` of ``start`` by the client's descriptors; it has opened ``globals``
    before. ``known`` has the sites in files that the tracer has reported.
    """

    start: Start
    pid: int
    known: dict[tuple[int, int, str], Sites]
    """By device, inode and path."""


class Replace(NamedTuple):
    """Request to replace the program ``former`` by another one. The other fields are as in ``Insert``."""

    start: Start
    former: int
    known: dict[tuple[int, int, str], Sites]


class ShareMemory(NamedTuple):
    """
    Request to map memory in a process for handlers that run there. The reply is ``MemoryShared``.

    ``descriptor`` is the client's descriptor of a file of ``size`` bytes. ``calls`` is the table of calls that handlers
    keep in the private memory of the process. ``others`` has more files (descriptor, size), which other programs use,
    too. ``globals`` is the size in bytes of the global variables, or 0 if they are not to be mapped. All programs and
    the tracer share their file, which is mapped last.
    """

    program: int
    pid: int
    descriptor: int
    size: int
    calls: CallTable | None = None
    others: tuple[tuple[int, int], ...] = ()
    globals: int = 0


class PatchSites(NamedTuple):
    """
    Request to replace breakpoints in a process by jumps. The reply is ``SitesPatched``.

    * ``memories`` has (program, page of ``MemoryShared``) of the programs whose handlers the code contains. They
      identify the process: a different page means that the process has called execve.
    * ``pages`` has the ranges (start, end) to be mapped for ``code``.
    * ``fixups`` has pairs of the address of an instruction that may fault, and the address at which the thread then
      continues.
    * ``postponed`` has the probepoints whose jumps must wait until the process maps more files.
    """

    program: int
    pid: int
    memories: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]
    code: tuple[tuple[int, bytes], ...]
    fixups: tuple[tuple[int, int], ...]
    patches: tuple[SitePatch, ...]
    postponed: tuple[int, ...] = ()


class ReleaseMemory(NamedTuple):
    """
    Request to clear words that handlers have left without reaching their end, for example by longjmp.

    When no thread is in a handler, the tracer sets ``words`` (offset, size) of the memory of ``ShareMemory`` to 0. The
    reply is ``MemoryReleased``.
    """

    program: int
    words: tuple[tuple[int, int], ...]


class End(NamedTuple):
    """A request to remove a program; after the last program the tracer detaches from all processes and exits."""

    program: int


class Attached(NamedTuple):
    """A report that a process is traced and its probepoints are in place."""

    pid: int


class ModuleMapped(NamedTuple):
    """
    A request for the sites of a program in a file that a process maps executable; the reply is ``Sites``.

    The process is stopped until the reply arrives, unless the tracer has not attached to it yet.
    """

    number: int
    pid: int
    path: str
    device: int
    inode: int
    program: int = 0


class Mapped(NamedTuple):
    """
    A report of files that a process has mapped as code.

    If ``since`` is not 0, the address space is new, as after an exec, since that monotonic time in nanoseconds, and the
    report contains all of its files. If it is 0, the files were mapped later.
    """

    pid: int
    since: int
    mappings: tuple[Mapping, ...]


class Forked(NamedTuple):
    """A report that a process has a copy of its parent's memory; ``when`` is the monotonic time in nanoseconds."""

    pid: int
    parent: int
    when: int


class Placed(NamedTuple):
    """A report that breakpoints are about to be written: (address, original byte) pairs, for the crash restorer."""

    pid: int
    breakpoints: tuple[tuple[int, int], ...]


class PagesMapped(NamedTuple):
    """A report that ``pages``, (start, end) each, are about to be mapped for copies of instructions."""

    pid: int
    pages: tuple[tuple[int, int], ...]


class PagesUnmapped(NamedTuple):
    """A report that ``pages`` of an earlier ``PagesMapped`` could not be mapped."""

    pid: int
    pages: tuple[tuple[int, int], ...]


class MemoryCopied(NamedTuple):
    """A report that a process has a copy of its parent's memory, including jumps and pages."""

    pid: int
    parent: int


class Removed(NamedTuple):
    """Report that the process ``pid`` has no breakpoints at ``addresses`` any more, or none at all if this is empty."""

    pid: int
    addresses: tuple[int, ...] = ()


class Raised(NamedTuple):
    """A report that semaphores are about to be incremented: pairs of a semaphore and a breakpoint that needs it."""

    pid: int
    semaphores: tuple[tuple[int, int], ...]


class Lowered(NamedTuple):
    """A report that semaphores in the memory of ``pid`` were decremented."""

    pid: int
    semaphores: tuple[int, ...]


class Watched(NamedTuple):
    """A report that threads of a process are about to watch ``watches``, in place of their former ones."""

    pid: int
    watches: tuple[Watch, ...]


class ProbeStatus(NamedTuple):
    """
    The state of a program's probepoints in one process, or with pid 0 in all processes.

    A message covers several probepoints only if the fields after ``state`` are not used.
    """

    program: int
    probes: tuple[int, ...]
    pid: int
    state: ProbeState
    path: str = ""
    offset: int = 0
    found: bytes = b""
    """Bytes that memory holds, for MISMATCH and CONFLICT."""
    reason: str = ""
    """Reason for a failed insertion, for CONFLICT and the states of watchpoints."""


class Overloaded(NamedTuple):
    """A report that hits of a program took too much of a CPU: the measures taken, and hits a second by probepoint."""

    program: int
    verdict: Verdict
    rates: dict[int, float]


class Replaced(NamedTuple):
    """Report that ``program`` has replaced another one. No more messages about the replaced program follow."""

    program: int


class InPlace(NamedTuple):
    """A report that a program's probepoints are in place in all processes, after ``Insert`` or ``Replace``."""

    program: int


class NotInserted(NamedTuple):
    """
    A report that a program was not inserted and nothing has changed, with the reason or the obstacle.

    If neither is given, the process is not among the traced ones.
    """

    program: int
    message: str = ""
    obstacle: ProbeStatus | None = None


class Ended(NamedTuple):
    """
    Report that a program was removed while other programs remain. No more messages about it follow.

    It is ``complete`` if it was removed because all its processes are gone.
    """

    program: int
    complete: bool = False


class MemoryShared(NamedTuple):
    """
    Report of the addresses at which a process has mapped the memory of ``ShareMemory``.

    If the mapping failed, ``page`` and ``region`` are 0, and ``problem`` is the reason.
    """

    program: int
    pid: int
    page: int = 0
    region: int = 0
    problem: str = ""
    others: tuple[int, ...] = ()


class MemoryReleased(NamedTuple):
    """The reply to ``ReleaseMemory``; ``is_done`` is True if all threads were seen outside of handlers."""

    program: int
    is_done: bool


class SitesPatched(NamedTuple):
    """
    A report of the probepoints that have jumps in a process now, and of the reasons why others have none.

    ``probes`` are (program, probepoint) each, and ``refused`` such pairs with the reason. With ``is_outdated`` the
    process has called execve, and has no memory for handlers yet. With ``is_occupied`` the process has mapped something
    at the addresses planned for the code, and the jumps must be planned again.
    """

    program: int
    pid: int
    probes: tuple[tuple[int, int], ...]
    refused: tuple[tuple[tuple[int, int], str], ...] = ()
    is_outdated: bool = False
    is_occupied: bool = False

    @property
    def programs(self) -> set[int]:
        """Programs that the report is about."""
        return {program for program, _ in (*self.probes, *(pair for pair, _ in self.refused))}

    def probes_of(self, program: int) -> list[int]:
        """Return the probepoints of a program that have jumps."""
        return [probe for number, probe in self.probes if number == program]

    def refused_of(self, program: int) -> dict[int, str]:
        """Return the reasons why other probepoints of a program have no jumps."""
        return {probe: reason for (number, probe), reason in self.refused if number == program}


class Done(NamedTuple):
    """
    End of the conversation: all programs are removed, and all processes are detached or have ended.

    ``complete`` is True if all processes have ended. ``problem`` is an error in the tracer. The counts are in the
    shared counters.
    """

    complete: bool = True
    problem: str = ""


class Warned(NamedTuple):
    """Warning for the users of a program, or of all programs if ``program`` is None."""

    message: str
    hint: str | None = None
    program: int | None = None
    details: str = ""
    """Additional lines below the message."""
    is_warning: bool = True
    """False for a note."""


class Left(NamedTuple):
    """Report that a process is not traced any more, because a handler has handed it to the debugger (``exit 1``)."""

    program: int
    process: HandedOver


class Dumped(NamedTuple):
    """A report that a core dump of a process was written (``exit 3``), or ``problem``, the reason why it was not."""

    program: int
    pid: int
    name: str
    path: str
    size: int
    problem: str = ""


class Refused(NamedTuple):
    """A report that the tracer cannot run its first program and exits; no process was traced."""

    message: str


class Failed(NamedTuple):
    """
    Report that a process could not be attached to, with the reason. ``number`` is the errno.

    If ``shares_with`` is not 0, it is a probed process: the tracer tried to attach to ``pid`` because the two processes
    share their memory.
    """

    pid: int
    message: str
    number: int = 0
    shares_with: int = 0
