"""Jumps in memory: written whole or not at all, taken out only where they still are, and hidden from readers."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.site_patches import NativeMemory, NativeStop, Patches, PatchSwitch, SitePatch
from dprobes.platform.x86.instruction_relocation import CodeCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CODE = bytes(range(64))


def jump(*writes: tuple[int, bytes], sites: tuple[int, ...], relied_on: tuple[int, bytes] = (0, b"")) -> SitePatch:
    originals = tuple(CODE[start : start + len(data)] for start, data in writes)
    return SitePatch(
        tuple((0, n, site) for n, site in enumerate(sites)),
        sites[0],
        CODE[sites[0] :][:5],
        relied_on,
        writes,
        originals,
    )


PATCH = jump((8, b"\xe9abcd"), (40, b"XY"), sites=(8,))


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.write(descriptor, CODE)
    yield descriptor
    os.close(descriptor)


def reader(memory: int) -> Callable[[int, int], bytes]:
    return lambda address, size: os.pread(memory, size, address)


def shown(memory: int) -> bytes:
    return os.pread(memory, 64, 0)


def test_a_jump_is_written_and_taken_out(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    assert shown(memory) == CODE[:8] + b"\xe9abcd" + CODE[13:40] + b"XY" + CODE[42:]
    patches.restore(memory, [8])
    assert shown(memory) == CODE
    assert not patches.by_site


def test_what_somebody_else_has_written_there_stays(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    os.pwrite(memory, b"!", 9)
    patches.restore(memory, [8])
    assert shown(memory)[8:13] == b"\xe9!bcd"
    assert shown(memory)[40:42] == CODE[40:42]


FILE, JUMP = CODE[8:13], b"\xe9abcd"


@pytest.mark.parametrize(
    ("found", "left"),
    [
        (b"\xccabcd", b"\xcc" + FILE[1:]),
        (b"\xe9ab\xccd", FILE[:3] + b"\xcc" + FILE[4:]),
        (FILE[:1] + b"abcd", FILE),
        (FILE, FILE),
        (b"\xcc" + FILE[1:], b"\xcc" + FILE[1:]),
    ],
    ids=["uprobe", "uprobe inside", "uprobe that has gone", "file", "uprobe alone"],
)
def test_a_jump_goes_whole_where_a_uprobe_is_or_was_in_it(memory: int, found: bytes, left: bytes) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    os.pwrite(memory, found, 8)
    patches.restore(memory, [8])
    assert shown(memory) == CODE[:8] + left + CODE[13:]


@pytest.mark.parametrize(
    ("found", "mended"),
    [
        (JUMP, JUMP),
        (b"\xccabcd", JUMP),
        (b"\xe9ab\xccd", JUMP),
        (FILE[:1] + b"abcd", JUMP),
        (b"\xcc" + FILE[1:], JUMP),
        (FILE, FILE),
        (b"\xccab!d", b"\xccab!d"),
    ],
    ids=["jump", "uprobe", "uprobe inside", "uprobe that has gone", "uprobe in the file's code", "file", "other code"],
)
def test_a_jump_is_mended_where_a_uprobe_is_or_was_in_it(memory: int, found: bytes, mended: bytes) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    os.pwrite(memory, found, 8)
    assert patches.mend(memory, reader(memory)) == (found != mended)
    assert shown(memory) == CODE[:8] + mended + CODE[13:40] + b"XY" + CODE[42:]
    assert not patches.mend(memory, reader(memory))


def test_bytes_that_a_jump_shares_are_mended_and_a_mark_before_it_may_have_a_uprobe(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((8, b"\xe9ab"), (4, CODE[4:5]), sites=(4,), relied_on=(11, CODE[11:13])))
    os.pwrite(memory, b"\xcc", 4)
    os.pwrite(memory, b"\xcc", 11)
    assert patches.mend(memory, reader(memory))
    assert shown(memory) == CODE[:4] + b"\xcc" + CODE[5:8] + b"\xe9ab" + CODE[11:]


def test_readers_see_the_file(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    for start, end in ((0, 64), (9, 11), (12, 41), (13, 40)):
        data = bytearray(shown(memory)[start:end])
        patches.hide(start, data)
        assert data == CODE[start:end]


def test_a_jump_can_be_put_aside(memory: int) -> None:
    patches = Patches()
    patches.write(memory, PATCH)
    with patches.put_aside(memory, 8):
        assert shown(memory) == CODE
    assert shown(memory)[8:9] == b"\xe9"
    with patches.put_aside(memory, 20):
        assert shown(memory)[8:9] == b"\xe9"


def test_a_jump_that_cannot_be_written_changes_nothing() -> None:
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        patches = Patches()
        with pytest.raises(OSError, match="Bad file descriptor"):
            patches.write(descriptor, PATCH)
        assert not patches.by_site
    finally:
        os.close(descriptor)


def test_switches_and_first_bytes_are_undone_where_a_later_byte_cannot_be_written() -> None:
    descriptor = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, CODE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # a write after the end fails
        switch = PatchSwitch(50, b"on", b"of", 52, ((0, 0, 8),))
        patch = replace(jump((8, b"\xe9abcd"), (64, b"XY"), sites=(8,)), switches=(switch,))
        patches = Patches()
        with pytest.raises(PermissionError, match="Operation not permitted"):
            patches.write(descriptor, patch)
        assert (os.pread(descriptor, 100, 0), patches.by_site) == (CODE, {})
    finally:
        os.close(descriptor)


def test_a_child_has_what_its_memory_has(memory: int) -> None:
    patches = Patches(
        {1: NativeMemory(64, 0, 128, 64), 2: NativeMemory(64, 0, 999, 64)},
        code={1: [(256, 320)], 2: [(999, 1024)]},
        fixups={1: 2},
    )
    patches.write(memory, PATCH)
    later = jump((30, b"\xe9mnop"), sites=(30,))
    patches.write(memory, later)
    os.pwrite(memory, CODE[30:35], 30)
    child = patches.copy_for_child(memory, reader(memory), lambda address: address < 999)
    assert child.by_site == {8: PATCH}
    assert (list(child.memories), child.code, child.fixups) == ([1], {1: [(256, 320)], 2: []}, {1: 2})
    child.forget(0, 64)
    assert patches.by_site == {8: PATCH, 30: later}


def test_a_jump_that_was_taken_out_meanwhile_is_taken_out_of_the_child(memory: int) -> None:
    patches = Patches()
    copies = (CodeCopy(0x900, 8, exact=True),)
    patch = SitePatch(((0, 0, 8),), 8, CODE[8:13], (0, b""), ((8, b"\xe9abcd"),), (CODE[8:13],), (), copies, 0x90A)
    patches.write(memory, patch)
    patches.restore(memory, [8])
    os.pwrite(memory, b"\xe9abcd", 8)
    child = patches.copy_for_child(memory, reader(memory), lambda _: True)
    assert not child.by_site
    assert shown(memory) == CODE


def test_a_jump_for_several_places_goes_as_a_whole(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((8, b"\xe9abcd"), sites=(8, 11)))
    assert patches.restore(memory, [11]) == {8, 11}
    assert shown(memory) == CODE
    assert not patches.by_site
    assert not patches.users


def test_a_jump_goes_before_what_it_relies_on(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((20, b"\xe9efgh"), sites=(20,)))
    patches.write(memory, jump((18, b"\xe9i"), sites=(18,), relied_on=(20, b"\xe9ef")))
    patches.write(memory, jump((40, b"\xe9klmn"), sites=(40,)))
    assert patches.restore(memory, [20]) == {18, 20}
    assert shown(memory) == CODE[:40] + b"\xe9klmn" + CODE[45:]
    assert list(patches.by_site) == [40]


def test_what_relies_on_a_jump_is_put_aside_with_it(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((20, b"\xe9efgh"), sites=(20,)))
    patches.write(memory, jump((18, b"\xe9i"), sites=(18,), relied_on=(20, b"\xe9ef")))
    before = shown(memory)
    with patches.put_aside(memory, 20):
        assert shown(memory) == CODE
    assert shown(memory) == before
    assert set(patches.by_site) == {18, 20}


def test_a_larger_jump_takes_the_place_of_a_smaller_one(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((8, b"\xe9abcd"), sites=(8,)))
    patches.write(memory, jump((8, b"\xe9efgh"), sites=(8, 10)))
    assert patches.by_site[8] is patches.by_site[10]
    assert patches.near(12, 13) == {patches.by_site[8]}
    patches.restore(memory, [8])
    assert shown(memory) == CODE


def test_the_original_of_displaced_code_is_known_when_the_jump_has_gone(memory: int) -> None:
    patches = Patches()
    copies = CodeCopy(0x900, 8, exact=True), CodeCopy(0x904, 10, exact=False)
    patch = SitePatch(((0, 0, 8),), 8, CODE[8:13], (0, b""), ((8, b"\xe9abcd"),), (CODE[8:13],), (), copies, 0x90A)
    patches.write(memory, patch)
    patches.restore(memory, [8])
    found = [patches.original_of(place) for place in (0x8FF, 0x900, 0x903, 0x909, 0x90A)]
    assert found == [None, (patch, copies[0]), (patch, copies[0]), (patch, copies[1]), None]


def test_jumps_of_one_group_belong_together(memory: int) -> None:
    patches = Patches()
    for site, groups in ((8, ((0, 8),)), (20, ((0, 8),)), (30, ((1, 8),)), (40, ()), (50, ())):
        patches.write(memory, replace(jump((site, b"\xe9abcd"), sites=(site,)), groups=groups))
    assert sorted(patches.bound_to([8])) == [8, 20]
    assert patches.bound_to([40, 41]) == [40]
    assert sorted(patches.bound_to([30, 20])) == [8, 20, 30]


def test_a_jump_that_is_of_two_groups_binds_them(memory: int) -> None:
    patches = Patches()
    for site, groups in ((8, ((0, 8),)), (20, ((0, 8), (0, 30))), (30, ((0, 30),))):
        patches.write(memory, replace(jump((site, b"\xe9abcd"), sites=(site,)), groups=groups))
    assert sorted(patches.bound_to([8])) == [8, 20, 30]


def test_a_jump_relies_on_its_own_bytes_on_those_that_it_shares_and_on_what_it_displaces(memory: int) -> None:
    patches = Patches()
    patches.write(memory, jump((8, b"\xe9a"), (40, b"XY"), sites=(8,), relied_on=(10, b"bcde")))
    relying = [address for address in range(64) if patches.relying_on(address)]
    assert relying == [8, 9, 10, 11, 12, 13, 40, 41]


def test_where_a_hit_is_left_to_the_breakpoint_stays_known_and_is_of_children_too(memory: int) -> None:
    patches, stop = Patches(), NativeStop(0x2000, 8, is_trap=False, has_frame=True, has_flags=False)
    patches.write(memory, replace(PATCH, stops=(stop,)))
    patches.restore(memory, [8])
    assert patches.stops == {0x2000: stop}
    child = patches.copy_for_child(memory, reader(memory), lambda _: True)
    assert child.stops == {0x2000: stop}


def test_who_stands_at_a_displaced_instruction_goes_on_in_the_copy(memory: int) -> None:
    patches = Patches()
    patches.write(memory, replace(PATCH, moves=((10, 0x2010),)))
    assert [patches.way_on(address) for address in (8, 9, 10, 11, 50)] == [8, 9, 0x2010, 11, 50]


def test_what_a_core_file_should_not_show(memory: int) -> None:
    patches = Patches(
        {0: NativeMemory(0x1000, 4096, 0x8000, 8192, None, ((0xC000, 4096),))}, code={0: [(0x5000, 0x6000)]}
    )
    patches.write(memory, PATCH)
    assert patches.originals() == {place: place for place in (8, 9, 10, 11, 12, 40, 41)}
    assert sorted(patches.ranges()) == [(0x1000, 0x2000), (0x5000, 0x6000), (0x8000, 0xA000), (0xC000, 0xD000)]


def test_switches_are_as_the_probepoints_that_are_there_and_those_of_a_child_too(memory: int) -> None:
    whole = replace(
        PATCH,
        sites=((0, 0, 8), (1, 0, 8)),
        copies=(CodeCopy(20, 8, exact=True),),
        owner=1,
        switches=(PatchSwitch(50, b"on", b"of", 52, ((0, 0, 8),)), PatchSwitch(52, b"ON", b"OF", 54, ((1, 0, 8),))),
    )
    patches = Patches(code={1: [(20, 30)]})
    patches.learn([whole])
    patches.write(memory, whole)
    assert shown(memory)[50:54] == b"onON"
    assert (patches.code_of(0), patches.code_of(1)) == ([(52, 52)], [(20, 30), (54, 54)])
    patches.restore(memory, [8])
    patches.write(memory, whole.only([(1, 0, 8)]))
    assert shown(memory)[50:54] == b"ofON"
    assert [patches.is_used(memory, number) for number in range(3)] == [False, True, False]
    # The memory of a child may have been copied before.
    os.pwrite(memory, b"onON", 50)
    child = patches.copy_for_child(memory, reader(memory), lambda _: True)
    assert (child.known, shown(memory)[50:54]) == ({20: whole}, b"ofON")
    patches.forget_program(1)
    assert patches.known_at() == []


def test_a_jump_whose_shared_bytes_lead_elsewhere_is_not_there(memory: int) -> None:
    """Another punned jump at the place has the same first byte."""
    former = replace(jump((8, b"\xe9"), sites=(8,), relied_on=(9, CODE[9:13])), copies=(CodeCopy(20, 8, exact=True),))
    patches = Patches()
    patches.write(memory, former)
    patches.forget(8, 9)
    assert patches.is_used(memory, 0)
    os.pwrite(memory, b"abcd", 9)
    assert not patches.is_used(memory, 0)


def test_the_latest_jumps_come_first_and_what_was_given_up_is_gone() -> None:
    patches = Patches()
    made = [replace(jump((8, b"\xe9"), sites=(8, n)), copies=(CodeCopy(n, 8, exact=True),)) for n in (20, 30)]
    patches.learn(made)
    assert patches.known_at() == patches.known_at([8]) == [made[1], made[0]]
    assert patches.known_at([30]) == [made[1]]
    patches.give_up([20])
    assert patches.known_at() == [made[1]]
