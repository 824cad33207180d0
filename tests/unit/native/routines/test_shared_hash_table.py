"""Hash tables do what a dict does, within their limits, whoever else uses them at the same time, or has died."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import signal
import struct
import threading
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.bpf_instructions import NO_OVERWRITE, Helper
from dprobes.native.ebpf_translator import write_function
from dprobes.native.generated_code import Surroundings
from dprobes.native.routines.shared_hash_table import BLOCK, DELETED, FREE, HEAD_SIZE, TableShape, hash_routine
from dprobes.native.x86.x86_operations import X86Operations
from dprobes.platform.linux.call_proxy import map_code

if TYPE_CHECKING:
    from collections.abc import Callable

LOOKUP, UPDATE, DELETE = Helper.MAP_LOOKUP_ELEM, Helper.MAP_UPDATE_ELEM, Helper.MAP_DELETE_ELEM
SIZES = [4, 8, 12, 16, 20, 24, 40, 64, 100]
GUARD = b"\xa5" * 64


@functools.cache
def routine(helper: Helper, shape: TableShape) -> Callable[..., int]:
    asm = X86Operations()
    write_function(asm, hash_routine(helper, shape), Surroundings({}, {}, {}))
    result = ctypes.c_uint64 if helper is LOOKUP else ctypes.c_int64
    made: Callable[..., int] = ctypes.CFUNCTYPE(result, *[ctypes.c_uint64] * 4)(map_code(asm.assemble()))
    return made


class Table:
    """A table that threads and processes of ours share."""

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self.memory = mmap.mmap(-1, shape.size + len(GUARD))
        self.memory[shape.size :] = GUARD
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def update(self, key: bytes, value: bytes, flags: int = 0) -> int:
        result = routine(UPDATE, self.shape)(self.address, _at(key), _at(value), flags)
        assert self.memory[self.shape.size :] == GUARD
        return result

    def delete(self, key: bytes) -> int:
        return routine(DELETE, self.shape)(self.address, _at(key), 0, 0)

    def look_up(self, key: bytes) -> bytes | None:
        address = routine(LOOKUP, self.shape)(self.address, _at(key), 0, 0)
        return ctypes.string_at(address, self.shape.value_size) if address else None

    def states(self) -> list[int]:
        stride = self.shape.stride
        return [int.from_bytes(self.memory[HEAD_SIZE + n * stride :][:8], "little") for n in range(self.shape.capacity)]

    @property
    def count(self) -> int:
        return int.from_bytes(self.memory[8:16], "little")

    def check(self) -> None:
        """Check what must be true while nobody changes anything."""
        assert sum(state > DELETED for state in self.states()) == self.count
        assert 1 not in self.states()


def _at(data: bytes) -> int:
    """Return where bytes are, which somebody else must keep alive."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def keys_of(random: Random, shape: TableShape, count: int) -> list[bytes]:
    """Return keys, with zeros, with ones, and such that differ in one bit among them."""
    keys = {bytes(shape.key_size), b"\xff" * shape.key_size}
    while len(keys) < count:
        number = random.choice((random.getrandbits(8 * shape.key_size), 1 << random.randrange(8 * shape.key_size)))
        keys.add(number.to_bytes(shape.key_size, "little"))
    return list(keys)


@pytest.mark.parametrize("key_size", SIZES)
@pytest.mark.parametrize("value_size", SIZES)
def test_random_operations_do_what_a_dict_does(key_size: int, value_size: int) -> None:
    random = Random(1000 * key_size + value_size)
    shape = TableShape(key_size, value_size, 20)
    table = Table(shape)
    expected: dict[bytes, bytes] = {}
    keys = keys_of(random, shape, 30)
    for _ in range(1500):
        key, value = random.choice(keys), random.randbytes(value_size)
        match random.randrange(4):
            case 0:
                assert table.delete(key) == (0 if expected.pop(key, None) is not None else -errno.ENOENT)
            case 1:
                assert table.look_up(key) == expected.get(key)
            case 2:
                flags = random.choice((0, NO_OVERWRITE))
                result = table.update(key, value, flags)
                if key in expected and flags:
                    assert result == -errno.EEXIST
                elif key not in expected and len(expected) == shape.entries:
                    assert result == -errno.E2BIG
                else:
                    assert result == 0
                    expected[key] = value
            case _:
                assert table.count == len(expected)
    assert {key: found for key in keys if (found := table.look_up(key)) is not None} == expected
    table.check()


@pytest.mark.parametrize("entries", [1, 2, 4, 5, 64, 100, 1000])
def test_all_entries_find_room_and_not_one_more(entries: int) -> None:
    shape = TableShape(8, 8, entries)
    table = Table(shape)
    for n in range(entries):
        assert table.update(struct.pack("=Q", n), struct.pack("=Q", n * n)) == 0
    assert table.update(struct.pack("=Q", entries), bytes(8)) == -errno.E2BIG
    assert table.update(struct.pack("=Q", 0), struct.pack("=Q", 7)) == 0, "one that is there may be changed"
    assert table.look_up(struct.pack("=Q", 0)) == struct.pack("=Q", 7)
    for n in range(1, entries):
        assert table.look_up(struct.pack("=Q", n)) == struct.pack("=Q", n * n)
    assert table.look_up(struct.pack("=Q", entries)) is None
    table.check()


