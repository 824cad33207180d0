"""
Memory for slots.

It is a page that an injected mmap(2) provides, once for each module; where the process may not be made to call that, or
it fails, the padding behind the module's code; and where that is full or too far away, there is none, and the
instruction is stepped in place with all other threads stopped.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.reports import Placed
from dprobes.engines.ptrace.restorerwire import PagesMapped
from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.engines.ptrace.tracer.injection import MMAP, MUNMAP, InjectionError, injecting, may_inject
from dprobes.engines.ptrace.tracer.steps.slots import GRANULE, JUMP_SIZE, NOP, Placement, Slot, SlotArea
from dprobes.engines.x86.emulation import Action
from dprobes.engines.x86.relocation import relocated
from dprobes.errors import TargetError
from dprobes.target.processmaps import PAGE_SIZE, free_ranges, growth_of, mappings_of

if TYPE_CHECKING:
    from dprobes.engines.ptrace.sites import Site
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.breakpoints import Breakpoint
    from dprobes.engines.ptrace.tracer.connection import Connection
    from dprobes.engines.ptrace.tracer.state import Thread
    from dprobes.engines.ptrace.tracer.steps.slots import Slots
    from dprobes.engines.ptrace.tracer.stopper import Stopper

__all__ = ["SlotMaker"]

_REACH = 1 << 30
"""How far from the code an area may lie: well within the 2 GiB that a 32-bit distance spans."""

_GUARD = 16 * PAGE_SIZE
"""What is left free between an area and its neighbours, which may want to grow."""

_LOWEST = 1 << 16  # vm.mmap_min_addr

_PROT_READ_EXEC = 0x5
_MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 0x100022


class SlotMaker:
    """The maker of slots, as they are needed."""

    def __init__(self, stopper: Stopper, connection: Connection) -> None:
        self._stopper = stopper
        self._connection = connection

    def may_make(self, thread: Thread, breakpoint_: Breakpoint) -> bool:
        """Return whether it has not been tried yet to make one."""
        key = (breakpoint_.address, breakpoint_.site.original)
        return breakpoint_.site.copy is not None and key not in thread.space.slots.by_site

    def make(self, thread: Thread, breakpoint_: Breakpoint) -> Slot | None:
        """
        Make a slot for the instruction under a breakpoint at which ``thread`` stands; None if there is no place for it.

        The first time in a module this may let the thread make system calls. Raise ``ThreadGoneError`` if it is killed
        meanwhile.
        """
        slots = thread.space.slots
        slot = self._make(thread, breakpoint_)
        slots.by_site[breakpoint_.address, breakpoint_.site.original] = slot
        if slot is not None:
            slots.by_address[slot.address] = slot
        return slot

    def _make(self, thread: Thread, breakpoint_: Breakpoint) -> Slot | None:
        size = _slot_size(breakpoint_.site)
        for area in self._areas(thread, breakpoint_.address, size):
            address = area.find(size)
            code = self._code(thread.space, breakpoint_, address) if address is not None else None
            if address is None or code is None:
                continue
            try:
                if os.pwrite(thread.space.memory, code, address) < len(code):
                    continue
            except OSError:
                continue
            area.take(address, size)
            return self._filled(area, address, breakpoint_, thread)
        return None

    def _filled(self, area: SlotArea, address: int, breakpoint_: Breakpoint, thread: Thread) -> Slot:
        site = breakpoint_.site
        assert site.copy is not None
        end = address + len(site.original)
        trap = 0
        if site.emulation[0] == Action.REPEAT:
            trap = end
            # Should the tracer die, the crash restorer makes it a nop; the jump is behind it.
            self._connection.send(Placed(thread.pid, ((trap, NOP),)))
        return Slot(
            address,
            breakpoint_.address,
            end,
            Placement.PAGE if area.former is None else Placement.PADDING,
            is_free=site.copy.cannot_fault,
            leads_on=site.copy.leads_on and not trap,
            pushes_return=site.copy.pushes_return,
            trap=trap,
            size=_slot_size(site),
        )

    def _code(self, space: AddressSpace, breakpoint_: Breakpoint, slot: int) -> bytes | None:
        site, address = breakpoint_.site, breakpoint_.address
        assert site.copy is not None
        code = relocated(site.original, site.copy, address, slot)
        if code is None:
            return None
        if site.emulation[0] == Action.REPEAT:
            code += INT3
        distance = address + len(site.original) - (slot + len(code) + JUMP_SIZE)
        if space.word_size == 4:
            distance = (distance + (1 << 31)) % (1 << 32) - (1 << 31)
        if not -(1 << 31) <= distance < 1 << 31:
            return None
        return code + b"\xe9" + distance.to_bytes(4, "little", signed=True)

    def _areas(self, thread: Thread, address: int, size: int) -> list[SlotArea]:
        """Return areas with room near an address, a new one if there is none."""
        slots = thread.space.slots
        found = _with_room(slots, address, size)
        region = address // _REACH
        if not any(area.former is None for area in found) and region not in slots.refused:
            area = self._mapped_area(thread, address)
            if area is None:
                slots.refused.add(region)
            else:
                slots.areas.append(area)
        if not _with_room(slots, address, size):
            self._use_padding(thread.space, address)
        return sorted(_with_room(slots, address, size), key=lambda area: area.former is not None)

    def _mapped_area(self, thread: Thread, address: int) -> SlotArea | None:
        """Let the thread map an area near ``address``, large enough for all sites of its space that need a slot."""
        space = thread.space
        wanted = sum(
            b.site.copy is not None
            and b.site.emulation[0] < Action.SKIP
            and (b.address, b.site.original) not in space.slots.by_site
            for b in space.breakpoints.values()
        )
        size = -(-max(1, wanted) * 2 * GRANULE // PAGE_SIZE) * PAGE_SIZE
        if not may_inject(thread):
            return None
        with self._stopper.others_stopped(space, thread):
            start = _gap(thread.tid, address, size, space.word_size)
            if not start:
                return None
            for pid in space.pids:
                self._connection.tell_restorer(PagesMapped(pid, ((start, start + size),)))
            try:
                with injecting(thread) as call:
                    found = call(
                        MMAP[space.word_size],
                        start, size, _PROT_READ_EXEC, _MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE, -1, 0,
                    )  # fmt: skip
                    if found > 0 and found != start:
                        call(MUNMAP[space.word_size], found, size)  # a kernel that takes the address as a hint
            except InjectionError:
                return None
        return SlotArea(start, start + size) if found == start else None

    def _use_padding(self, space: AddressSpace, address: int) -> None:
        """Make an area of the padding that is near ``address``."""
        for start, end in list(space.slots.padding):
            first = start + GRANULE - 1 & -GRANULE
            if abs(start - address) > _REACH or end - first < GRANULE:
                continue
            space.slots.padding.remove((start, end))
            with contextlib.suppress(OSError):
                former = os.pread(space.memory, end - first, first)
                space.slots.areas.append(SlotArea(first, first + len(former), former))


def _slot_size(site: Site) -> int:
    code = len(site.original) + (1 if site.emulation[0] == Action.REPEAT else 0) + JUMP_SIZE
    return -(-code // GRANULE) * GRANULE


def _with_room(slots: Slots, address: int, size: int) -> list[SlotArea]:
    return [a for a in slots.areas if abs(a.start - address) < _REACH and a.find(size) is not None]


def _gap(tid: int, address: int, size: int, word_size: int) -> int:
    """
    Return where near ``address`` there is room to map ``size`` bytes, or 0.

    Below the code rather than above: what is mapped may be followed by more. Mappings may grow downwards as well, so a
    gap's upper end is left free.
    """
    try:
        mappings = mappings_of(tid)
    except TargetError:
        return 0
    top = 1 << 47 if word_size == 8 else 0xC0000000
    best = (2 * _REACH, 0)
    for low, high in free_ranges(mappings, growth_of(tid), _LOWEST, top):
        if high - low < size + 2 * _GUARD:
            continue
        start = high - _GUARD - size if high <= address else low + _GUARD
        # Below the code wherever that is possible.
        distance = abs(start - address) + (_REACH if high > address else 0)
        if abs(start - address) < _REACH and distance < best[0]:
            best = (distance, start & ~(PAGE_SIZE - 1))
    return best[1]
