"""The slots of a forked child: only what its memory holds."""

from __future__ import annotations

from dprobes.engines.ptrace.tracer.slots import Placement, Slot, SlotArea, Slots


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
