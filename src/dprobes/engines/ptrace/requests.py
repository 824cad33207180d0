"""What the client asks of the tracer: the messages in that direction (``wire``)."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass
from dprobes.resolve.probestate import ProbeState

if TYPE_CHECKING:
    from dprobes.bpf.calltable import CallTable
    from dprobes.engines.hits.probelimits import ProbeLimits
    from dprobes.engines.interface import Change
    from dprobes.engines.ptrace.nativestate import NativeStatePlan
    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.sites import Sites
    from dprobes.extensions.registry import Registration
    from dprobes.rpn.tables import Table

__all__ = [
    "Attach",
    "ChangeRequest",
    "End",
    "Insert",
    "PatchSites",
    "ReleaseMemory",
    "Remove",
    "Replace",
    "ShareMemory",
    "Start",
]


@dataclass(frozen=True, slots=True)
class Start:
    """A program: the limits of its probe definitions, and which header items records carry."""

    number: int
    """How many programs there were before."""
    definitions: tuple[ProbeLimits, ...]
    items: int
    """``record.layout.Item`` flags."""
    variables: tuple[int, int, int, int]
    """How many local, global, per-CPU and per-thread variables the program has."""
    counters: int
    """The descriptor of the memory for counts and variables (``sharedcounters``)."""
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
    """Descriptor of the pipe to the process that cleans up after a killed tracer (``restorerwire``), and its id."""
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
