"""What becomes of many sites of a module: plans whose addresses are free, and jumps that leave each other alone."""

from __future__ import annotations

from itertools import pairwise

from dprobes.platform.x86.patches.branch_targets import CodeRange, ControlFlow, ModuleCode, Spans
from dprobes.platform.x86.patches.patch_placer import Placement, Placer, Shared, leads_to
from dprobes.platform.x86.patches.patch_plans import Method, Refusal
from dprobes.platform.x86.patches.trampoline_space import AddressSpace
from dprobes.target.process_maps import Mapping

START, SIZE = 0x7F00_0000_1000, 0x10_0000
ROOM = 96


def mapped(start: int, end: int, path: str) -> Mapping:
    return Mapping(start, end, "r-xp", 0, 0, 0, path, False)


def made(
    code: str, targets: tuple[int, ...] = (), dead: tuple[tuple[int, int], ...] = (), *used: Mapping
) -> tuple[ModuleCode, Placer]:
    raw = bytes.fromhex(code)
    flow = ControlFlow(frozenset(targets), (0,), Spans(dead))
    module = ModuleCode([CodeRange(0, len(raw), raw)], flow, START, SIZE)
    own = [mapped(0x5500_0000_0000, 0x5500_0000_1000, "/program"), mapped(START, START + SIZE, "/module")]
    return module, Placer(module, AddressSpace([*own, *used], START, START + SIZE), ROOM)


def all_but(size: int) -> tuple[Mapping, Mapping]:
    """Return mappings that leave nothing free near the module but so many bytes behind it."""
    return (
        mapped(START - (1 << 32), START, "/before"),
        mapped(START + SIZE + size, START + (1 << 32), "/behind"),
    )


def methods(found: list[Placement | Shared | Refusal]) -> list[Method | str]:
    """Return the method of each placement, and what the others are."""
    return [
        one.plan.method if isinstance(one, Placement) else one.reason if isinstance(one, Refusal) else "shared"
        for one in found
    ]


CODE = "b82a000000 4889e5 112233 55 4889e5 e800000000 c3"
"""mov eax, 42; mov rbp, rsp; adc [rdx], esp; xor eax, [rbp+0x48]; mov ebp, esp; ..."""


def test_one_instruction_is_displaced_where_that_is_possible() -> None:
    _, placer = made(CODE)
    assert methods(list(placer.place([START, START + 5]))) == [Method.PUN, Method.JUMP]


def test_windows_come_first_on_request_and_for_many_sites() -> None:
    code = "4889e5 9090 " * 2001
    _, placer = made(code)
    assert methods(list(placer.place([START], windows_first=True))) == [Method.WINDOW]
    _, placer = made(code)
    assert methods(list(placer.place([START]))) == [Method.PUN]
    _, placer = made(code)
    found = list(placer.place(START + 5 * n for n in range(2001)))
    assert methods(found).count(Method.WINDOW) >= 1995  # but for those that would cross a page
    assert [one.plan.site for one in found if isinstance(one, Placement)][:2] == [START + 10000, START + 9995]


def test_placements_lead_to_trampolines_that_do_not_overlap() -> None:
    module, placer = made("4889e5 9090 " * 50)
    found = [one for one in placer.place(START + 5 * n for n in range(50)) if isinstance(one, Placement)]
    assert len(found) == 50
    trampolines = sorted(one.trampoline for one in found)
    assert min(b - a for a, b in pairwise(trampolines)) >= ROOM
    for one in found:
        assert leads_to(module.ranges[0], one.plan.start) == one.trampoline


def test_each_instruction_of_a_row_is_placed_beside_the_others() -> None:
    code = "4889e5 4889d8 4883c408 48c1e004 488d0437 31c0 4c89f7 4989fc 4531ed 488b07"
    module, placer = made(code * 3)
    lengths = (3, 3, 4, 4, 4, 2, 3, 3, 3, 3) * 3
    sites = [START + sum(lengths[:n]) for n in range(len(lengths))]
    found = list(placer.place(sites))
    placed = [one for one in found if isinstance(one, Placement)]
    assert len(placed) >= len(sites) - 3
    for one in placed:  # all of them, when all have been written
        assert leads_to(module.ranges[0], one.plan.start) == one.trampoline