def test_deleted_keys_leave_room() -> None:
    """However often keys come and go, as those of threads do."""
    shape = TableShape(4, 8, 8)
    table = Table(shape)
    for n in range(5000):
        assert table.update(struct.pack("=I", n), struct.pack("=Q", n)) == 0
        if n >= 8 - 1:
            assert table.delete(struct.pack("=I", n - 7)) == 0
        for each in range(max(0, n - 6), n + 1):
            assert table.look_up(struct.pack("=I", each)) == struct.pack("=Q", each)
    table.check()
    for n in range(5000 - 7, 5000):
        assert table.delete(struct.pack("=I", n)) == 0
    assert table.count == 0
    assert all(table.look_up(struct.pack("=I", n)) is None for n in range(100))


def test_a_table_without_keys_is_free_again() -> None:
    """So what comes and goes does not make looking up slower and slower."""
    random = Random(4)
    table = Table(TableShape(8, 8, 100))
    keys = [struct.pack("=Q", n) for n in range(100)]
    for _ in range(10):
        for key in keys:
            assert table.update(key, key) == 0
        random.shuffle(keys)
        for key in keys:
            assert table.delete(key) == 0
        assert set(table.states()) == {FREE}


def test_a_table_that_forgets_takes_every_key() -> None:
    shape = TableShape(4, 16, 64, forgets=True)
    table = Table(shape)
    random = Random(5)
    for n in range(5000):
        key, value = struct.pack("=I", random.randrange(500)), struct.pack("=QQ", n, n)
        assert table.update(key, value) == 0
        assert table.look_up(key) == value
    assert table.count == 64
    table.check()
    kept = [n for n in range(500) if table.look_up(struct.pack("=I", n)) is not None]
    assert len(kept) == 64


def test_keys_of_zeros_are_keys() -> None:
    for size in SIZES:
        table = Table(TableShape(size, 8, 4))
        assert table.look_up(bytes(size)) is None
        table.update(bytes(size), b"12345678")
        assert table.look_up(bytes(size)) == b"12345678"
        assert table.count == 1
        table.check()


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - the test is to fail, not the thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def insist(call: Callable[[], int]) -> int:
    """Call until nobody else has the lock for too long."""
    while (result := call()) == -errno.EBUSY:
        time.sleep(0)
    return result


def test_threads_do_not_lose_each_others_keys() -> None:
    shape = TableShape(8, 8, 1000)
    table = Table(shape)

    def work(number: int) -> None:
        random = Random(number)
        own: dict[bytes, bytes] = {}
        for _ in range(3000):
            key = struct.pack("=II", number, random.randrange(100))
            value = random.randbytes(8)
            if random.random() < 0.6:
                assert insist(lambda key=key, value=value: table.update(key, value)) == 0  # type: ignore[misc]
                own[key] = value
            else:
                deleted = insist(lambda key=key: table.delete(key))  # type: ignore[misc]
                assert deleted == (0 if own.pop(key, None) is not None else -errno.ENOENT)
            assert table.look_up(key) == own.get(key)
        for key, value in own.items():
            assert table.look_up(key) == value

    in_threads(work)
    table.check()


def test_one_of_many_adds_a_key() -> None:
    """With NO_OVERWRITE all threads but one are told that the key is there."""
    table = Table(TableShape(8, 8, 4096))
    added = [0] * 4

    def work(number: int) -> None:
        for n in range(2000):
            key = struct.pack("=Q", n)
            added[number] += insist(lambda key=key: table.update(key, key, NO_OVERWRITE)) == 0  # type: ignore[misc]

    in_threads(work)
    assert sum(added) == 2000
    assert table.count == 2000
    table.check()


def test_processes_share_a_table() -> None:
    shape = TableShape(8, 8, 1000)
    table = Table(shape)
    for helper in (LOOKUP, UPDATE, DELETE):
        routine(helper, shape)
    children = []
    for number in range(4):
        child = os.fork()
        if not child:
            keys = [struct.pack("=II", number, n) for n in range(250)]
            good = all(insist(lambda key=key: table.update(key, key)) == 0 for key in keys)  # type: ignore[misc]
            os._exit(0 if good else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    for number in range(4):
        for n in range(250):
            key = struct.pack("=II", number, n)
            assert table.look_up(key) == key
    table.check()


def test_whoever_is_killed_with_the_lock_stops_nobody() -> None:
    """Keys are looked up as before; changes say that the table is busy."""
    shape = TableShape(8, 8, 4096)
    table = Table(shape)
    for helper in (LOOKUP, UPDATE, DELETE):
        routine(helper, shape)
    table.update(b"existing", b"existing")
    locks = range(shape.locks, shape.size, BLOCK)
    for _ in range(400):
        child = os.fork()
        if not child:
            n = 0
            while True:
                key = struct.pack("=Q", n % 4000)
                table.update(key, key)
                table.delete(key)
                n += 1
        time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert table.look_up(b"existing") == b"existing"
        result = table.update(b"anything", b"anything")
        if any(table.memory[lock] for lock in locks):  # perhaps that of this key
            assert result in (0, -errno.EBUSY)
            break
        assert result == 0
        assert table.delete(b"anything") == 0
    for lock in locks:  # as if there had been none at such a moment
        table.memory[lock] = 1
    assert table.update(b"anything", b"anything") == -errno.EBUSY
    assert table.update(b"existing", b"anything") == -errno.EBUSY
    assert table.look_up(b"existing") == b"existing"
