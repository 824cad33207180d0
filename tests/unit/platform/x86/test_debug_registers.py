"""Slots of debug registers, and the bits that say what they watch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dprobes.platform.x86.debug_registers import (
    SLOTS,
    Watch,
    assign,
    control_bits,
    decode,
    is_enabled,
    slot_mask,
    slots_hit,
)
from dprobes.rpn.rpn_program import Access

WATCHES = st.builds(
    Watch,
    address=st.integers(0, 1 << 44).map(lambda n: n * 8),
    length=st.sampled_from([1, 2, 4, 8]),
    access=st.sampled_from([Access.EXECUTE, Access.WRITE, Access.READ_WRITE]),
)


def test_the_bits_are_those_of_the_manual() -> None:
    # L0, R/W0 = write, LEN0 = 8 bytes, as the kernel showed it for gdb's "watch -l" of a long.
    assert control_bits(0, Watch(0x1000, 8, Access.WRITE)) == 0x00090001
    assert control_bits(1, Watch(0x1000, 4, Access.READ_WRITE)) == 0x00F00004
    assert control_bits(2, Watch(0x1000, 2, Access.READ_WRITE)) == 0x07000010
    assert control_bits(3, Watch(0x1000, 1, Access.EXECUTE)) == 0x00000040
    assert slot_mask(3) == 0xF00000C0
    assert is_enabled(0x80, 3)  # by its global bit
    assert slots_hit(0xFFFF4FF5) == [0, 2]


@given(st.lists(WATCHES, min_size=4, max_size=4))
def test_what_is_written_into_the_registers_is_read_from_them(watches: list[Watch]) -> None:
    control = sum(control_bits(slot, watch) for slot, watch in enumerate(watches))
    assert [decode(control, slot, watches[slot].address) for slot in SLOTS] == watches
    for slot in SLOTS:
        assert decode(control & ~slot_mask(slot), slot, watches[slot].address) is None


def test_a_slot_that_watches_ports_is_nobody_s_watch() -> None:
    assert decode(0x00020001, 0, 0x80) is None


@given(
    st.dictionaries(st.sampled_from(SLOTS), st.sampled_from("abcdefgh"), max_size=4),
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6),
    st.sets(st.sampled_from(SLOTS)),
)
def test_slots_are_given_once_and_kept(current: dict[int, str], wanted: list[str], taken: set[int]) -> None:
    current = {slot: item for slot, item in current.items() if list(current.values()).count(item) == 1}
    taken -= current.keys()
    slots, without = assign(current, wanted, taken)
    assert sorted([*slots.values(), *without]) == sorted(wanted)
    assert not slots.keys() & taken
    assert all(slots[slot] == item for slot, item in current.items() if item in wanted)
    assert not without or len(slots) == 4 - len(taken)


def test_an_access_is_one_that_a_watch_is_hit_by() -> None:
    write, both = Watch(0x1000, 4, Access.WRITE), Watch(0x1000, 4, Access.READ_WRITE)
    assert write.is_touched(0xFFC, 8, writes=True)
    assert write.is_touched(0x1003, 1, writes=True)
    assert not write.is_touched(0xFF8, 8, writes=True)
    assert not write.is_touched(0x1004, 8, writes=True)
    assert not write.is_touched(0x1000, 4, writes=False)
    assert both.is_touched(0x1000, 4, writes=False)
    assert not Watch(0x1000, 1, Access.EXECUTE).is_touched(0x1000, 1, writes=True)
