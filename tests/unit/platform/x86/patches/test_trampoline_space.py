"""Which addresses are given out: free ones within reach, in blocks or in single pages, away from what will grow."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from iced_x86 import Decoder, Mnemonic

from dprobes.platform.x86.patches.trampoline_space import TRAPS, AddressSpace
from dprobes.target.process_maps import Growth, Mapping

MIB = 1 << 20
GIB = 1 << 30
PAGE = 0x1000
BLOCK = 0x10000
MODULE, MODULE_END = 0x7F00_0000_0000, 0x7F00_0020_0000
REACH = MODULE - 2 * GIB, MODULE_END + 2 * GIB


def mapping(start: int, end: int, path: str = "/lib") -> Mapping:
    return Mapping(start, end, "r-xp", 0, 0, 0, path, False)


def space(*others: Mapping, regions_max: int = 1000) -> AddressSpace:
    program = mapping(0x5500_0000_0000, 0x5500_0010_0000, "/program")
    mappings = [program, mapping(MODULE, MODULE_END), *others, mapping(MODULE + 32 * GIB, MODULE + 33 * GIB, "[stack]")]
    growth = Growth(program.end, 16 * GIB)
    return AddressSpace(mappings, MODULE, MODULE_END, growth=growth, regions_max=regions_max)


def test_trampolines_share_a_block_near_the_module() -> None:
    free = space()
    places = [free.allocate(*REACH, 100) for _ in range(3)]
    assert places == [MODULE_END + 16 * MIB, MODULE_END + 16 * MIB + 112, MODULE_END + 16 * MIB + 224]
    assert free.regions() == [(MODULE_END + 16 * MIB, MODULE_END + 16 * MIB + BLOCK)]


def test_a_full_block_is_followed_by_the_next_one() -> None:
    free = space()
    first = MODULE_END + 16 * MIB
    places = [free.allocate(first, first + GIB, 0x4000) for _ in range(5)]
    assert places == [first, first + 0x4000, first + 0x8000, first + 0xC000, first + BLOCK]
    assert free.regions() == [(first, first + 2 * BLOCK)]


def test_a_trampoline_larger_than_a_block_has_its_own() -> None:
    free = space()
    start = free.allocate(*REACH, BLOCK + 1)
    assert start is not None
    assert free.regions() == [(start, start + BLOCK + PAGE)]
    assert free.allocate(start, start + GIB, 2 * PAGE) == start + BLOCK + PAGE


def test_a_block_that_is_out_of_reach_is_not_used() -> None:
    free = space()
    above = free.allocate(*REACH, 100)
    below = free.allocate(MODULE - GIB, MODULE, 100)
    assert above == MODULE_END + 16 * MIB
    assert below == MODULE - 16 * MIB - BLOCK
    assert free.allocate(*REACH, 100) in (above + 112, below + 112)


def test_a_small_gap_is_used_as_far_from_mappings_as_it_allows() -> None:
    free = space(mapping(MODULE_END + 3 * MIB, MODULE_END + 4 * GIB), mapping(MODULE - 4 * GIB, MODULE))
    assert free.allocate(*REACH, 100) == MODULE_END + MIB
    free = space(mapping(MODULE_END + 2 * BLOCK, MODULE_END + 4 * GIB), mapping(MODULE - 4 * GIB, MODULE))
    assert [free.allocate(*REACH, BLOCK) for _ in range(3)] == [MODULE_END, MODULE_END + BLOCK, None]


def test_without_a_gap_in_reach_there_is_no_address() -> None:
    free = space(mapping(MODULE_END, MODULE_END + 4 * GIB), mapping(MODULE - 4 * GIB, MODULE))
    assert free.allocate(*REACH, 100) is None
    assert free.claim(*REACH, 100) is None
    assert free.claim(MODULE + 8, MODULE + 8, 100) is None


def test_a_claim_of_one_address_gets_the_page_that_holds_it() -> None:
    free = space()
    assert free.claim(MODULE_END + 0x5123, MODULE_END + 0x5123, 100) == MODULE_END + 0x5123
    assert free.regions() == [(MODULE_END + 0x5000, MODULE_END + 0x6000)]
    assert free.claim(MODULE_END + 0x5123, MODULE_END + 0x5123, 100) is None
    assert free.claim(MODULE_END + 0x5123 + 99, MODULE_END + 0x5123 + 99, 100) is None
    assert free.claim(MODULE_END + 0x5123 - 99, MODULE_END + 0x5123 - 99, 100) is None
    assert free.claim(MODULE_END + 0x5123 + 100, MODULE_END + 0x5123 + 100, 100) == MODULE_END + 0x5123 + 100


def test_a_claim_across_pages_gets_both() -> None:
    free = space(mapping(MODULE_END + 0x8000, MODULE_END + 0x9000))
    assert free.claim(MODULE_END + 0x5FF0, MODULE_END + 0x5FF0, 100) == MODULE_END + 0x5FF0
    assert free.regions() == [(MODULE_END + 0x5000, MODULE_END + 0x7000)]
    assert free.claim(MODULE_END + 0x7FF0, MODULE_END + 0x7FF0, 100) is None  # the second page is the process's


def test_a_claim_of_some_addresses_goes_round_what_is_used() -> None:
    free = space(mapping(MODULE_END + 0x6000, MODULE_END + 0x7000))
    place = MODULE_END + 0x5F00
    assert [free.claim(place, place + 255, 100) for _ in range(3)] == [place, place + 100, None]
    assert free.claim(MODULE_END + 0x6F80, MODULE_END + 0x707F, 100) == MODULE_END + 0x7000


def test_claims_of_many_addresses_share_a_page() -> None:
    free = space()
    first, last = MODULE_END + 0x10123, MODULE_END + 0x20122
    places = [free.claim(first, last, 0x300) for _ in range(6)]
    page = MODULE_END + 0x11000
    assert places == [page, page + 0x300, page + 0x600, page + 0x900, page + 0xC00, page + PAGE]


def test_pages_before_the_latest_one_are_found_when_nothing_else_is_free() -> None:
    free = space(mapping(MODULE_END + 0x13000, MODULE_END + GIB))
    first, last = MODULE_END + 0x10000, MODULE_END + 0x20000
    assert free.claim(MODULE_END + 0x12000, last, PAGE) == MODULE_END + 0x12000
    assert [free.claim(first, last, PAGE) for _ in range(3)] == [first, first + PAGE, None]


def test_pages_behind_the_latest_one_come_first() -> None:
    free = space()
    first, last = MODULE_END + 0x10000, MODULE_END + 0x20000
    assert free.claim(first + 2 * PAGE, last, PAGE) == first + 2 * PAGE
    assert free.claim(first, last, PAGE) == first + 3 * PAGE


def test_claims_and_blocks_do_not_overlap() -> None:
    free, random = space(), Random(5)
    taken: list[tuple[int, int]] = []
    for _ in range(3000):
        size = random.randrange(1, 400)
        if random.random() < 0.3:
            place = free.allocate(*REACH, size)
        else:
            first = MODULE_END + 16 * MIB - 4 * PAGE + random.randrange(64 * PAGE)
            place = free.claim(first, first + random.choice((0, 255, 65535)), size)
            assert place is None or first <= place <= first + 65535
        if place is not None:
            taken.append((place, place + size))
    taken.sort()
    assert len(taken) > 900
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    regions = free.regions()
    assert all(any(low <= start and end <= high for low, high in regions) for start, end in taken)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(regions))


def test_what_is_released_can_be_claimed_again() -> None:
    free = space()
    place = MODULE_END + 0x5123
    assert free.claim(place, place, 100) == place
    free.release(place, 100)
    assert free.regions() == []
    assert free.claim(place, place, 200) == place


def test_no_more_regions_are_begun_than_allowed() -> None:
    free = space(regions_max=2)
    places = [MODULE_END + n * 0x10000 for n in range(3)]
    assert [free.claim(place, place, 100) for place in places] == [places[0], places[1], None]
    assert free.claim(places[0] + 200, places[0] + 200, 100) == places[0] + 200
    assert free.allocate(*REACH, 100) is None


def place_in(free: AddressSpace, address: int) -> bool:
    return free.claim(address, address, 100) == address


PROGRAM = mapping(0x5500_0000_0000, 0x5500_0010_0000, "/program")
BEHIND = PROGRAM.end + 3 * GIB, PROGRAM.end + 4 * GIB


@pytest.mark.parametrize("has_heap", [False, True])
def test_nothing_is_put_where_the_heap_may_grow(has_heap: bool) -> None:
    start = PROGRAM.end + 5 * MIB
    heap = [mapping(start, start + MIB, "[heap]")] if has_heap else []
    free = AddressSpace([PROGRAM, *heap, mapping(*BEHIND)], PROGRAM.start, PROGRAM.end, growth=Growth(start))
    assert place_in(free, start - PAGE)
    assert not place_in(free, start - 50)
    assert not any(place_in(free, address) for address in range(start, BEHIND[0], 16 * MIB))
    assert place_in(free, BEHIND[1])
    assert free.allocate(PROGRAM.start - GIB, PROGRAM.end + 2 * GIB, 100) == PROGRAM.start - 16 * MIB - BLOCK


def test_a_heap_of_which_nothing_is_known_begins_behind_the_program() -> None:
    free = AddressSpace([PROGRAM, mapping(*BEHIND)], PROGRAM.start, PROGRAM.end)
    assert not any(place_in(free, address) for address in range(PROGRAM.end, BEHIND[0], 16 * MIB))
    assert free.allocate(PROGRAM.start - GIB, PROGRAM.end + 2 * GIB, 100) == PROGRAM.start - 16 * MIB - BLOCK
    start = PROGRAM.end + 5 * MIB
    heap = mapping(start, start + MIB, "[heap]")
    free = AddressSpace([PROGRAM, heap, mapping(*BEHIND)], PROGRAM.start, PROGRAM.end)
    assert place_in(free, start - PAGE)
    assert not place_in(free, heap.end)


def test_nothing_is_put_where_the_stack_may_grow() -> None:
    stack = mapping(MODULE + 32 * GIB, MODULE + 33 * GIB, "[stack]")
    mappings = [PROGRAM, mapping(MODULE, MODULE_END), stack]
    free = AddressSpace(mappings, MODULE, MODULE_END, growth=Growth(PROGRAM.end, 20 * GIB))
    assert place_in(free, stack.start - 20 * GIB - PAGE)
    assert not place_in(free, stack.start - 20 * GIB)
    free = AddressSpace(mappings, MODULE, MODULE_END, growth=Growth(PROGRAM.end, None))
    assert not any(place_in(free, address) for address in range(MODULE_END, stack.start, GIB))
    assert place_in(free, MODULE - GIB)


@pytest.mark.parametrize("address", [0x10000, 0xFFFF_F000])
def test_low_addresses_are_left_alone(address: int) -> None:
    free = AddressSpace([mapping(1 << 32, (1 << 32) + MIB)], 1 << 32, (1 << 32) + MIB, growth=Growth(1 << 40))
    assert free.claim(address, address, 100) is None


def test_a_program_at_low_addresses_has_trampolines_between_it_and_its_heap() -> None:
    program = mapping(0x400000, 0x500000, "/program")
    free = AddressSpace([program], program.start, program.end, growth=Growth(0x500000 + 64 * MIB))
    assert free.allocate(0, 0x400000 + 2 * GIB, 100) == 0x500000 + 16 * MIB
    assert not place_in(free, 0x500000 + 64 * MIB)


def test_a_program_at_low_addresses_has_trampolines_below_it_where_its_heap_follows() -> None:
    program = mapping(0x400000, 0x500000, "/program")
    free = AddressSpace([program], program.start, program.end, growth=Growth(0x500000))
    assert free.allocate(0, 0x400000 + 2 * GIB, 100) == 0x400000 - MIB - BLOCK
    assert place_in(free, 0x100000)
    assert not place_in(free, 0x100000 - PAGE)


def test_addresses_end_where_those_of_programs_do() -> None:
    free = space()
    top = (1 << 47) - 2 * PAGE
    assert free.claim(top, top, 100) is None
    assert free.claim(top - 100, top - 100, 100) == top - 100


def test_what_leads_to_an_address_over_several_instructions_traps_in_its_middle() -> None:
    free, random = space(mapping(MODULE_END + 96 * MIB, MODULE_END + 100 * MIB)), Random(7)
    taken: list[tuple[int, int]] = []
    for _ in range(1500):
        base, size = MODULE + random.randrange(2 * MIB), random.randrange(50, 400)
        landings = random.sample(range(4), random.randrange(1, 4))
        place = free.allocate(*REACH, size, base, landings)
        assert place is not None
        distance = (place - base).to_bytes(8, "little", signed=True)
        assert all(distance[number] in TRAPS for number in landings)
        assert place + size <= MODULE_END + 96 * MIB or place >= MODULE_END + 100 * MIB
        taken.append((place, place + size))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    regions = free.regions()
    assert all(any(low <= start and end <= high for low, high in regions) for start, end in taken)
    assert len(regions) < 200


def test_bytes_that_trap_are_no_instructions_for_programs() -> None:
    privileged = {Mnemonic.HLT, Mnemonic.CLI, Mnemonic.STI}
    for byte in TRAPS:
        for behind in (0x00, 0x40, 0x90, 0xC0, 0xFF):
            instruction = Decoder(64, bytes([byte]) + bytes([behind]) * 14, ip=0).decode()
            assert instruction.is_invalid or instruction.mnemonic in privileged or byte == 0xD6, hex(byte)


def test_where_no_distance_traps_there_is_no_address() -> None:
    free = space(mapping(MODULE_END + 16 * MIB, MODULE_END + 4 * GIB), mapping(MODULE - 4 * GIB, MODULE))
    assert free.allocate(*REACH, 100, MODULE_END, (3,)) is None
    assert free.allocate(*REACH, 100, MODULE_END, (2,)) is not None
