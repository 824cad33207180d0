"""What is about to be written is told to the restorer and listed in the process, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dprobes.engines.ptrace.restorer_messages import (
    ENTRIES,
    MANIFEST_LENGTH,
    MANIFEST_MAGIC,
    JumpsPlanned,
    entries_in,
    entry_of,
)
from dprobes.engines.ptrace.site_patches import NativeMemory, Patches, SitePatch
from dprobes.engines.ptrace.tracer.native import handler_memory
from dprobes.engines.ptrace.tracer_messages import Warned

if TYPE_CHECKING:
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.client_connection import Connection

JUMP = SitePatch(((0, 1, 0x401000),), 0x401000, b"\x55\x48\x89\xe5\x90", (0x401005, b""),
                 ((0x401000, b"\xe9\1\2\3\4"),), (b"\x55\x48\x89\xe5\x90",), end=7)  # fmt: skip
OTHER = SitePatch(((0, 2, 0x402000),), 0x402000, b"\x55\x48\x89\xe5\x90", (0x402005, b""),
                  ((0x402000, b"\xe9\1\2\3\4"),), (b"\x55\x48\x89\xe5\x90",), end=7)  # fmt: skip


class ListingSpace:
    """A space of which nothing but the manifest is there, so many bytes of it, and one breakpoint."""

    def __init__(self, size: int) -> None:
        self.memory = NativeMemory(0x1000, 4096, 0x10000, 1 << 20, manifest=(0, size))
        self.data = bytearray(MANIFEST_MAGIC.ljust(size, b"\0"))
        self.pids = {7}
        self.patches = Patches({0: self.memory})
        self.breakpoints = {0x403000: SimpleNamespace(address=0x403000, original=0x90)}

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.data[address : address + size])

    def write(self, address: int, data: bytes) -> None:
        self.data[address : address + len(data)] = data

    def written(self) -> list[tuple[tuple[int, bytes], ...]]:
        """Return what is listed."""
        end = ENTRIES + int.from_bytes(self.data[MANIFEST_LENGTH : MANIFEST_LENGTH + 8], "little")
        return [patch.writes for entry in entries_in(bytes(self.data[ENTRIES:end])) for patch in entry.writes]


class Listener:
    """Whoever is told; ``sent`` is what was sent to the client, ``told`` to the restorer."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.told: list[object] = []
        self.send, self.tell_restorer = self.sent.append, self.told.append


@pytest.fixture
def listener() -> Listener:
    return Listener()


def announce(listener: Listener, space: ListingSpace, *patches: SitePatch) -> str | None:
    why = handler_memory.announce(cast("Connection", listener), cast("AddressSpace", space), 0, (), patches)
    assert listener.told.pop() == JumpsPlanned(7, space.memory, (), patches)
    return why


def test_what_is_written_is_listed_once(listener: Listener) -> None:
    space = ListingSpace(4096)
    assert announce(listener, space) is None
    assert announce(listener, space, JUMP) is None
    assert announce(listener, space, JUMP, OTHER) is None
    before = bytes(space.data)
    assert announce(listener, space, OTHER) is None
    assert space.data == before
    assert space.written() == [((0x403000, b"\xcc"),), JUMP.writes, OTHER.writes]
    assert listener.sent == []


def test_jumps_that_find_no_room_are_refused_and_others_are_not(listener: Listener) -> None:
    probe = ListingSpace(4096)
    space = ListingSpace(ENTRIES + len(entry_of(probe.memory, (), (JUMP,), ())) + 5)
    space.breakpoints.clear()
    assert announce(listener, space, JUMP, OTHER) == (
        f"the list of what is written into the process is full ({len(space.data)} bytes)"
    )
    assert space.written() == []
    assert announce(listener, space, JUMP) is None
    assert space.written() == [JUMP.writes]


def test_breakpoints_that_find_no_room_are_reported_once(listener: Listener) -> None:
    probe = ListingSpace(4096)
    space = ListingSpace(ENTRIES + len(entry_of(probe.memory, (), (JUMP,), ())) + 5)
    assert announce(listener, space, JUMP) is None
    assert announce(listener, space, JUMP) is None
    assert space.written() == [JUMP.writes]
    full = f"the list of what is written into the process is full ({len(space.data)} bytes)"
    hint = "they stay there if all processes of dprobes are killed at once, and 'dprobes stop --left' misses them"
    assert listener.sent == [Warned(f"1 breakpoint is not listed in process 7: {full}", hint, 0)]


def test_a_list_that_is_gone_takes_nothing(listener: Listener) -> None:
    space = ListingSpace(4096)
    space.data[:8] = bytes(8)
    assert announce(listener, space, JUMP) == "the list of what is written into the process no longer exists"


def test_another_memory_at_the_same_place_has_a_list_of_its_own(listener: Listener) -> None:
    space = ListingSpace(4096)
    assert announce(listener, space, JUMP) is None
    space.data = bytearray(MANIFEST_MAGIC.ljust(4096, b"\0"))
    space.patches.begin_list(space.memory)
    assert announce(listener, space, JUMP) is None
    assert JUMP.writes in space.written()
