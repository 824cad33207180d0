"""What is on the list is restored in memory, and nothing else is touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.client import left_removal
from dprobes.engines.ptrace.client.left_removal import Restored, RestorerList
from dprobes.engines.ptrace.restorer_messages import FilesShared, JumpsPlanned, MemoryUnmapped
from dprobes.engines.ptrace.site_patches import NativeMemory, Patches, SitePatch
from dprobes.engines.ptrace.tracer_messages import MemoryCopied, PagesMapped, PagesUnmapped, Placed, Removed

if TYPE_CHECKING:
    import pytest

ME = os.getpid()
INT3 = 0xCC
ENDED = 1 << 30


def buffer(*values: int) -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    data = (ctypes.c_ubyte * 64)(*values)
    return data, ctypes.addressof(data)


def shared() -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    """Return memory that is shared with handlers."""
    file = os.memfd_create("dprobes-test")
    os.ftruncate(file, mmap.PAGESIZE)
    data = (ctypes.c_ubyte * 64).from_buffer(mmap.mmap(file, mmap.PAGESIZE))
    os.close(file)
    return data, ctypes.addressof(data)


def planned(region: int, pid: int = ME, *patches: SitePatch) -> JumpsPlanned:
    return JumpsPlanned(pid, NativeMemory(0x1000, 0x1000, region, 0x1000), ((0x2000, 0x3000),), patches)


def test_bytes_of_breakpoints_come_back_where_breakpoints_are() -> None:
    data, address = buffer(INT3, 0x90, INT3)
    known = RestorerList()
    known.note(Placed(ME, ((address, 0x55), (address + 1, 0x56), (address + 2, 0x57))))
    known.note(Removed(ME, (address + 2,)))
    known.restore_breakpoints()
    assert list(data[:3]) == [0x55, 0x90, INT3]
    assert known.restored == Restored(places=1)


def test_handlers_do_nothing_from_then_on() -> None:
    data, address = shared()
    known = RestorerList()
    known.note(planned(address))
    known.restore_breakpoints()
    assert int.from_bytes(bytes(data[:4]), "little") == ENDED


def test_memory_that_is_not_shared_any_more_is_not_touched() -> None:
    data, address = buffer()
    known = RestorerList()
    known.note(planned(address))
    known.restore_breakpoints()
    assert not any(data)


def test_memory_of_a_process_that_has_left_it_is_not_touched() -> None:
    data, address = shared()
    known = RestorerList()
    known.note(planned(address))
    known.note(Removed(ME))
    known.restore_breakpoints()
    known.remove_the_rest()
    known.unmap()
    assert not any(data)
    assert known.restored == Restored()


def test_a_child_has_what_its_parent_has() -> None:
    data, address = shared()
    known = RestorerList()
    known.note(planned(address, pid=1 << 30))
    known.note(PagesMapped(1 << 30, ((0x5000, 0x6000),)))
    known.note(MemoryCopied(ME, 1 << 30))
    known.note(MemoryCopied(ME + 1, 1 << 29))
    known.note(Removed(1 << 30))
    known.restore_breakpoints()
    assert int.from_bytes(bytes(data[:4]), "little") == ENDED


def test_pages_that_could_not_be_mapped_are_not_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[tuple[int, int]]] = {}

    def unmap(pid: int, patches: Patches, _: float, __: object) -> bool:
        asked[pid] = patches.code_ranges()
        return True

    monkeypatch.setattr(left_removal, "unmap_left_memory", unmap)
    known = RestorerList()
    known.note(PagesUnmapped(2, ((0x1000, 0x2000),)))
    known.note(PagesMapped(1, ((0x1000, 0x2000),)))
    known.note(PagesMapped(1, ((0x5000, 0x6000),)))
    known.note(PagesUnmapped(1, ((0x5000, 0x6000),)))
    known.unmap()
    assert asked == {1: [(0x1000, 0x2000)]}


def test_files_are_looked_for_until_it_is_known_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, tuple[list[int], object]] = {}
    both = (1, 2), (1, 3)

    def unmap(pid: int, patches: Patches, _: float, files: object) -> bool:
        asked[pid] = list(patches.memories), files
        return True

    monkeypatch.setattr(left_removal, "unmap_left_memory", unmap)
    known = RestorerList()
    for pid in range(1, 5):
        known.note(FilesShared(pid, both))
    known.note(planned(0x5000, 2))
    known.note(Removed(3))
    known.note(FilesShared(4, ((1, 4),)))
    known.note(FilesShared(4, ((1, 4),), (0x1000, 4096)))
    known.unmap()
    assert asked == {
        1: ([], FilesShared(1, both)),
        2: ([0x5000], None),
        4: ([], FilesShared(4, ((1, 4),), (0x1000, 4096))),
    }


def test_memory_that_was_given_back_is_not_touched_and_that_of_others_is() -> None:
    mine, others = shared(), shared()
    known = RestorerList()
    jump = SitePatch(((0, 0, 8),), 8, b"UHBC1", (0, b""), ((8, b"\xe9abcd"),), (b"UHBC1",))
    for region in (mine[1], others[1]):
        known.note(planned(region, ME, jump))
    known.note(MemoryCopied(1 << 30, ME))
    known.note(MemoryUnmapped(ME, mine[1]))
    known.note(MemoryUnmapped(1 << 29, mine[1]))
    known.restore_breakpoints()
    known.remove_the_rest()
    assert not any(mine[0])
    assert int.from_bytes(bytes(others[0][:4]), "little") == ENDED
