"""Probepoints that are taken away one by one: the others keep their hits, and are attached all the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from dprobes.bpf.lower.lowering_request import Placement
from dprobes.engines.ebpf.attach.map_objects import ProbeCounters
from dprobes.engines.ebpf.attach.site_links import Attachments, Group
from dprobes.engines.ebpf.attach.site_spec import Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

BANK = 8


@dataclass
class Maps:
    """Stand for the probe table."""

    hits: list[int] = field(default_factory=lambda: [0] * 2 * BANK)
    off: list[bool] = field(default_factory=lambda: [False] * 2 * BANK)

    def disable(self, entry: int) -> None:
        self.off[entry] = True

    def disabled(self) -> set[int]:
        return {entry for entry, off in enumerate(self.off) if off}

    def hand_over(self, old: int, new: int) -> tuple[int, int]:
        before = self.hits[old], self.hits[new]
        self.hits[new] = self.hits[old]
        self.off[new], self.off[old] = self.off[old], True
        return before

    def counters(self, entry: int) -> ProbeCounters:
        return ProbeCounters(self.hits[entry], 0, 0, 0)


class Kernel:
    """Stand for links: hits reach the entries that cookies name, if they are enabled."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self.links: list[Link] = []

    def link(self, _group: Group, places: Sequence[tuple[int, int]]) -> Any:
        link = Link(self, tuple(places))
        self.links.append(link)
        return link

    def hit(self, offset: int) -> None:
        for link in self.links:
            for place, cookie in link.places:
                entry = cookie & 0xFFFF_FFFF
                if place == offset and not self.maps.off[entry]:
                    self.maps.hits[entry] += 1

    @property
    def attached(self) -> list[int]:
        return sorted(place for link in self.links for place, _ in link.places)


@dataclass(eq=False)
class Link:
    kernel: Kernel
    places: tuple[tuple[int, int], ...]

    def close(self) -> None:
        self.kernel.links.remove(self)


def site(offset: int, moved: int = 0) -> Site:
    return Site(offset, Placement.BREAKPOINT, "emulated", may_fault=False, moved=moved)


def attachments(count: int) -> tuple[Attachments, Kernel]:
    maps = Maps()
    kernel = Kernel(maps)
    found = Attachments(cast("Any", maps), BANK, kernel.link)
    sites = [(number, site(0x100 + number)) for number in range(count)]
    found.attach(Group(3, "/file", "/file", Placement.BREAKPOINT, sites))
    return found, kernel


def test_the_others_keep_their_hits_and_their_breakpoints() -> None:
    found, kernel = attachments(3)
    for _ in range(5):
        kernel.hit(0x101)
    assert found.take_away(0)
    assert not found.take_away(0)
    kernel.hit(0x100)
    found.renew(at_once=True)
    assert kernel.attached == [0x101, 0x102]
    kernel.hit(0x101)
    kernel.hit(0x102)
    assert [found.hits(n) for n in range(3)] == [0, 6, 1]
    found.take_away(2)
    found.renew(at_once=True)
    kernel.hit(0x101)
    kernel.hit(0x102)
    assert kernel.attached == [0x101]
    assert [found.hits(n) for n in range(3)] == [0, 7, 1]
    found.take_away(1)
    found.renew(at_once=True)
    assert kernel.links == []
    assert found.is_settled


def test_a_hit_that_is_under_way_while_links_change_is_counted() -> None:
    """Its handler has looked at the old entry already, and counts there after the hits were handed over."""
    found, kernel = attachments(2)
    kernel.hit(0x101)
    found.take_away(0)
    found.renew(at_once=True)
    kernel.maps.hits[1] += 1
    kernel.hit(0x101)
    assert found.hits(1) == 3
    assert kernel.maps.hits[1 + BANK] == 2


def test_renewals_wait_for_more_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dprobes.engines.ebpf.attach.site_links.time.monotonic", lambda: now[0])
    found, kernel = attachments(4)
    found.take_away(0)
    found.renew()
    found.take_away(1)
    found.renew()
    assert kernel.maps.off[1 + BANK]
    assert not found.is_settled
    now[0] += 1
    found.renew()
    assert found.is_settled
    found.close()
    assert kernel.links == []


def test_what_handlers_have_disabled_is_found() -> None:
    found, kernel = attachments(3)
    found.take_away(0)
    found.renew(at_once=True)
    assert found.expired() == set()
    kernel.maps.off[2 + BANK] = True
    assert found.expired() == {2}
    found.take_away(2)
    assert found.expired() == set()


def test_a_moved_site_says_so_in_its_cookie() -> None:
    maps = Maps()
    kernel = Kernel(maps)
    found = Attachments(cast("Any", maps), BANK, kernel.link)
    found.attach(Group(3, "/file", "/file", Placement.BREAKPOINT, [(5, site(0x104, 4)), (6, site(0x200, -2))]))
    assert [link.places for link in kernel.links] == [((0x104, 5 | 4 << 32), (0x200, 6 | 0xFFFF_FFFE << 32))]
