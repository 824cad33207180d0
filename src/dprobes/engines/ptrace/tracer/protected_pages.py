"""Protected pages of an address space, and messages about writes to them (``page_protection``)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dprobes.platform.linux.userfault_calls import FaultEvent
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dprobes.platform.linux.userfault_calls import Message, UserFaults

__all__ = ["ProtectedPages", "pages_of"]

_REPEATS = 4
"""Number of messages about a thread in a round after which it waits in the kernel, and cannot stop."""


def pages_of(address: int, size: int) -> range:
    """Return the addresses of the pages that contain ``size`` bytes at ``address``."""
    return range(address & -PAGE_SIZE, address + size, PAGE_SIZE)


def _do_nothing() -> None:
    pass


class ProtectedPages:
    """The protected pages of one address space, and messages about writes to them that are not handled yet."""

    def __init__(self, faults: UserFaults) -> None:
        self._object = faults
        self.before_change: Callable[[], None] = _do_nothing
        """
        Function that is called before a message about changed memory is read.

        Reading it lets the thread continue that has changed the memory. The function asks all threads to stop, so that
        none writes before ``renew``.
        """
        self.protected: set[int] = set()
        """Addresses of the pages."""
        self.waiting: dict[int, int] = {}
        """Addresses that threads were about to write, by thread id in the PID namespace of the process."""
        self.changes: list[Message] = []
        """Messages about memory that the process has moved, discarded or unmapped."""
        self.areas: dict[int, int] = {}
        """Memory for copies of instructions: its start, and the number of used bytes. Its gate follows."""
        self.slots: dict[tuple[int, bytes], tuple[Any, ...]] = {}
        """Slots of instructions, by address and bytes (``gated_steps``); empty for one without a slot."""
        self._gates: set[int] = set()
        self._repeats: dict[int, int] = {}
        self._opened: dict[int, int] = {}

    @property
    def descriptor(self) -> int:
        """The descriptor to poll, or -1 after ``close``."""
        return self._object.descriptor

    def covers(self, address: int, size: int) -> bool:
        """Return whether a byte of a range is on a protected page."""
        return any(page in self.protected for page in pages_of(address, size))

    def protect(self, page: int) -> None:
        """Include a page, and protect it; raise OSError if the kernel cannot."""
        self._object.register(page, PAGE_SIZE)
        try:
            self._object.protect(page, PAGE_SIZE)
        except OSError:
            self._object.unregister(page, PAGE_SIZE)
            raise
        self.protected.add(page)

    def add_gate(self, page: int) -> None:
        """Protect a gate: a page mapped for the tracer, not the program's. Raise OSError if the kernel cannot."""
        self._object.register(page, PAGE_SIZE)
        self._object.protect(page, PAGE_SIZE)
        self._gates.add(page)

    def release(self, pages: Iterable[int]) -> None:
        """End the protection of pages. Threads that wait to write to them continue."""
        for page in pages:
            self.protected.discard(page)
            self._object.unregister(page, PAGE_SIZE)  # it wakes the threads that wait

    def renew(self) -> None:
        """Protect all pages again, after the process has discarded some."""
        for page in (self.protected | self._gates) - self._opened.keys():
            with contextlib.suppress(OSError):
                self._object.protect(page, PAGE_SIZE)

    @contextlib.contextmanager
    def opened(self, pages: Iterable[int]) -> Iterator[None]:
        """Return a context manager during which pages can be written. Threads that wait for them continue to wait."""
        mine = [page for page in pages if page in self.protected]
        for page in mine:
            self.open(page)
        try:
            yield
        finally:
            for page in mine:
                self.shut(page)

    def open(self, page: int) -> None:
        """Allow writes to a page, until ``shut`` was called as often."""
        self._opened[page] = self._opened.get(page, 0) + 1
        with contextlib.suppress(OSError):
            self._object.open(page, PAGE_SIZE)

    def shut(self, page: int) -> None:
        """Protect a page again that ``open`` has made writable, when the last user of it has finished."""
        self._opened[page] -= 1
        if not self._opened[page]:
            del self._opened[page]
            if page in self.protected:
                with contextlib.suppress(OSError):  # it was unmapped
                    self._object.protect(page, PAGE_SIZE)

    def wake(self, page: int) -> None:
        """Let the threads that wait for an open page go on."""
        self._object.wake(page, PAGE_SIZE)

    def read(self) -> None:
        """Read the messages of the userfaultfd that have arrived, and add them to ``waiting`` and ``changes``."""
        while self._object.has_message:
            if not (count := self._object.faults_waiting):
                self.before_change()
            messages = self._object.read(count or 1)
            if not messages:
                return
            for message in messages:
                if message.event is FaultEvent.PAGE_FAULT:
                    self.waiting[message.tid] = message.address
                    self._repeats[message.tid] = self._repeats.get(message.tid, 0) + 1
                else:
                    self.changes.append(message)

    def begin_round(self) -> None:
        """Forget how often threads have written; after this call ``is_in_kernel`` counts anew."""
        self._repeats.clear()

    def is_in_kernel(self, number: int) -> bool:
        """
        Return whether a thread waits for a page inside a system call, and so does not stop when it is asked to.

        ``number`` is its id in the PID namespace of the process. Such a thread repeats its fault at each request to
        stop.
        """
        return self._repeats.get(number, 0) >= _REPEATS

    def close(self) -> None:
        """End the protection of all pages, and close the userfaultfd."""
        self.protected.clear()
        self.waiting.clear()
        self._object.close()
