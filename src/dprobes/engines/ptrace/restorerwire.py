"""
What the tracer tells the process that restores what it leaves when it is killed (``client.restorerprocess``).

Frames and messages are those of ``wire``: all that is for the crash restorer in the client is for that process too, and
these besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.wire import Lowered, Placed, Raised, Removed, Watched
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.native.patches import NativeMemory

__all__ = ["FOR_RESTORERS", "JumpsCopied", "JumpsPlanned", "PagesMapped", "TracerBegun"]

FOR_RESTORERS = (Placed, Removed, Raised, Lowered, Watched)


@dataclass(frozen=True, slots=True)
class TracerBegun:
    """The first message: the process id of the tracer."""

    pid: int


@dataclass(frozen=True, slots=True)
class JumpsPlanned:
    """A report that ``pages``, (start, end) each, are about to be mapped for code, and jumps to be written."""

    pid: int
    memory: NativeMemory
    pages: tuple[tuple[int, int], ...]
    patches: tuple[SitePatch, ...]


@dataclass(frozen=True, slots=True)
class PagesMapped:
    """A report that ``pages``, (start, end) each, are about to be mapped for copies of instructions."""

    pid: int
    pages: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class JumpsCopied:
    """A report that a process has a copy of its parent's memory, with the jumps and pages in it."""

    pid: int
    parent: int
