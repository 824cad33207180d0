"""Single jumps, and those that belong together: what is in their way, and the writing of one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.sites import Role
from dprobes.engines.ptrace.tracer.breakpoints import INT3
from dprobes.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.native.threadplaces import ThreadPlaces

__all__ = ["DIFFERS", "adapted", "fitting", "groups_of", "obstacle_to", "write_jump"]

DIFFERS = "memory holds something else than the file"
"""What may pass: another jump may be written that this one relies on."""


def groups_of(patches: Iterable[SitePatch]) -> Iterator[list[SitePatch]]:
    """Iterate over the patches that belong together, those first of which the first one comes first."""
    left = dict.fromkeys(patches)
    members: dict[tuple[int, int], list[SitePatch]] = {}
    for patch in left:
        for group in patch.groups:
            members.setdefault(group, []).append(patch)
    while left:
        found, waiting = [], [next(iter(left))]
        while waiting:
            patch = waiting.pop()
            if patch in left:
                del left[patch]
                found.append(patch)
                waiting += (other for group in patch.groups for other in members[group])
        yield sorted(found, key=lambda each: -each.start)


def adapted(space: AddressSpace, patch: SitePatch) -> SitePatch:
    """Return a jump as it is for the probepoints that are there now, as far as it can do without the others."""
    if patch.place is not None:
        patch = space.patches.known.get(patch.place, patch)
    return patch.only(
        (program, probe, address) for address in patch.addresses for program, probe in _present(space, address)
    )


def _present(space: AddressSpace, address: int) -> set[tuple[int, int]]:
    breakpoint_ = space.breakpoints.get(address)
    return set() if breakpoint_ is None else {(each.program.number, each.number) for each in breakpoint_.probes()}


def obstacle_to(space: AddressSpace, patch: SitePatch) -> str | None:
    """Return why a jump does not do what the breakpoints do in whose place it comes."""
    for address in patch.addresses:
        breakpoint_ = space.breakpoints.get(address)
        if breakpoint_ is None:
            return "there is no breakpoint any more"
        if breakpoint_.waiting or breakpoint_.own or any(site.role is Role.JUMP for _, site in breakpoint_.exits):
            return "the breakpoint is for something else as well"
        present, served = _present(space, address), patch.probes_at(address)
        needed = present - space.joining.get(address, frozenset())
        if not {program for program, _ in needed} <= patch.programs:
            return "several programs have it"
        if not needed <= served <= present:
            return "the breakpoint is needed for another probepoint as well"
    if space.watchpoints and any(stop.has_frame for stop in patch.stops):
        return "watchpoints would be hit by what comes before its handler"
    displaced, written = patch.displaced_bytes(), patch.written_bytes()
    if any(place in space.breakpoints and place not in patch.addresses for place in displaced):
        return "a breakpoint for something else is in what it displaces"
    used = patch.used_bytes()
    for other in space.patches.near(min(used), max(used) + 1):
        is_same = set(other.addresses) <= set(patch.addresses)
        if not is_same and not {*displaced, *written}.isdisjoint((*other.displaced_bytes(), *other.written_bytes())):
            return "its bytes belong to the jump of another probe"
    return None


def fitting(space: AddressSpace, jumps: Iterable[SitePatch]) -> list[SitePatch]:
    """
    Return jumps that do what breakpoints do that are there now, as they do it, the first one for each place.

    Of those that belong together there are all or none. The last ones in memory come first: a punned jump relies on
    bytes of the jump behind it.
    """
    left = [made for jump in jumps if (made := adapted(space, jump)).sites]
    members: dict[tuple[int, int], set[int]] = {}
    for jump in left:
        for group in jump.groups:
            mine = (address for program, _, address in jump.sites if program == group[0])
            members.setdefault(group, set()).update(mine)
    while True:
        found: list[SitePatch] = []
        there = set(space.patches.by_site)
        for jump in left:
            if there.isdisjoint(jump.addresses) and obstacle_to(space, jump) is None:
                there.update(jump.addresses)
                found.append(jump)
        torn = {group for group, addresses in members.items() if not addresses <= there}
        gone = {jump for jump in found if not torn.isdisjoint(jump.groups)}
        if not gone:
            return sorted(found, key=lambda jump: -jump.start)
        left = [jump for jump in left if jump not in gone]


def write_jump(space: AddressSpace, patch: SitePatch, places: ThreadPlaces) -> str | None:
    """Write one jump; return why not."""
    try:
        if _code_at(space, patch.start, len(patch.code)) != patch.code:
            return DIFFERS
        address, shared = patch.relied_on
        if shared and space.read(address, len(shared)) != shared:
            return DIFFERS
        places.move(patch)
        if len(patch.writes) > 1 and patch.start in space.unwritten:
            os.pwrite(space.memory, INT3, patch.start)  # nobody may see one page with its part and one without
        space.patches.write(space.memory, patch)
        space.unwritten.difference_update(patch.addresses)  # who reads there sees the jump
        space.end_joining({address: patch.probes_at(address) for address in patch.addresses})
    except OSError as error:
        return reason_of(error)
    return None


def _code_at(space: AddressSpace, address: int, size: int) -> bytes:
    """Return what memory holds besides breakpoints and jumps of ours; raise OSError if there is no memory."""
    found = bytearray(space.read(address, size))
    space.patches.hide(address, found)
    for place in range(address, address + len(found)):
        breakpoint_ = space.breakpoints.get(place)
        if breakpoint_ is not None and found[place - address] == INT3[0]:
            found[place - address] = breakpoint_.original
    return bytes(found)
