"""Which plans an instruction allows, by its bytes and by the branches around it."""

from __future__ import annotations

import pytest

from dprobes.platform.x86.patches.branch_targets import CodeRange, ControlFlow, ModuleCode, Spans
from dprobes.platform.x86.patches.patch_plans import Method, Plan, Reach, Site, look_at

LINK, BIAS = 0x1000, 0x7F00_0000_0000
START = LINK + BIAS
SIZE = 0x10_0000
AWAY = (1 << 31) - SIZE - (1 << 16)


def module_of(
    code: str,
    targets: tuple[int, ...] = (),
    *,
    link: int = LINK,
    starts: tuple[int, ...] = (0,),
    dead: tuple[tuple[int, int], ...] = (),
    vague: tuple[tuple[int, int], ...] = (),
    restartable: tuple[tuple[int, int], ...] = (),
) -> ModuleCode:
    """Return a module with this code; all places count from its start."""

    def spans(ranges: tuple[tuple[int, int], ...]) -> Spans:
        return Spans((start + link, end + link) for start, end in ranges)

    flow = ControlFlow(
        frozenset(target + link for target in targets),
        tuple(start + link for start in starts),
        spans(dead),
        spans(vague),
        spans(restartable),
    )
    raw = bytes.fromhex(code)
    return ModuleCode([CodeRange(link, link + len(raw), raw)], flow, BIAS, SIZE)


def site_at(module: ModuleCode, place: int = 0) -> Site:
    found = look_at(module, module.ranges[0].start + place)
    assert isinstance(found, Site), found
    return found


def anywhere(jump: int) -> tuple[Reach]:
    return (Reach(0, jump + 5 - AWAY, jump + 5 + AWAY),)


# Jumps in the instruction's own bytes


def test_an_instruction_of_five_bytes_has_room_for_the_jump() -> None:
    site = site_at(module_of("b82a000000 c3"))
    raw = bytes.fromhex("b82a000000")
    assert site.jump() == Plan(Method.JUMP, START, START, raw, (5,), 5, anywhere(START))


def test_of_a_longer_instruction_only_five_bytes_change() -> None:
    plan = site_at(module_of("48b8 0102030405060708 c3")).jump()
    assert isinstance(plan, Plan)
    assert (len(plan.raw), plan.written) == (10, 5)


@pytest.mark.parametrize(
    ("code", "targets", "reason"),
    [
        ("c3", (), "it has 1 byte, a jump 5"),
        ("c5fd6f07 c3", (), "it has 4 bytes, a jump 5"),
        ("f0 48 0fb10f", (1,), "a branch leads into it"),  # lock cmpxchg, with a way round the prefix
    ],
)
def test_what_has_no_room_for_the_jump(code: str, targets: tuple[int, ...], reason: str) -> None:
    assert site_at(module_of(code, targets)).jump() == reason


def test_a_branch_behind_the_fifth_byte_does_no_harm() -> None:
    assert isinstance(site_at(module_of("48b8 0102030405060708 c3", (6,))).jump(), Plan)


# Punned jumps


def test_a_punned_jump_has_the_following_bytes_as_its_upper_ones() -> None:
    plan = site_at(module_of("4889e5 112233445566")).puns()  # mov rbp, rsp; 11 22 33 44 is what follows
    assert isinstance(plan, Plan)
    assert (plan.method, plan.written, plan.raw.hex()) == (Method.PUN, 3, "4889e5")
    assert plan.reaches == (
        Reach(0, START + 5 + 0x22110000, START + 5 + 0x2211FFFF),
        Reach(1, START + 6 + 0x33221100, START + 6 + 0x332211FF),
        Reach(2, START + 7 + 0x44332211, START + 7 + 0x44332211),
    )
    assert [plan.end(reach) for reach in plan.reaches] == [START + 5, START + 6, START + 7]


def test_a_high_last_byte_leads_backwards() -> None:
    plan = site_at(module_of("55 000000f0")).puns()
    assert isinstance(plan, Plan)
    assert plan.reaches == (Reach(0, START + 5 - 0x10000000, START + 5 - 0x10000000),)


def test_a_punned_jump_sees_the_bytes_that_another_one_has_written() -> None:
    module = module_of("4889e5 112233445566")
    module.ranges[0].write(START + 3, b"\xe9\x44")
    plan = site_at(module).puns()
    assert isinstance(plan, Plan)
    assert plan.reaches[0].first == START + 5 + 0x44E90000


def test_addresses_below_zero_are_none() -> None:
    module = ModuleCode(
        [CodeRange(0x1000, 0x1007, bytes.fromhex("55 000000f0 90 90"))], ControlFlow(frozenset()), 0, SIZE
    )
    found = look_at(module, 0x1000)
    assert isinstance(found, Site)
    assert found.puns() == "no jump that its bytes allow leads to an address"


def test_a_branch_round_a_prefix_leaves_the_rest_as_it_is() -> None:
    plan = site_at(module_of("f0 48 0fb10f 90", (1,))).puns()
    assert isinstance(plan, Plan)
    assert plan.written == 1
    assert plan.reaches == (Reach(0, START + 5 + 0x0FB10F48, START + 5 + 0x0FB10F48),)


