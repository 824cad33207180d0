"""Where slots are, and those of a forked child: only what its memory holds."""

from __future__ import annotations

from dprobes.engines.ptrace.breakpoint_sites import Placement
from dprobes.engines.ptrace.tracer.placed_breakpoints import Slot, SlotArea, Slots


def slots_at(*addresses: int) -> Slots:
    made = [Slot(address, 0x400000 + address, address + 3, Placement.PAGE) for address in addresses]
    areas = [SlotArea(0x1000, 0x2000), SlotArea(0x5000, 0x6000)]
    by_site = {(slot.site, b"abc"): slot for slot in made}
    return Slots(areas, {slot.address: slot for slot in made}, {**by_site, (0x500000, b"x"): None})


def test_a_child_keeps_the_slots_that_its_memory_holds() -> None:
    slots = slots_at(0x1000, 0x1020)
    slots.keep(lambda start, end: end == start + 8, lambda _: True)
    assert set(slots.by_address) == {0x1000, 0x1020}
    assert len(slots.by_site) == 3


def test_a_child_forgets_slots_and_areas_that_were_made_after_its_memory_was_copied() -> None:
    slots = slots_at(0x1000, 0x1020, 0x5000)
    slots.keep(lambda start, end: start == 0x1000, lambda address: address < 0x5000)
    assert set(slots.by_address) == {0x1000}
    assert set(slots.by_site) == {(0x401000, b"abc"), (0x500000, b"x")}
    assert [area.start for area in slots.areas] == [0x1000]


def test_slots_of_an_area_lie_one_behind_the_other_until_it_is_full() -> None:
    area, found = SlotArea(0x1000, 0x1040), []
    while (address := area.find(0x20)) is not None:
        area.take(address, 0x20)
        found.append(address)
    assert found == [0x1000, 0x1020]


def test_a_slot_that_is_free_again_is_taken_for_one_of_its_size() -> None:
    area = SlotArea(0x1000, 0x1060, used=0x40, free=[(0x1000, 0x20)])
    assert area.find(0x10) == 0x1040
    assert area.find(0x20) == 0x1000
    area.take(0x1000, 0x20)
    assert (area.used, area.find(0x20)) == (0x40, 0x1040)
