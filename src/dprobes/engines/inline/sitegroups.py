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
    from collections.abc import Iterable, Iterator

    from dprobes.engines.inline.pieces import Piece

__all__ = ["SiteGroup", "site_groups"]


class SiteGroup(NamedTuple):
    """
    Hold the pieces of some instructions, by their addresses, each in the order in which they run.

    The highest address comes first: a punned jump shares bytes with what follows.

    ``is_bound`` says that there are jumps at all of them or at none.
    """

    sites: dict[int, list[Piece]]
    is_bound: bool

    @property
    def probes(self) -> set[int]:
        """The probepoints that the pieces are for."""
        return {piece.probe for pieces in self.sites.values() for piece in pieces}


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


def _rank(piece: Piece) -> tuple[int, int]:
    return piece.order, piece.probe
