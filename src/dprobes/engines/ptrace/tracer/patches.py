"""
Jumps in an address space that lead from probed instructions to handlers in the process, as data and as bytes.

A jump takes the place of a breakpoint that is known here: where it is taken out, the breakpoint can come back. Bytes
are written while no thread of the space runs.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import field
from typing import TYPE_CHECKING

from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.bpf.calltable import CallTable
    from dprobes.engines.ptrace.wire import SitePatch

__all__ = ["NativeMemory", "Patches"]


@dataclass(frozen=True, slots=True)
class NativeMemory:
    """
    Say where a process has what handlers in it share with the client.

    ``page`` is what only the process has (``native.processpage``), ``own`` bytes with the ``calls`` behind it, and
    ``region`` the memory for maps.
    """

    page: int
    own: int
    region: int
    size: int
    calls: CallTable | None = None


@dataclass(slots=True, eq=False)
class Patches:
    """The jumps of one address space, by the address of the probed instruction."""

    memories: dict[int, NativeMemory] = field(default_factory=dict)
    """The shared memory of each program, by its number."""
    by_site: dict[int, SitePatch] = field(default_factory=dict)
    code: list[tuple[int, int]] = field(default_factory=list)
    """What is mapped for code, (start, end) each."""
    fixups: dict[int, int] = field(default_factory=dict)
    """Where a thread goes on that faults in our code, by the address of the instruction."""

    def write(self, memory: int, patch: SitePatch) -> None:
        """Write a jump; raise OSError, with nothing changed, if that is not possible."""
        done: list[tuple[int, bytes]] = []
        try:
            for address, data in patch.writes:
                before = os.pread(memory, len(data), address)
                done.append((address, before))
                os.pwrite(memory, data, address)
        except OSError:
            for address, before in reversed(done):
                with contextlib.suppress(OSError):
                    os.pwrite(memory, before, address)
            raise
        self.by_site[patch.site] = patch

    def is_there(self, memory: int, site: int) -> bool:
        """Return whether memory has the jump of a place."""
        patch = self.by_site.get(site)
        return patch is not None and all(os.pread(memory, len(data), at) == data for at, data in patch.writes)

    def restore(self, memory: int, sites: Iterable[int]) -> None:
        """Put the bytes of the file back at these places, wherever a jump of ours is still there."""
        for site in list(sites):
            patch = self.by_site.pop(site)
            for (address, data), original in zip(reversed(patch.writes), reversed(patch.originals), strict=True):
                with contextlib.suppress(OSError):
                    if os.pread(memory, len(data), address) == data:
                        os.pwrite(memory, original, address)

    def bound_to(self, sites: Iterable[int]) -> list[int]:
        """Return those of the places where there are jumps, and others that cannot have theirs without them."""
        mine = [site for site in sites if site in self.by_site]
        groups = {self.by_site[site].group for site in mine} - {None}
        return mine + [site for site, patch in self.by_site.items() if patch.group in groups and site not in mine]

    def relying_on(self, address: int) -> list[int]:
        """Return the places of the jumps that need the byte at an address as it is."""
        return [
            site
            for site, patch in self.by_site.items()
            if site <= address < site + len(patch.rest)
            or any(start <= address < start + len(data) for start, data in patch.writes)
        ]

    @contextlib.contextmanager
    def put_aside(self, memory: int, site: int) -> Iterator[None]:
        """Have the bytes of the file in the place of the jump at ``site`` for a while, if there is one."""
        patch = self.by_site.get(site)
        if patch is None:
            yield
            return
        self.restore(memory, [site])
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.write(memory, patch)

    def hide(self, address: int, data: bytearray) -> None:
        """Let ``data``, which was read at ``address``, show the code of the file."""
        end = address + len(data)
        for patch in self.by_site.values():
            for (start, written), original in zip(patch.writes, patch.originals, strict=True):
                first, last = max(start, address), min(start + len(written), end)
                if first < last:
                    data[first - address : last - address] = original[first - start : last - start]

    def copy(self) -> Patches:
        """Return the same for a copy of the memory."""
        return Patches(dict(self.memories), dict(self.by_site), list(self.code), dict(self.fixups))

    def forget(self, start: int, end: int) -> None:
        """Forget the jumps in memory that is gone or shows something else."""
        for site in [site for site in self.by_site if start <= site < end]:
            del self.by_site[site]