def test_a_punned_jump_shares_no_byte_with_a_breakpoint() -> None:
    code, targets = "4889e5 112233 55 4889e5 e800000000 c3", (0, 3)
    _, placer = made(code, targets)
    assert methods(list(placer.place([START]))) == [Method.PUN]
    _, placer = made(code, targets)
    (refused,) = placer.place([START], others={START + 3})
    assert refused == Refusal(
        START,
        "it has 3 bytes, a jump 5; a breakpoint changes bytes that its jump would share; "
        "a branch leads to the code after it; a branch leads to it",
    )
    _, placer = made(code, targets)
    found = list(placer.place([START, START + 3], windows_first=False))
    assert methods(found) == [Method.PUN, Method.PUN]  # bytes of another jump may be shared


def test_a_punned_jump_whose_addresses_are_in_use_gives_way_to_a_window() -> None:
    _, placer = made("4889e5 1122 33 44 90", (), (), *all_but(1 << 20))
    assert methods(list(placer.place([START]))) == [Method.WINDOW]


def test_a_refusal_names_all_obstacles() -> None:
    _, placer = made("4889e5 1122 33 44 90", (0, 3), (), *all_but(1 << 20))
    assert list(placer.place([START])) == [
        Refusal(
            START,
            "it has 3 bytes, a jump 5; no address that punned jumps of its bytes lead to is free; "
            "a branch leads to the code after it; a branch leads to it",
        )
    ]


def test_without_memory_near_it_there_is_no_jump() -> None:
    _, placer = made("b82a000000 c3", (0,), (), *all_but(0))
    found = list(placer.place([START]))
    assert methods(found) == [
        "no memory near it is free; no address that punned jumps of its bytes lead to is free; a branch leads to it"
    ]


def test_what_is_no_site_is_refused_with_its_reason() -> None:
    _, placer = made("cc 90")
    assert methods(list(placer.place([START, START + 90]))) == [
        "it is not in the code of the module",
        "it is a software interrupt",
    ]


def test_dead_bytes_and_short_jumps() -> None:
    # ret with dead bytes behind it; two bytes at a target whose neighbours are targets.
    code = "c3 909090909090 ffd0 c3 cc cc"
    _, placer = made(code, (7, 9), ((1, 7),))
    assert methods(list(placer.place([START], windows_first=True))) == [Method.DEAD]
    _, placer = made(code, (7, 9), ((1, 7),), *all_but(1 << 20))
    found = list(placer.place([START + 7]))
    assert methods(found) == [Method.SHORT]
    assert isinstance(found[0], Placement)
    assert [write.address for write in found[0].writes] == [START + 1, START + 7]


def test_what_crosses_a_page_comes_last() -> None:
    code = "90" * 0xFFE + "b82a000000 90"  # mov eax, 42: two bytes in one page, three in the next one
    _, placer = made(code)
    found = list(placer.place([START + 0xFFE]))
    assert methods(found) == [Method.PUN]
    assert isinstance(found[0], Placement)
    assert found[0].writes[0].data[:1] in (b"\xe9", b"\x2e")
    assert len(found[0].writes[0].data) == 2
    _, placer = made(code, (0xFFE,), (), *all_but(1 << 20))
    found = list(placer.place([START + 0xFFE]))
    assert methods(found) == [Method.JUMP]
    assert isinstance(found[0], Placement)
    assert found[0].plan.crosses_page


def test_a_second_probe_in_a_window_shares_its_trampoline() -> None:
    _, placer = made("55 4889e5 4883ec10 90909090 c3", (0, 1))
    (first,) = placer.place([START + 1], windows_first=True)
    assert methods([first]) == [Method.WINDOW]
    assert isinstance(first, Placement)
    assert list(placer.place([START + 4, START + 1])) == [Shared(START + 4, first), Shared(START + 1, first)]
    assert placer.remove(first)
    assert Method.WINDOW in methods(list(placer.place([START + 4], windows_first=True)))


def test_a_probe_behind_a_landing_mark_shares_the_trampoline_of_the_mark() -> None:
    _, placer = made("f30f1efa b82a000000 c3")
    (first,) = placer.place([START])
    assert isinstance(first, Placement)
    assert list(placer.place([START + 4])) == [Shared(START + 4, first)]
    assert list(placer.place([START])) == [Shared(START, first)]


def test_neighbours_that_need_each_other_share_a_trampoline() -> None:
    code = "4883c408 5b c3"  # add rsp, 8; pop rbx; ret
    _, placer = made(code, (0, 6), (), *all_but(1 << 20))
    last, middle, first = placer.place([START, START + 4, START + 5])
    assert methods([last]) == [Method.LEAD]
    assert isinstance(last, Placement)
    assert last.plan.start == START
    assert [middle, first] == [Shared(START + 4, last), Shared(START, last)]