def test_a_punned_jump_stays_in_its_page() -> None:
    code = "90" * 14 + "4889e5" + "11223344"
    plan = site_at(module_of(code, link=0x1FF0), 14).puns()  # two bytes in one page, the third in the next one
    assert isinstance(plan, Plan)
    assert (plan.written, plan.crosses_page) == (2, False)
    base = BIAS + 0x1FF0 + 14
    assert plan.reaches == (
        Reach(0, base + 5 + 0x2211E500, base + 5 + 0x2211E5FF),
        Reach(1, base + 6 + 0x332211E5, base + 6 + 0x332211E5),
    )


def test_at_the_end_of_the_code_nothing_follows_to_pun_with() -> None:
    assert site_at(module_of("90 90 c3")).puns() == "no jump that its bytes allow leads to an address"


# Windows


def test_a_window_holds_whole_instructions() -> None:
    site = site_at(module_of("55 4889e5 4883ec10 c3"))  # push rbp; mov rbp, rsp; sub rsp, 16
    raw = bytes.fromhex("554889e54883ec10")
    assert site.window(()) == Plan(Method.WINDOW, START, START, raw, (1, 3, 4), 5, anywhere(START))


def test_a_call_may_end_a_window() -> None:
    plan = site_at(module_of("55 e800000000")).window(())
    assert isinstance(plan, Plan)
    assert plan.emulates_call


@pytest.mark.parametrize(
    ("code", "targets", "reason"),
    [
        ("55 4889e5 90", (1,), "a branch leads to the code after it"),
        ("55 4889e5 90", (4,), "a branch leads to the code after it"),
        ("90 f0 0fb10f", (2,), "a branch leads to the code after it"),  # round the prefix of the second one
        ("f0 0fb10f 90", (1,), "a branch leads into it"),
        ("ffd0 90 90 90", (), "a call would come back into the middle of a window"),
        ("90 ffd0 90 90 90", (), "a call would come back into the middle of a window"),
        ("0f05 90 90 90", (), "a system call would come back into the middle of a window"),
        ("90 90 90 0f05", (), "a system call would come back into the middle of a window"),
        ("cd80 90 90 90", (), "a system call would come back into the middle of a window"),
        ("90 cc 90 90 90", (), "the code after it cannot be executed elsewhere"),
        ("90 f30f1efa", (), "the code after it cannot be executed elsewhere"),
        ("90 06 90 90 90", (), "the code after it cannot be executed elsewhere"),
        ("90 90", (), "the code after it cannot be executed elsewhere"),  # the code ends
        ("c3 90 90 90 90", (), "too few dead bytes follow it"),
    ],
)
def test_what_cannot_be_a_window(code: str, targets: tuple[int, ...], reason: str) -> None:
    assert site_at(module_of(code, targets)).window(()) == reason


def test_a_window_may_begin_at_a_target_and_end_before_one() -> None:
    assert isinstance(site_at(module_of("55 4889e5 90 90", (0, 5))).window(()), Plan)


def test_a_window_holds_no_other_probe() -> None:
    module = module_of("55 4889e5 90 90")
    assert site_at(module).window((START + 4,)) == "another probe follows too closely"
    assert isinstance(site_at(module).window((START + 5,)), Plan)


def test_code_that_computes_where_it_jumps_to_has_no_windows() -> None:
    module = module_of("55 4889e5 90", vague=((0, 5),))
    assert site_at(module).window(()) == "its function has computed jumps"
    assert site_at(module, 4).lead(()) == "its function has computed jumps"


def test_a_window_ends_before_a_restartable_sequence() -> None:
    module = module_of("55 4889e5 90", restartable=((4, 5),))
    assert site_at(module).window(()) == "the code after it cannot be executed elsewhere"


def test_the_last_instructions_of_a_function_may_be_followed_by_dead_bytes() -> None:
    plan = site_at(module_of("5d c3 909090909090", dead=((2, 8),))).window(())
    assert plan == Plan(Method.DEAD, START, START, bytes.fromhex("5dc3"), (1, 1), 5, anywhere(START))


def test_too_few_dead_bytes_are_none() -> None:
    assert site_at(module_of("5d c3 909090", dead=((2, 4),))).window(()) == "too few dead bytes follow it"


# Short jumps


def test_a_short_jump_leads_to_dead_bytes_that_hold_a_jump() -> None:
    module = module_of("ffd0 c3 9090909090 9090909090 90", dead=((3, 14),))
    plans = list(site_at(module).shorts())
    padding = START + 3
    assert plans == [
        Plan(Method.SHORT, START, START, b"\xff\xd0", (2,), 2, anywhere(padding), padding, emulates_call=True)
    ]
    assert plans[0].end(plans[0].reaches[0]) == START + 2


