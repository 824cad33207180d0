"""
Giving memory back: what we changed or mapped in a process is dropped once no breakpoint needs it.

A page of code in which a breakpoint stood is a copy of the file's page, and stays one when the byte is restored.
madvise(MADV_DONTNEED), which the process itself has to call, makes it the file's page again. Should it then show
something else than before, somebody else had changed it too, and that is put back.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer.injection import MADVISE, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.slots import Slots
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.tracer.injection import Call
    from dprobes.engines.ptrace.tracer.processes import AddressSpace, Thread

__all__ = ["give_back_all", "give_back_pages"]

_DONTNEED = 4


def give_back_pages(space: AddressSpace, thread: Thread, addresses: Iterable[int]) -> None:
    """
    Let ``thread`` drop our copies of the pages at ``addresses`` in which no breakpoint is any more.

    It must have stopped without a signal to be delivered, and all others of the space must be stopped. Where the
    process may not be made to do system calls, the copies stay.
    """
    kept = {address & -PAGE_SIZE for address in space.breakpoints}
    pages = {address & -PAGE_SIZE for address in addresses} - kept
    if not pages or not may_inject(thread):
        return
    with contextlib.suppress(InjectionError), injecting(thread) as call:
        _drop(space, call, pages)


def give_back_all(space: AddressSpace, thread: Thread) -> bool:
    """
    Let ``thread`` drop and unmap all that is ours, the slots included; no thread may be in one.

    Return False if another thread has to be asked.
    """
    pages = {address & -PAGE_SIZE for address in space.former}
    for area in space.slots.areas:
        if area.former is not None:
            with contextlib.suppress(OSError):
                os.pwrite(space.memory, area.former[: area.used], area.start)
            pages |= {address & -PAGE_SIZE for address in range(area.start, area.start + area.used, PAGE_SIZE)}
    mapped = [area for area in space.slots.areas if area.former is None]
    if not (pages or mapped) or not may_inject(thread):
        return True
    try:
        with injecting(thread) as call:
            for area in mapped:
                call(MUNMAP[space.word_size], area.start, area.end - area.start)
            space.slots = Slots()
            _drop(space, call, pages)
    except InjectionError:
        return False
    return True


def _drop(space: AddressSpace, call: Call, pages: set[int]) -> None:
    for start, size in _runs(pages):
        try:
            before = os.pread(space.memory, size, start)
        except OSError:
            continue
        if call(MADVISE[space.word_size], start, size, _DONTNEED) < 0:
            continue  # locked in memory
        with contextlib.suppress(OSError):
            after = os.pread(space.memory, size, start)
            for offset in range(0, size, PAGE_SIZE):
                if after[offset : offset + PAGE_SIZE] != before[offset : offset + PAGE_SIZE]:
                    os.pwrite(space.memory, before[offset : offset + PAGE_SIZE], start + offset)


def _runs(pages: set[int]) -> Iterator[tuple[int, int]]:
    """Join adjoining pages: give (start, size) of each run."""
    start = end = -1
    for page in sorted(pages):
        if page != end:
            if start >= 0:
                yield start, end - start
            start = page
        end = page + PAGE_SIZE
    if start >= 0:
        yield start, end - start
