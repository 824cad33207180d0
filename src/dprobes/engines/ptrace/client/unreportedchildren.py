"""
Children of which a killed tracer has not said anything: copies of their parents, with all breakpoints.

The kernel attaches the tracer to a child before that runs, and the child waits until it is let go on. So what a tracer
that is held at its end has not told of executes the same file as its parent, and stands still.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import children_of, process_field, threads_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

__all__ = ["unreported_children"]


def unreported_children(known: Iterable[int], tracer: int) -> Iterator[tuple[int, int]]:
    """Iterate over (child, parent): children of ``known`` processes that a tracer has, and that are not known."""
    parents = tuple(known)
    for parent in parents:
        for child in sorted(_unknown_children(parent, set(parents))):
            if _tracer_of(child) == tracer and _executes_the_same(child, parent):
                yield child, parent


def _unknown_children(parent: int, known: Container[int]) -> set[int]:
    try:
        threads = threads_of(parent)
    except OSError:
        return set()
    return {child for tid in threads for child in children_of(parent, tid) if child not in known}


def _tracer_of(pid: int) -> int:
    try:
        return int(process_field(pid, "TracerPid") or 0)
    except OSError:
        return 0


def _executes_the_same(child: int, parent: int) -> bool:
    try:
        mine, theirs = os.stat(f"/proc/{child}/exe"), os.stat(f"/proc/{parent}/exe")
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)