def test_dead_bytes_before_it_will_do_and_those_of_others_will_not() -> None:
    module = module_of("c3 909090909090 ffd0 c3 9090909090", dead=((1, 7), (10, 15)))
    assert [plan.padding for plan in site_at(module, 7).shorts()] == [START + 1, START + 10]
    module.ranges[0].write(START + 1, b"\xcc")
    assert [plan.padding for plan in site_at(module, 7).shorts()] == [START + 2, START + 10]
    module.ranges[0].rely(START + 6, START + 7)
    assert [plan.padding for plan in site_at(module, 7).shorts()] == [START + 10]


@pytest.mark.parametrize(("distance", "found"), [(127, 1), (128, 0)])
def test_a_short_jump_does_not_lead_far(distance: int, found: int) -> None:
    code = "ffd0" + "00" * distance + "9090909090"
    module = module_of(code, dead=((2 + distance, 7 + distance),))
    assert len(list(site_at(module).shorts())) == found


def test_one_byte_leads_to_where_the_next_one_says() -> None:
    code = "c3 05 000000 0000 9090909090"
    module = module_of(code, dead=((7, 12),))
    plans = list(site_at(module).shorts())
    assert [(plan.written, plan.padding) for plan in plans] == [(1, START + 7)]
    assert list(site_at(module_of(code, dead=((8, 12),))).shorts()) == []


# Windows that begin before the instruction


def test_what_leads_to_an_instruction_may_be_displaced_with_it() -> None:
    module = module_of("53 4883c408 5b c3")  # push rbx; add rsp, 8; pop rbx; ret
    plan = site_at(module, 6).lead(())
    raw = bytes.fromhex("4883c4085bc3")
    assert plan == Plan(Method.LEAD, START + 6, START + 1, raw, (4, 1, 1), 5, anywhere(START + 1))
    assert plan.lead == 5


@pytest.mark.parametrize(
    ("code", "place", "targets", "reason"),
    [
        ("4883c408 5b c3", 5, (5,), "a branch leads to it"),
        ("4883c408 5b c3", 5, (4,), "a branch leads to the code before it"),
        ("ffd0 90 5b c3", 4, (), "the code before it cannot be executed elsewhere"),
        ("0f05 90 5b c3", 4, (), "the code before it cannot be executed elsewhere"),
        ("f30f1efa c3", 4, (), "the code before it cannot be executed elsewhere"),
        ("4883c408 0f05", 4, (), "a system call would come back into the middle of a window"),
        ("90 90 c3", 2, (), "the code before it is unknown"),
    ],
)
def test_what_has_no_lead(code: str, place: int, targets: tuple[int, ...], reason: str) -> None:
    assert site_at(module_of(code, targets), place).lead(()) == reason


def test_a_lead_may_begin_at_a_target() -> None:
    plan = site_at(module_of("4883c408 5b c3", (0,)), 5).lead(())
    assert isinstance(plan, Plan)
    assert plan.start == START


def test_a_lead_holds_no_other_probe() -> None:
    site = site_at(module_of("4883c408 5b c3"), 5)
    assert site.lead((START + 4,)) == "another probe precedes too closely"


def test_dead_bytes_behind_shorten_the_lead() -> None:
    plan = site_at(module_of("4883c408 5b c3 909090", dead=((6, 9),)), 5).lead(())
    assert isinstance(plan, Plan)
    assert (plan.start, plan.raw.hex()) == (START + 4, "5bc3")


def test_without_the_start_of_its_function_nothing_leads_to_an_instruction() -> None:
    assert site_at(module_of("4883c408 5b c3", starts=()), 5).lead(()) == "the code before it is unknown"
    inside = site_at(module_of("b890909090 c3"), 3)  # no instruction starts there
    assert inside.lead(()) == "the code before it is unknown"


# What is no site at all


def test_a_landing_mark_stays_and_what_follows_it_is_displaced() -> None:
    plan = site_at(module_of("f30f1efa b82a000000 c3")).jump()
    assert isinstance(plan, Plan)
    assert (plan.site, plan.start, plan.raw.hex(), plan.lead) == (START, START + 4, "b82a000000", 0)


@pytest.mark.parametrize(
    ("code", "place", "reason"),
    [
        ("c3", 5, "it is not in the code of the module"),
        ("cc", 0, "it is a software interrupt"),
        ("06", 0, "it is not a valid instruction"),
        ("f30f1efa", 0, "it must stay for indirect branches, and a branch leads to the code after it"),
    ],
)
def test_what_cannot_be_a_site(code: str, place: int, reason: str) -> None:
    assert look_at(module_of(code), START + place) == reason


def test_a_mark_with_a_branch_behind_it_cannot_be_a_site() -> None:
    module = module_of("f30f1efa b82a000000", (4,))
    assert look_at(module, START) == "it must stay for indirect branches, and a branch leads to the code after it"


def test_a_restartable_sequence_must_not_be_left() -> None:
    module = module_of("90 b82a000000", restartable=((1, 6),))
    assert look_at(module, START + 1) == "it is in a restartable sequence, which must not be left"
    assert isinstance(look_at(module, START), Site)
