"""Nothing that is put into a ring is lost uncounted, damaged, or out of order, however many write to how many rings."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import threading
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_instructions import Helper
from dprobes.engines.inline.entry_reader import SharedRings
from dprobes.engines.inline.shared_memory import Region
from dprobes.native.ebpf_translator import write_function
from dprobes.native.generated_code import ProcessFacts, Surroundings
from dprobes.native.routines.handler_ring import CONSUMER, DATA, DISCARDED, PRODUCER, RingShape, output_code
from dprobes.native.runtime_routines import make_runtime
from dprobes.native.x86.x86_operations import X86Operations
from support.machine_code import Pages, call_stub, function_at, place, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOM = 64 << 10
FULL = (1 << 64) - errno.ENOSPC


class World:
    """Rings, and what writes to them: the routine, or with ``inlined`` code that is made for each size."""

    def __init__(self, shape: RingShape, *, inlined: bool) -> None:
        self._inlined = inlined
        self._functions: dict[tuple[int, int], Callable[..., int]] = {}
        self.shape = shape
        self.region = Region(shape.rings * shape.stride + DATA)
        self.region.place = self.region.own_address
        self.rings = SharedRings(self.region, shape)
        address = reserve(ROOM)
        runtime = make_runtime(X86Operations(address), ProcessFacts(0, 0, has_rdpid=False), shape, {})
        stub = call_stub(runtime.code.end, runtime.routines[Helper.RINGBUF_OUTPUT])
        place(address, runtime.code.code + stub, ROOM)
        self._function: Callable[..., int] = function_at(runtime.code.end, 4)
        self.address = self.rings.place.address

    def put(self, data: bytes) -> int:
        """Put an entry; it stands at the end of a buffer whose rest is different."""
        buffer = ctypes.create_string_buffer(data + b"\xa5" * 8, len(data) + 8)
        return self.put_from(ctypes.addressof(buffer), len(data))

    def put_from(self, address: int, size: int, piece: int = 8) -> int:
        """Put the entry at an address."""
        if not self._inlined:
            return self._function(self.address, address, size, 0)
        if (size, piece) not in self._functions:
            self._functions[size, piece] = self._made_for(size, piece)
        return self._functions[size, piece](self.address, address)

    def _made_for(self, size: int, piece: int) -> Callable[..., int]:
        address = reserve(ROOM)
        code = output_code(self.shape, size, (piece,) * -(-size // piece))
        asm = X86Operations(address)
        write_function(asm, code, Surroundings({}, {}, {}, has_rdpid=False))
        place(address, asm.assemble(), ROOM)
        return function_at(address, 2)

    def close(self) -> None:
        self.rings.close()
        self.region.close()


@pytest.fixture(params=[False, True], ids=["routine", "inlined"])
def inlined(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
def one(*, inlined: bool) -> Iterator[World]:
    made = World(RingShape(1, 4096), inlined=inlined)
    yield made
    made.close()


def test_entries_of_all_sizes(one: World) -> None:
    """Each comes out as it was, also where it does not fit before the end of the memory, up to half of a ring."""
    random = Random(1)
    for size in [*range(1, 300), 1000, 2040]:
        for _ in range(3):
            data = random.randbytes(size)
            assert one.put(data) == 0
            assert one.rings.drain() == [data]
    assert one.rings.rings[0].pending == 0


def test_a_full_ring_takes_nothing_and_loses_nothing_that_it_has(one: World) -> None:
    random = Random(2)
    for _ in range(50):
        kept = []
        while True:
            data = random.randbytes(random.choice((4, 8, 20, 60, 200)))
            result = one.put(data)
            if result:
                assert result == FULL
                break
            kept.append(data)
        assert 4096 - 216 - 216 <= one.rings.rings[0].pending <= 4096
        assert one.put(bytes(4096)) == FULL
        assert one.rings.drain() == kept
        assert len(kept) > 15


def test_what_fills_the_ring_exactly_is_taken(one: World) -> None:
    data = bytes(range(256)) * 16
    assert one.put(data[: 4096 - 8]) == 0
    assert one.put(b"") == FULL
    assert one.rings.drain() == [data[: 4096 - 8]]
    assert one.put(data[: 4096 - 7]) == FULL
    assert one.put(b"x") == 0
    assert one.put(data[: 4096 - 8]) == FULL, "it does not fit before the end, nor behind"
    assert one.rings.drain() == [b"x"]


def test_the_size_that_is_no_multiple_of_words_is_kept(one: World) -> None:
    one.put(b"123456789")
    ring = one.rings.rings[0]
    window = ring.window()
    assert bytes(window[:4]) == struct.pack("=I", 9)
    assert len(window) == 24
    window.release()
    ring.drain()
    assert not any(one.region.mapping[DATA:]), "what has been read is cleared"


def test_an_incomplete_entry_holds_up_those_behind_it(one: World) -> None:
    one.put(b"first")
    memory = one.region.mapping
    at = one.address - one.region.own_address
    (producer,) = struct.unpack_from("=Q", memory, at + PRODUCER)
    struct.pack_into("=Q", memory, at + PRODUCER, producer + 16)  # somebody has taken a place, and does not run
    one.put(b"third")
    assert one.rings.drain() == [b"first"]
    assert one.rings.drain() == []
    assert one.rings.rings[0].pending == 32
    memory[at + DATA + producer + 8 : at + DATA + producer + 14] = b"second"
    struct.pack_into("=I", memory, at + DATA + producer, 6)
    assert one.rings.drain() == [b"second", b"third"]


def test_what_is_discarded_is_skipped(one: World) -> None:
    one.put(b"x" * 3000)
    assert one.rings.drain() == [b"x" * 3000]
    one.put(b"y" * 2000)  # which does not fit before the end
    at = one.address - one.region.own_address
    (filled,) = struct.unpack_from("=I", one.region.mapping, at + DATA + 3008)
    assert filled == DISCARDED | 4096 - 3008 - 8
    assert one.rings.drain() == [b"y" * 2000]
    assert struct.unpack_from("=Q", one.region.mapping, at + CONSUMER) == (4096 + 2008,)


@pytest.mark.parametrize("rings", [1, 2, 8])
@pytest.mark.parametrize("size", [4096, 1 << 16])
def test_several_threads_against_a_reader(rings: int, size: int, *, inlined: bool) -> None:
    """What a thread puts into one ring comes out in its order; lost and found are all that there was."""
    world = World(RingShape(rings, size), inlined=inlined)
    threads, each = 4, 6000
    lost = [0] * threads
    running = threads
    found: list[list[tuple[int, int]]] = [[] for _ in range(rings)]
    damaged = []

    def write(number: int) -> None:
        nonlocal running
        random = Random(number)
        for n in range(each):
            body = struct.pack("=II", number, n) + bytes((n & 0xFF,)) * random.randrange(100)
            if world.put(body):
                lost[number] += 1
        running -= 1

    workers = [threading.Thread(target=write, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    while True:
        was_running = running
        for n, ring in enumerate(world.rings.rings):
            for entry in ring.drain():
                number, count = struct.unpack_from("=II", entry)
                if entry[8:].strip(bytes((count & 0xFF,))):
                    damaged.append(entry)
                found[n].append((number, count))
        if not was_running:
            break
    for worker in workers:
        worker.join()
    assert damaged == []
    assert sum(map(len, found)) + sum(lost) == threads * each
    assert len({entry for of_ring in found for entry in of_ring}) == sum(map(len, found))
    for of_ring in found:
        for number in range(threads):
            counts = [count for who, count in of_ring if who == number]
            assert counts == sorted(counts)
    assert all(ring.pending == 0 for ring in world.rings.rings)
    world.close()


def test_each_cpu_has_its_ring(*, inlined: bool) -> None:
    world = World(RingShape(2, 4096), inlined=inlined)
    allowed = os.sched_getaffinity(0)
    try:
        for cpu in sorted(allowed)[:2]:
            os.sched_setaffinity(0, [cpu])
            world.put(b"here")
            assert world.rings.rings[cpu & 1].drain() == [b"here"]
            assert world.rings.drain() == []
    finally:
        os.sched_setaffinity(0, allowed)
    world.close()


def test_processes_write_to_the_same_rings(*, inlined: bool) -> None:
    world = World(RingShape(2, 1 << 20), inlined=inlined)
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            os._exit(sum(world.put(struct.pack("=II", number, n)) != 0 for n in range(2000)) and 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    found = sorted(struct.unpack("=II", entry) for entry in world.rings.drain())
    assert found == [(number, n) for number in range(4) for n in range(2000)]
    world.close()


def test_whoever_is_killed_takes_no_entry_of_others_along(*, inlined: bool) -> None:
    """A process that is killed while it writes leaves one place at most; what it and others have written is read."""
    for attempt in range(12):
        world = World(RingShape(2, 1 << 16), inlined=inlined)
        world.put(struct.pack("=II", 0, 0) + bytes(192))  # so that the code is there before the fork
        child = os.fork()
        if not child:
            n = 0
            while True:
                n += 1
                if world.put(struct.pack("=II", 1, n) + bytes(192)):
                    os.sched_yield()
        found: list[tuple[int, int]] = []
        for _ in range(3 + attempt):
            found += (struct.unpack_from("=II", entry) for entry in world.rings.drain())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for n in range(5):
            assert world.put(struct.pack("=II", 2, n) + bytes(192)) in (0, FULL)
        entries, skipped = world.rings.drain_rest()
        found += (struct.unpack_from("=II", entry) for entry in entries)
        assert skipped <= 1
        assert (0, 0) in found
        assert len(set(found)) == len(found)
        assert all(ring.pending == 0 for ring in world.rings.rings)
        world.close()


def test_memory_behind_the_data_is_not_read(*, inlined: bool) -> None:
    """An entry at the end of a page is read up to the word that it ends in, and no further."""
    pages = Pages(1)
    world = World(RingShape(1, 4096), inlined=inlined)
    for size in range(1, 65):
        for piece in (4, 8) if inlined else (8,):
            start = pages.end - -(-size // piece) * piece
            pages.write(start, b"e" * size)
            assert world.put_from(start, size, piece) == 0
            assert world.rings.drain() == [b"e" * size]
    pages.close()
    world.close()