def test_a_second_probe_leaves_the_jump_of_the_first_one_alone() -> None:
    # A short jump leads to padding that the last instruction could use as well.
    module, placer = made("ffd0 c3 909090909090", (0, 2), ((3, 9),), *all_but(1 << 20))
    (first,) = placer.place([START])
    assert methods([first]) == [Method.SHORT]
    before = bytes(module.ranges[0].current)
    (second,) = placer.place([START + 2])
    assert isinstance(second, Refusal)
    assert "its bytes belong to the jump of another probe" in second.reason
    assert bytes(module.ranges[0].current) == before


def test_bytes_that_a_punned_jump_relies_on_are_not_written() -> None:
    module, placer = made("4889e5 1122 b82a000000 90")
    (first,) = placer.place([START])
    assert isinstance(first, Placement)
    assert first.plan.method is Method.PUN
    assert first.relied_on == START + 5
    (second,) = placer.place([START + 3])
    assert isinstance(second, Refusal)
    assert "the punned jump of another probe relies on its bytes" in second.reason
    assert placer.remove(first)
    assert bytes(module.ranges[0].current) == module.ranges[0].original
    (second,) = placer.place([START + 3])
    assert isinstance(second, Placement)


def test_a_jump_that_another_one_relies_on_stays() -> None:
    module, placer = made("31c0 4889e5 11223344 90")
    second, first = placer.place([START, START + 2])
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert first.relied_on > START + 2
    assert not placer.remove(second)
    assert leads_to(module.ranges[0], START) == first.trampoline
    assert placer.remove(first)
    assert placer.remove(second)
    assert bytes(module.ranges[0].current) == module.ranges[0].original


def test_a_short_jump_whose_padding_others_rely_on_stays_whole() -> None:
    module, placer = made("ffd0 c3 9090909090", (0, 2), ((3, 8),), *all_but(1 << 20))
    (first,) = placer.place([START])
    assert methods([first]) == [Method.SHORT]
    assert isinstance(first, Placement)
    code = module.ranges[0]
    code.rely(START + 7, START + 8)
    before = bytes(code.current)
    assert not placer.remove(first)
    assert bytes(code.current) == before
    code.rely(START + 7, START + 8, -1)
    assert placer.remove(first)
    assert bytes(code.current) == code.original


def test_an_address_from_which_the_way_back_is_too_long_is_not_taken() -> None:
    _, placer = made("55 ffffff7f 90", (0, 1))  # push rbp; the punned jump leads as far as one can
    (found,) = placer.place([START])
    assert isinstance(found, Refusal)
    assert "no address that punned jumps of its bytes lead to is free" in found.reason
    _, placer = made("55 ffffff7e 90", (0, 1))
    (found,) = placer.place([START])
    assert isinstance(found, Placement)
    assert found.trampoline == START + 5 + 0x7EFFFFFF


def test_a_window_can_have_more_room_unless_another_jump_relies_on_its_bytes() -> None:
    module, placer = made("4889e5 4889d8 90", (), (), *all_but(1 << 20))
    (found,) = placer.place([START])
    assert isinstance(found, Placement)
    larger = placer.enlarge(found, 300)
    assert larger is not None
    assert (larger.plan, larger.room) == (found.plan, 300)
    assert larger.trampoline >= found.trampoline + ROOM
    assert leads_to(module.ranges[0], START) == larger.trampoline
    assert list(placer.place([START + 3])) == [Shared(START + 3, larger)]
    module.ranges[0].rely(START + 1, START + 2)
    assert placer.enlarge(larger, 600) is None


def test_no_displaced_instruction_begins_with_what_looks_like_a_breakpoint() -> None:
    # The distance has its lowest byte where the second instruction begins.
    module, placer = made("55 4889e5 90", (), (), *all_but(1 << 20))
    for _ in range(300):
        (found,) = placer.place([START])
        assert isinstance(found, Placement)
        assert 0xCC not in (module.ranges[0].current[1], module.ranges[0].current[4])
        assert placer.remove(found)


def test_other_sites_are_avoided() -> None:
    _, placer = made("4889e5 4889d8 90", (), (), *all_but(1 << 20))
    (found,) = placer.place([START], others=[START + 3])
    assert methods([found])[0] != Method.WINDOW
