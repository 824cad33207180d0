"""
What programs have in one module of a process, and which instructions they have to plan together.

A jump over instructions that several programs probe leads to the handlers of all; one that is close to the jump of
another program may need its bytes. So whoever plans last plans for all whose instructions are near, in memory of its
own: who goes then leaves to the others what they had before, or is switched off.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from dprobes.engines.inline.handlercode import SiteHandler
from dprobes.engines.inline.jumpbytes import site_patch
from dprobes.engines.inline.processtrials import process_trials
from dprobes.engines.inline.sitegroups import joined
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dprobes.engines.inline.handlercode import CodeWriter, PlacedJump
    from dprobes.engines.inline.sitegroups import PlannedSite
    from dprobes.engines.inline.trials import Trial
    from dprobes.engines.ptrace.sitepatch import SitePatch
    from dprobes.target.processmaps import Mapping as MemoryMapping

__all__ = ["ModulePlan", "PlannedJumps", "plan_alone", "plan_together", "sites_together"]

NEAR = 32
"""Bytes between instructions whose jumps may be in each other's way: what one displaces is shorter."""


class ModulePlan(NamedTuple):
    """
    Hold what a program has ``planned`` in a module of a process, by the addresses of instructions, and its ``writer``.

    The ``page`` says which process it is (``PatchSites``), and the ``rank`` in which order programs were inserted.
    """

    program: int
    rank: int
    page: int
    planned: Mapping[int, PlannedSite]
    writer: CodeWriter


class PlannedJumps(NamedTuple):
    """Hold jumps, and why there are none at some instructions."""

    jumps: list[PlacedJump]
    patches: list[SitePatch]
    refused: dict[int, str]


def sites_together(wanted: Iterable[int], plans: Sequence[ModulePlan]) -> frozenset[int]:
    """Return the instructions near some ``wanted`` ones, if several of the programs have such; else nothing."""
    if len(plans) == 1:
        return frozenset()
    owners: dict[int, set[int]] = {}
    bound: dict[int, set[int]] = {}
    for plan in plans:
        for address, site in plan.planned.items():
            owners.setdefault(address, set()).add(plan.program)
            bound.setdefault(address, set()).update(site.bound)
    order = sorted(owners)
    left, together = dict.fromkeys(wanted), set[int]()
    while left:
        members, waiting = set[int](), [next(iter(left))]
        while waiting:
            address = waiting.pop()
            if address in members:
                continue
            members.add(address)
            first, last = bisect_left(order, address - NEAR), bisect_right(order, address + NEAR)
            waiting += order[first:last]
            waiting += bound[address]
        if len({program for address in members for program in owners[address]}) > 1:
            together |= members
        left = {address: None for address in left if address not in members}
    return frozenset(together)


def plan_alone(
    plan: ModulePlan,
    addresses: Collection[int],
    others: Collection[int],
    pid: int,
    mappings: Iterable[MemoryMapping],
) -> PlannedJumps:
    """Plan jumps of one program; ``others`` are instructions with breakpoints, which no jump should displace."""
    sites = {address: plan.planned[address] for address in addresses}
    handlers = {a: [SiteHandler(piece.assembled) for piece in site.pieces] for a, site in sites.items()}
    return _planned(plan, plan.writer, plan.planned, handlers, others, process_trials(sites, pid, mappings))


def plan_together(
    plans: Sequence[ModulePlan],
    mine: ModulePlan,
    addresses: Collection[int],
    others: Collection[int],
    pid: int,
    mappings: Iterable[MemoryMapping],
) -> PlannedJumps:
    """Plan jumps of several programs in the memory of one of them, whose plan is ``mine``."""
    in_order = sorted(plans, key=lambda plan: plan.rank)
    around = {plan.program: plan.writer.around for plan in plans}
    sites = {
        address: joined([plan.planned[address] for plan in in_order if address in plan.planned])
        for address in addresses
    }
    handlers = {
        address: [SiteHandler(piece.assembled, around[piece.program]) for piece in site.pieces]
        for address, site in sites.items()
    }
    return _planned(mine, mine.writer.anew(), sites, handlers, others, process_trials(sites, pid, mappings))


def _planned(
    plan: ModulePlan,
    writer: CodeWriter,
    sites: Mapping[int, PlannedSite],
    handlers: Mapping[int, Sequence[SiteHandler]],
    others: Collection[int],
    trials: Mapping[int, Trial | str],
) -> PlannedJumps:
    bound = [sites[address].bound for address in handlers if sites[address].bound]
    jumps, refused = writer.place(handlers, _merged(bound), others, trials)
    return PlannedJumps(jumps, [site_patch(jump, sites, writer.module, plan.program) for jump in jumps], refused)


def _merged(groups: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return groups that have nothing in common, each of those that have."""
    found: dict[int, frozenset[int]] = {}
    for group in groups:
        whole = group.union(*(found[address] for address in group if address in found))
        found |= dict.fromkeys(whole, whole)
    return list(dict.fromkeys(found.values()))
