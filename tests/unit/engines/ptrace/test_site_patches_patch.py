"""A jump as data: where threads go on, and which bytes it consists of."""

from __future__ import annotations

from dataclasses import replace

from dprobes.engines.ptrace.site_patches import PatchSwitch, SitePatch
from dprobes.platform.x86.instruction_relocation import CodeCopy

PATCH = SitePatch(
    ((1, 4, 0x100), (2, 5, 0x103)),
    0x100,
    bytes(8),
    (0x105, b"ab"),
    ((0x200, b"xy"), (0x100, b"12345")),
    (b"..", b"....."),
    ((0x101, 0x910), (0x103, 0x920)),
    (CodeCopy(0x900, 0x100, exact=True), CodeCopy(0x908, 0x101, exact=False), CodeCopy(0x912, 0x103, exact=True)),
)


def test_a_thread_behind_the_first_instruction_goes_on_in_the_copy() -> None:
    assert [PATCH.way_on(place) for place in (0x100, 0x101, 0x102, 0x103)] == [0x100, 0x910, 0x102, 0x920]


def test_one_that_was_hit_goes_on_behind_the_handler() -> None:
    assert [PATCH.copy_of(place) for place in (0xFC, 0x100, 0x103, 0x104)] == [0x900, 0x900, 0x912, None]


def test_it_needs_what_is_written_relied_on_and_displaced() -> None:
    assert PATCH.written_bytes() == {0x200, 0x201, *range(0x100, 0x105)}
    assert (PATCH.relied_bytes(), PATCH.displaced_bytes()) == (range(0x105, 0x107), range(0x100, 0x108))
    assert PATCH.used_bytes() == {0x200, 0x201, *range(0x100, 0x108)}


def test_it_has_probepoints_and_addresses() -> None:
    assert (PATCH.probes, PATCH.addresses) == (((1, 4), (2, 5)), (0x100, 0x103))
    assert PATCH.programs == {1, 2}
    assert [PATCH.probes_at(address) for address in (0x100, 0x103, 0x101)] == [{(1, 4)}, {(2, 5)}, set()]


SHARED = replace(
    PATCH,
    groups=((1, 0x10), (2, 0x10)),
    owner=2,
    switches=(
        PatchSwitch(0x930, b"on", b"off", 0x960, PATCH.sites),
        PatchSwitch(0x940, b"on", b"off", 0x950, PATCH.sites[:1]),
        PatchSwitch(0x950, b"on", b"off", 0x960, PATCH.sites[1:]),
    ),
)


def test_without_switches_it_is_for_all_or_for_none() -> None:
    assert PATCH.only(PATCH.sites[:1]) is PATCH
    assert SHARED.only(PATCH.sites) is SHARED


def test_with_switches_it_can_do_without_some_of_its_probepoints() -> None:
    rest = SHARED.only([*PATCH.sites[:1], (7, 7, 7)])
    assert (rest.sites, rest.groups, rest.writes) == (PATCH.sites[:1], ((1, 0x10),), PATCH.writes)
    assert list(SHARED.switched()) == [(0x930, b"on"), (0x940, b"on"), (0x950, b"on")]
    assert list(rest.switched()) == [(0x930, b"on"), (0x940, b"on"), (0x950, b"off")]
    assert [write for _, write in SHARED.only(()).switched()] == [b"off"] * 3
    # What it stands on stays needed.
    assert (set(rest.programs), set(rest.users)) == ({1}, {1, 2})


def test_what_only_handlers_of_one_program_need_is_known() -> None:
    assert [SHARED.code_of(program) for program in (1, 2, 3)] == [[(0x942, 0x950)], [(0x952, 0x960)], []]
