"""
Address spaces: the memory of processes, with its breakpoints, watchpoints and slots.

This module contains data and look-ups, and writes the bytes of breakpoints. Callers decide which threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dprobes.engines.ptrace.site_patches import Patches
from dprobes.engines.ptrace.tracer.placed_breakpoints import INT3, SEMAPHORE_SIZE, Entries, Slots
from dprobes.engines.ptrace.tracer.protected_pages import pages_of
from dprobes.errors import system_error
from dprobes.platform.linux.procfs import ids_of, process_field
from dprobes.platform.linux.served_pages import ServedPages
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager

    from dprobes.engines.ptrace.breakpoint_sites import FileKey
    from dprobes.engines.ptrace.tracer.placed_breakpoints import Breakpoint, Watchpoint
    from dprobes.engines.ptrace.tracer.protected_pages import ProtectedPages
    from dprobes.engines.ptrace.tracer.tracer_programs import InsertedProgram, Probe
    from dprobes.target.process_maps import Mapping
    from dprobes.target.unwind.stack_memory import ProcessSpace

__all__ = ["AddressSpace", "LocalIds", "PageReader"]


@dataclass(slots=True, eq=False)
class LocalIds:
    """
    Local thread ids of a process in a nested PID namespace, of the threads that its handlers can identify.

    They are keyed by the id in the tracer's namespace. Other processes that run in the memory, after vfork, are not
    included.
    """

    pid: int
    by_thread: dict[int, int] = field(default_factory=dict)
    is_full: bool = False
    """True if the table had no room for a thread, which handlers could not identify."""

    @classmethod
    def of(cls, pid: int) -> LocalIds | None:
        """Return an empty table for the threads of a process, or None if they have the same ids in both namespaces."""
        return cls(pid) if len(ids_of(pid)) > 1 else None

    def local_of(self, tid: int) -> int | None:
        """Return the id of a thread in the namespace of its process, or None if the thread has ended."""
        local = self.by_thread.get(tid)
        if local is None and (found := ids_of(tid)):
            local = self.by_thread[tid] = found[-1]
        return local


_JUMP_SIZE = 5
"""Size in bytes of a jump with a distance of 32 bits."""


class PageReader:
    """
    Reader of nearby addresses in a process's memory, with one system call for each page.

    It caches pages without a limit of time: create a new reader for each purpose.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._pages: dict[int, bytes] = {}

    def read(self, address: int, size: int) -> bytes:
        """Return ``size`` bytes at ``address``; raise OSError if they are not mapped."""
        start = address & -PAGE_SIZE
        page = self._pages.get(start)
        if page is None:
            page = self._pages[start] = os.pread(self._memory, PAGE_SIZE, start)
        offset = address - start
        if offset + size > len(page):
            return os.pread(self._memory, size, address)
        return page[offset : offset + size]

    def has(self, address: int) -> bool:
        """Return whether ``address`` is mapped."""
        try:
            return bool(self.read(address, 1))
        except OSError:
            return False

    def reads_as(self, other: PageReader, start: int, end: int) -> bool:
        """Return whether memory from ``start`` to ``end`` (excluded) is mapped and the same as ``other`` reads."""
        try:
            return self.read(start, end - start) == other.read(start, end - start)
        except OSError:
            return False


