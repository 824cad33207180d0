"""
What the tracer tells the process that restores what it leaves when it is killed (``client.restorerprocess``).

Frames and messages are those of ``wire``: all that is for the crash restorer in the client is for that process too, and
these besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ptrace.reports import Lowered, Placed, Raised, Removed, Watched
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.native.patches import NativeMemory

__all__ = [
    "FOR_RESTORERS",
    "FilesShared",
    "JumpsCopied",
    "JumpsPlanned",
    "MemoryUnmapped",
    "PagesMapped",
    "TracerBegun",
]

FOR_RESTORERS = (Placed, Removed, Raised, Lowered, Watched)


@dataclass(frozen=True, slots=True)
class TracerBegun:
    """The first message: the process id of the tracer."""

    pid: int


@dataclass(frozen=True, slots=True)
class FilesShared:
    """
    A report that files in memory, (device, inode) each, are about to be mapped for handlers.

    Where they are is said by the ``JumpsPlanned`` that follows. The ``page`` that only the process has, (address,
    size), is there already, unless its size is 0.
    """

    pid: int
    files: tuple[tuple[int, int], ...]
    page: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class JumpsPlanned:
    """
    A report that ``pages``, (start, end) each, are about to be mapped for code, and jumps to be written.

    They are for handlers that have a ``memory``.
    """

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


@dataclass(frozen=True, slots=True)
class MemoryUnmapped:
    """A report that a process has given back the memory of ``JumpsPlanned`` at a ``region``, and the pages for code."""

    pid: int
    region: int
