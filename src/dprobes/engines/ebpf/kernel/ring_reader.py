"""
Reader of a BPF ring buffer: entries in the order in which BPF programs reserved them.

The layout is that of ``struct bpf_ringbuf`` in ``kernel/bpf/ringbuf.c``, as user space sees it::

    page 0                 u64 consumer position, which the reader writes
    page 1                 u64 producer position, which the kernel writes
    from page 2 on         the data, mapped twice, so that an entry at the end of the ring is contiguous

    entries                as in ``ring_spans``; the second half of a header is a page offset

Positions only grow; their low bits are offsets in the data.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import sys
import time
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import Status
from dprobes.engines.ebpf.kernel.bpf_objects import Descriptor
from dprobes.engines.ring_spans import complete_end, entries_in
from dprobes.platform.linux.bpf_calls import MapType, create_map

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RingBuffer", "wait"]


class RingBuffer(Descriptor):
    """
    A ring buffer of ``size`` bytes, a power of two and at least a page, to which BPF programs write.

    There is one reader at a time. Views of the data must be released before ``close``.
    """

    def __init__(self, size: int, name: str = "") -> None:
        super().__init__(create_map(MapType.RINGBUF, 0, 0, size, name=name))
        self.size = size
        page = mmap.PAGESIZE
        self._closed = False
        with contextlib.ExitStack() as undoing:
            undoing.callback(super().close)
            self._own = undoing.enter_context(mmap.mmap(self.fd, page))
            self._kernels = mmap.mmap(self.fd, page + 2 * size, prot=mmap.PROT_READ, offset=page)
            undoing.pop_all()
        with memoryview(self._own) as own, memoryview(self._kernels) as kernels:
            self._consumer = own.cast("Q")
            with kernels[:8] as position:
                self._producer = position.cast("Q")
            self._data = kernels[page:]
        self._words = self._data.cast("I")

    @property
    def pending(self) -> int:
        """Number of bytes that have not been released by the reader, including incomplete entries."""
        pending: int = self._producer[0] - self._consumer[0]
        return pending

    def drain(self) -> list[bytes]:
        """Return the data of all entries before the first incomplete one, and release their room."""
        with self.window() as window:
            entries = [bytes(window[start:stop]) for start, stop in entries_in(window)]
            size = len(window)
        self.advance(size)
        return entries

    def window(self, size: int = sys.maxsize) -> memoryview:
        """
        Return a view of the entries before the first incomplete one, with headers and discarded entries.

        Only entries that begin in the first ``size`` bytes are included. After ``advance`` the kernel may overwrite
        them.
        """
        begin = self._consumer[0]
        start = begin & self.size - 1
        end = start + min(self._producer[0] - begin, size)
        return self._data[start : complete_end(self._words, start, end)]

    def advance(self, size: int) -> None:
        """Release the room of the first ``size`` bytes, which are whole entries of ``window``."""
        self._consumer[0] += size

    def close(self) -> None:
        """Unmap and close the ring."""
        if not self._closed:
            self._closed = True
            for view in (self._words, self._data, self._producer, self._consumer):
                view.release()
            self._kernels.close()
            self._own.close()
        super().close()


_FIRST_SLEEP = 0.01
_LONGEST_SLEEP = 0.5


def wait(ring: RingBuffer, status: memoryview, timeout: float, others: Iterable[int] = ()) -> bool:
    """
    Sleep until the ring contains an entry, and return whether it does.

    The sleep also ends when one of the descriptors ``others`` is readable, or after ``timeout`` seconds. ``status`` are
    the 64-bit words of STATUS: a BPF program that finds ``Status.WAITING`` set clears it and wakes this process; if it
    is clear, no wake-up is needed.

    poll(2) checks the ring before it sleeps, after a barrier; epoll_wait(2) would miss an entry that arrived without a
    wake-up. A BPF program may read the word before this function sets it, and write its entry after this function has
    checked the ring: then it wakes no process. So the ring is checked again after a short sleep, and then at growing
    intervals. If the word remained set since the last call, no such BPF program exists, and short sleeps are omitted.
    """
    poll = select.poll()
    for descriptor in (ring.fd, *others):
        poll.register(descriptor, select.POLLIN)
    end = time.monotonic() + timeout
    word = Status.WAITING // 8
    sleep = timeout if status[word] else _FIRST_SLEEP
    while True:
        status[word] = 1
        left = end - time.monotonic()
        if poll.poll(max(0.0, min(sleep, left)) * 1000) or left <= sleep:
            break
        sleep = min(2 * sleep, _LONGEST_SLEEP)
    if not ring.pending:
        return False
    status[word] = 0
    return True
