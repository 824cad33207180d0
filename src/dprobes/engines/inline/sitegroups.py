"""
Which jumps belong together: all of those that a probepoint has, if it keeps the entries of calls.

What is kept in the process is not seen by a breakpoint of the tracer, nor the other way round. So the entry and all
returns of a function have jumps, or none of them has; where an instruction serves several probepoints, they share that
fate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.inline.pieces import Order
from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.engines.inline.pieces import Piece

__all__ = ["PlannedSite", "SiteGroup", "joined", "planned_sites", "site_groups"]


class SiteGroup(NamedTuple):
    """
    Hold the pieces of some instructions, by their addresses, each in the order in which they run.

    The highest address comes first: a punned jump shares bytes with what follows.

    ``is_bound`` says that there are jumps at all of them or at none.
    """

    sites: dict[int, list[Piece]]
    is_bound: bool


class PlannedSite(NamedTuple):
    """
    Hold what runs at one instruction of a process: the ``pieces``, in order.

    Its jump belongs to others by the ``groups`` of ``SitePatch``; the addresses of all of a group are in ``bound``.
    """

    pieces: tuple[Piece, ...]
    groups: tuple[tuple[int, int], ...] = ()
    bound: frozenset[int] = frozenset()

    @property
    def owners(self) -> tuple[tuple[int, int], ...]:
        """The probepoints that the pieces are for, (program, probepoint) each."""
        return tuple(dict.fromkeys((piece.program, piece.probe) for piece in self.pieces))

    def probes_of(self, program: int) -> list[int]:
        """Return those of a program."""
        return [probe for number, probe in self.owners if number == program]


def site_groups(pieces: Iterable[Piece]) -> Iterator[SiteGroup]:
    """Put pieces together that belong together, those of the highest addresses first."""
    sites: dict[int, list[Piece]] = {}
    of_probe: dict[int, list[int]] = {}
    binding: set[int] = set()
    for piece in pieces:
        sites.setdefault(piece.address, []).append(piece)
        of_probe.setdefault(piece.probe, []).append(piece.address)
        if piece.order is Order.ENTRY:
            binding.add(piece.probe)
    left = dict.fromkeys(sorted(sites, reverse=True))
    while left:
        waiting, members, is_bound = [next(iter(left))], [], False
        while waiting:
            address = waiting.pop()
            if address not in left:
                continue
            del left[address]
            members.append(address)
            for probe in {piece.probe for piece in sites[address]} & binding:
                is_bound = True
                waiting += of_probe[probe]
        members.sort(reverse=True)
        yield SiteGroup({address: sorted(sites[address], key=_rank) for address in members}, is_bound)


def planned_sites(groups: Iterable[SiteGroup], program: int, bias: int) -> dict[int, PlannedSite]:
    """Return what runs where for a program in a process, which has mapped the module so far above its addresses."""
    planned = {}
    for group in groups:
        names = ((program, min(group.sites)),) if group.is_bound else ()
        bound = frozenset(address + bias for address in group.sites) if group.is_bound else frozenset[int]()
        for address, pieces in group.sites.items():
            mine = tuple(piece._replace(program=program) for piece in pieces)
            planned[address + bias] = PlannedSite(mine, names, bound)
    return planned


def joined(sites: Sequence[PlannedSite]) -> PlannedSite:
    """Return what runs at one instruction for several programs, which are in the order of their insertion."""
    pieces = sorted((piece for site in sites for piece in site.pieces), key=lambda piece: piece.order)
    groups = tuple(dict.fromkeys(group for site in sites for group in site.groups))
    return PlannedSite(tuple(pieces), groups, frozenset[int]().union(*(site.bound for site in sites)))


def _rank(piece: Piece) -> tuple[int, int]:
    return piece.order, piece.probe
