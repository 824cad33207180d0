"""A jump as data: where threads go on, and which bytes it consists of."""

from __future__ import annotations

from dprobes.engines.ptrace.sitepatch import CodeCopy, SitePatch

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