@dataclass(slots=True, eq=False)
class AddressSpace:
    """
    Memory of one process, or of several processes after vfork.

    ``former`` has removed breakpoints, because a thread may have executed one just before. ``files`` has the address
    ranges (start, end, file offset) of each file. ``symbols`` has the addresses of symbols that handlers push, by the
    number of the program and the probed file (device, inode). ``shared_with`` has processes that are not traced any
    more but may still run in this memory; it has no breakpoints until they have left it.
    """

    memory: int
    word_size: Literal[4, 8]
    has_shadow_stack: bool
    pids: set[int] = field(default_factory=set)
    breakpoints: dict[int, Breakpoint] = field(default_factory=dict)
    former: dict[int, int] = field(default_factory=dict)
    files: dict[FileKey, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    symbols: dict[tuple[int, tuple[int, int]], dict[str, int]] = field(default_factory=dict)
    shared_with: set[int] = field(default_factory=set)
    has_sharers: bool = False
    """True if several processes have run in the memory at the same time, other than by vfork."""
    by_probe: dict[Probe, dict[Breakpoint, None]] = field(default_factory=dict)
    slots: Slots = field(default_factory=Slots)
    patches: Patches = field(default_factory=Patches)
    """Jumps that replace breakpoints."""
    local_ids: LocalIds | None = None
    """Thread ids in the PID namespace of the process, if that is nested and there are handlers in memory."""
    entries: Entries = field(default_factory=Entries)
    gadgets: tuple[int, int] | None = None
    """
    Addresses of a system call instruction and of a return from a signal (0: not found), or None before the search.
    """
    made_gadgets: tuple[int, bytes] | None = None
    """Address of instructions that the tracer has written for injected calls, and the bytes there before, or None."""
    watchpoints: tuple[Watchpoint, ...] = ()
    pages: ProtectedPages | None = None
    """Pages that are protected for watchpoints; None if there are none."""
    awaits_pages: bool = False
    """True if pages of watchpoints are not protected yet, which needs a stop of one of its threads."""
    unwinding: ProcessSpace | None = None
    """Unwind tables; None before the first stack, and after mappings have changed."""
    told_mappings: tuple[Mapping, ...] = ()
    """Mappings of code that were reported to the client, if it wants such reports."""
    semaphores: dict[int, int] = field(default_factory=dict)
    """Semaphores that were incremented, each with the address of a breakpoint that needs it."""
    lowered: list[int] = field(default_factory=list)
    """Semaphores that were decremented, which is not yet reported to the client."""
    unwritten: set[int] = field(default_factory=set)
    """Addresses of breakpoints that are not in memory, because jumps are about to replace them."""
    postponed: set[tuple[int, int]] = field(default_factory=set)
    """Probepoints, (program, probepoint) each, whose jumps wait for memory that is not mapped yet."""
    copied_from: int = 0
    """Id of the process of which this memory is a copy, while both wait for the same jumps, or 0."""
    joining: dict[int, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """
    Probepoints, (program, probepoint) each, that a program is about to add where other programs have jumps.

    The keys are addresses of breakpoints. The present jumps, which lack these probepoints, remain until new jumps
    replace them.
    """
    served: ServedPages | None = None
    """
    Look-up of pages that only a user-space server can deliver (userfaultfd), for another user's process.

    Else None.
    """
    awaited: tuple[Breakpoint, ...] = ()
    """Breakpoints at return addresses that are withdrawn while the memory is shared with an untraced vfork child."""

    @classmethod
    def of_thread(cls, tid: int, word_size: Literal[4, 8]) -> AddressSpace:
        """Open the memory of a stopped thread; raise OSError if the thread has ended."""
        memory = os.open(f"/proc/{tid}/mem", os.O_RDWR | os.O_CLOEXEC)
        return cls(memory, word_size, "shstk" in process_field(tid, "x86_Thread_features"), served=ServedPages.of(tid))

    @classmethod
    def closed(cls, word_size: Literal[4, 8]) -> AddressSpace:
        """Return the address space of a process whose memory must not be accessed."""
        return cls(-1, word_size, has_shadow_stack=False)

    @property
    def is_one_process(self) -> bool:
        """True if it belongs to one process, which handlers in memory require."""
        return not self.has_sharers or len(self.pids) == 1

    @property
    def is_open(self) -> bool:
        """True if breakpoints can be written."""
        return self.memory >= 0

    def copy_for_child(self, tid: int) -> AddressSpace:
        """
        Return the address space of a forked child, which has a copy of all breakpoints.

        The kernel copied the memory some time before the tracer is notified: changes made in between are applied to the
        copy here.
        """
        breakpoints = {address: breakpoint_.copy() for address, breakpoint_ in self.breakpoints.items()}
        space = AddressSpace(
            os.open(f"/proc/{tid}/mem", os.O_RDWR | os.O_CLOEXEC) if self.is_open else -1,
            self.word_size,
            self.has_shadow_stack,
            breakpoints=breakpoints,
            former=dict(self.former),
            files=dict(self.files),
            symbols=dict(self.symbols),
            by_probe={probe: {breakpoints[b.address]: None for b in mine} for probe, mine in self.by_probe.items()},
            slots=self.slots.copy(),
            gadgets=self.gadgets,
            made_gadgets=self.made_gadgets,
            watchpoints=self.watchpoints,
            awaits_pages=any(w.by_page for w in self.watchpoints),
            served=ServedPages.of(tid) if self.is_open else None,
            told_mappings=self.told_mappings,
            semaphores=dict(self.semaphores),
            unwritten=set(self.unwritten),
        )
        reader = PageReader(space.memory)
        space.patches = self.patches.copy_for_child(space.memory, reader.read, reader.has)
        space.patches.restore(space.memory, space.patches.bound_to(self.joining))  # no others will be written to it
        if self.patches.displaced:
            self._mend_code_of(space)
        space.renew()
        reader = PageReader(space.memory)
        for address, original in space.former.items():
            space.restore_byte(address, original, reader)
        parent = PageReader(self.memory)
        space.slots.keep(lambda start, end: reader.reads_as(parent, start, end), reader.has)
        return space

    def _mend_code_of(self, child: AddressSpace) -> None:
        """
        Overwrite the remains of unregistered jumps in a forked child by the code that this space has there.

        A jump may have been removed, and its trampoline reused for another one, since the kernel copied the memory.
        """
        reader = PageReader(child.memory)
        parent = PageReader(self.memory)
        for address in self.breakpoints:
            if address in child.patches.by_site:
                continue
            with contextlib.suppress(OSError):
                mine = self._code_at(address, parent)
                if child._code_at(address, reader) != mine:
                    marked = bytearray(mine)
                    for place in range(_JUMP_SIZE):
                        if address + place in child.breakpoints and child.reads_as_breakpoint(address + place):
                            marked[place] = INT3[0]
                    os.pwrite(child.memory, marked, address)

    def reads_as_breakpoint(self, address: int) -> bool:
        """Return whether memory has a breakpoint instruction at an address."""
        return os.pread(self.memory, 1, address) == INT3

    def _code_at(self, address: int, reader: PageReader) -> bytes:
        """Return the file's code at a breakpoint, of the size of a jump."""
        code = bytearray(reader.read(address, _JUMP_SIZE))
        self.patches.hide(address, code)
        for place, byte in enumerate(code):
            if byte == INT3[0] and (found := self.breakpoints.get(address + place)) is not None:
                code[place] = found.original
        return bytes(code)

    def unwind_space(self, tid: int) -> ProcessSpace:
        """Return access to the memory for unwinding call stacks; ``tid`` is the id of a thread in it."""
        if self.unwinding is None:
            from dprobes.platform.linux.thread_stack import space_of

            self.unwinding = space_of(tid, self.memory, self.word_size, self.served)
        return self.unwinding

    def served_page(self, address: int, size: int) -> int | None:
        """Return the first address in a range that only a server can deliver (``ServedPages``), or None."""
        page = None if self.served is None else self.served.first(self.memory, address, size)
        return None if page is None else max(page, address)

    def renew(self) -> None:
        """Write all breakpoints that are missing from memory."""
        reader = PageReader(self.memory)
        for address, breakpoint_ in self.breakpoints.items():
            if address in self.patches.by_site or address in self.unwritten:
                continue
            with contextlib.suppress(OSError):
                if reader.read(address, 1) == bytes([breakpoint_.original]):
                    os.pwrite(self.memory, INT3, address)

    def write_unwritten(self, but: Collection[int] = ()) -> list[Breakpoint]:
        """Write the withheld breakpoints that no jump has replaced, except at the addresses in ``but``; return them."""
        late = [b for address in self.unwritten if address not in but and (b := self.breakpoints.get(address))]
        if self.unwritten:
            self.unwritten.intersection_update(but)  # those that have a jump now need none
            self.renew()
        if not self.unwritten:
            self.copied_from = 0
        return [breakpoint_ for breakpoint_ in late if breakpoint_.address not in self.patches.by_site]

    def close(self) -> None:
        """Close the memory; the breakpoints in it no longer belong to this space."""
        self._end_protection()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1
            if self.served is not None:
                self.served.close()
        self.breakpoints.clear()
        self.by_probe.clear()
        self.semaphores.clear()

    def release_pages(self) -> None:
        """End the protection of pages that no watchpoint needs any more."""
        if self.pages is None:
            return
        ranges = ((w.watch.address, w.watch.length) for w in self.watchpoints if w.by_page)
        needed = {page for address, size in ranges for page in pages_of(address, size)}
        self.pages.release(self.pages.protected - needed)
        if not needed:
            self._end_protection()

    def _end_protection(self) -> None:
        if self.pages is not None:
            self.pages.close()
            self.pages = None

    def read(self, address: int, size: int) -> bytes:
        """
        Return up to ``size`` bytes at any address; raise OSError if it is not mapped.

        Breakpoints that are not written yet appear as if they were.
        """
        if address >> 63:
            raise system_error(errno.EFAULT)  # larger than any file offset
        if self.served_page(address, size) is not None:
            raise system_error(errno.EFAULT)  # the server might never deliver it
        data = os.pread(self.memory, size, address)
        if not self.unwritten:
            return data
        shown, places = bytearray(data), range(address, address + len(data))
        for place in self.unwritten.intersection(places) if len(places) < len(self.unwritten) else self.unwritten:
            if place in places:
                shown[place - address] = INT3[0]
        return bytes(shown)

    def write(self, address: int, data: bytes) -> int:
        """Write bytes at any address, and return their number; raise OSError if it is not mapped."""
        if address >> 63:
            raise system_error(errno.EFAULT)
        with self.opened(address, len(data)):
            return os.pwrite(self.memory, data, address)

    def opened(self, address: int, size: int) -> AbstractContextManager[None]:
        """Return a context in which the tracer can write to a range, even if it is on protected pages."""
        if self.pages is None:
            return contextlib.nullcontext()
        return self.pages.opened(pages_of(address, size))

    def place(self, breakpoint_: Breakpoint, *, is_written: bool = True) -> None:
        """Register a breakpoint, and write its byte if ``is_written``; raise OSError if that is not possible."""
        if not is_written:
            self.unwritten.add(breakpoint_.address)
        else:
            with self.opened(breakpoint_.address, 1):
                if not os.pwrite(self.memory, INT3, breakpoint_.address):
                    raise system_error(errno.ESRCH)  # old kernels report memory that is gone by a count of 0
        self.breakpoints[breakpoint_.address] = breakpoint_
        self.former.pop(breakpoint_.address, None)
        self.register(breakpoint_)

    def register(self, breakpoint_: Breakpoint) -> None:
        """Enter a breakpoint in the table of the breakpoints that each probepoint uses."""
        for probe in breakpoint_.probes():
            self.by_probe.setdefault(probe, {})[breakpoint_] = None

    def end_joining(self, served: dict[int, set[tuple[int, int]]]) -> None:
        """Remove the probepoints ``served``, keyed by the addresses of breakpoints, from ``joining``."""
        for address in [address for address in served if address in self.joining]:
            left = self.joining[address] - served[address]
            if left:
                self.joining[address] = left
            else:
                del self.joining[address]

    def drop(self, probe: Probe) -> list[Breakpoint]:
        """Unregister a probepoint from all breakpoints; return the removed breakpoints, which nothing else needs."""
        mine = self.by_probe.pop(probe, ())
        self.end_joining({each.address: {(probe.program.number, probe.number)} for each in mine})
        is_guarded = any(breakpoint_.semaphores for breakpoint_ in mine)
        self.entries.drop(probe)
        for breakpoint_ in mine:
            breakpoint_.drop(probe)
        if is_guarded:
            self.lower_unneeded()
        gone = [breakpoint_ for breakpoint_ in mine if not breakpoint_.is_needed]
        for breakpoint_ in gone:
            self.withdraw(breakpoint_)
        return gone

    def drop_program(self, program: InsertedProgram) -> list[Breakpoint]:
        """Remove all of a program's probes as ``drop`` does, and breakpoints that the engine needs because of it."""
        for probe in [probe for probe in self.by_probe if probe.program is program]:
            del self.by_probe[probe]
            self.entries.drop(probe)
        joining = self.joining.items()
        self.end_joining({address: {each for each in found if each[0] == program.number} for address, found in joining})
        for key in [key for key in self.symbols if key[0] == program.number]:
            del self.symbols[key]
        gone = []
        for breakpoint_ in self.breakpoints.values():
            breakpoint_.drop_program(program)
            if not breakpoint_.is_needed:
                gone.append(breakpoint_)
        self.lower_unneeded()
        reader = PageReader(self.memory)
        for breakpoint_ in gone:
            self.withdraw(breakpoint_, reader)
        if jumps := [s for s, jump in self.patches.by_site.items() if program.number in jump.users]:
            self.patches.restore(self.memory, jumps)
            self.renew()
        return gone

    def withdraw(self, breakpoint_: Breakpoint, reader: PageReader | None = None) -> None:
        """
        Restore the original byte under a breakpoint, or the code under the jump that has replaced it, and forget it.

        ``reader`` caches pages if many breakpoints are withdrawn. If it is None, memory is read. Bytes that others have
        written are kept.
        """
        for site in self.patches.restore(self.memory, [breakpoint_.address]):
            if site != breakpoint_.address and site in self.breakpoints:  # it was served by the same jump
                with contextlib.suppress(OSError):
                    os.pwrite(self.memory, INT3, site)
        self.restore_byte(breakpoint_.address, breakpoint_.original, reader)
        self.forget(breakpoint_)
        self.former[breakpoint_.address] = breakpoint_.original

    def withdraw_all(self) -> None:
        """Withdraw every breakpoint and jump, and all protection; no thread of the space may run meanwhile."""
        self._end_protection()
        for address in list(self.semaphores):
            self._lower(address)
        self.patches.restore(self.memory, self.patches.by_site)
        reader = PageReader(self.memory)
        for breakpoint_ in list(self.breakpoints.values()):
            self.withdraw(breakpoint_, reader)

    def forget(self, breakpoint_: Breakpoint) -> None:
        """Forget a breakpoint whose byte is no longer in memory."""
        self.unwritten.discard(breakpoint_.address)
        self.joining.pop(breakpoint_.address, None)
        self.patches.forget(breakpoint_.address, breakpoint_.address + 1)
        self.breakpoints.pop(breakpoint_.address, None)
        for probe in breakpoint_.probes():
            rest = self.by_probe.get(probe)
            if rest is not None:
                rest.pop(breakpoint_, None)
                if not rest:
                    del self.by_probe[probe]

    # Semaphores of USDT probes

    def needed_semaphores(self) -> dict[int, list[int]]:
        """Return the semaphores that breakpoints need, each with the addresses of these breakpoints."""
        needed: dict[int, list[int]] = {}
        for breakpoint_ in self.breakpoints.values():
            for semaphore in set(breakpoint_.semaphores.values()):
                needed.setdefault(semaphore, []).append(breakpoint_.address)
        return needed

    def raise_semaphore(self, semaphore: int, breakpoint_: int) -> None:
        """Increment a semaphore that a breakpoint needs; raise OSError if it is not mapped."""
        self._add(semaphore, 1)
        self.semaphores[semaphore] = breakpoint_

    def lower_unneeded(self) -> None:
        """Decrement the semaphores that no breakpoint needs; call this before their last breakpoint is withdrawn."""
        if not self.semaphores:
            return
        needed = self.needed_semaphores()
        for semaphore in list(self.semaphores):
            if semaphore in needed:
                self.semaphores[semaphore] = needed[semaphore][0]
            else:
                self._lower(semaphore)

    def forget_semaphores(self) -> None:
        """Forget semaphores that no breakpoint needs, without a write: their memory has other content now."""
        needed = self.needed_semaphores() if self.semaphores else {}
        gone = [semaphore for semaphore in self.semaphores if semaphore not in needed]
        for semaphore in gone:
            del self.semaphores[semaphore]
        self.lowered += gone

    def take_lowered(self) -> tuple[int, ...]:
        """Return the decremented semaphores that are not reported to the client yet, and forget them."""
        lowered, self.lowered = tuple(self.lowered), []
        return lowered

    def _lower(self, semaphore: int) -> None:
        breakpoint_ = self.semaphores.pop(semaphore)
        self.lowered.append(semaphore)
        with contextlib.suppress(OSError):
            # If the breakpoint or its jump is still there, the file is still mapped, and this is its semaphore.
            if os.pread(self.memory, 1, breakpoint_) == INT3 or self.patches.is_there(self.memory, breakpoint_):
                self._add(semaphore, -1)

    def _add(self, semaphore: int, amount: int) -> None:
        value = int.from_bytes(os.pread(self.memory, SEMAPHORE_SIZE, semaphore), "little") + amount
        if 0 <= value < 1 << 8 * SEMAPHORE_SIZE:
            self.write(semaphore, value.to_bytes(SEMAPHORE_SIZE, "little"))

    def restore_byte(self, address: int, original: int, reader: PageReader | None = None) -> None:
        """
        Restore an original byte if a breakpoint byte is there; memory that is not mapped is skipped.

        ``reader`` is used to read memory when many bytes are restored at once.
        """
        with contextlib.suppress(OSError):
            found = os.pread(self.memory, 1, address) if reader is None else reader.read(address, 1)
            if found == INT3:
                with self.opened(address, 1):
                    os.pwrite(self.memory, bytes([original]), address)
