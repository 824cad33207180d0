"""What the reader knows of threads."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.inline.entry_index import ThreadNames, thread_key
from dprobes.native.routines.entry_walk import NOBODY_KNOWS
from dprobes.platform.linux.procfs import ThreadIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 4_194_304
PID = os.getpid()
OWN = thread_key(PID, PID)


@pytest.fixture
def names() -> Iterator[ThreadNames]:
    made = ThreadNames()
    made.begin_program(PID)
    yield made
    made.close()


@pytest.fixture
def name() -> Iterator[bytes]:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    yield before.rstrip(b"\n")
    comm.write_bytes(before)


def known(names: ThreadNames, key: int) -> tuple[bytes, int, int]:
    """Return name, user and reading."""
    name, uid, reading = struct.unpack("<16sII", names._table[key.to_bytes(8, "little")])
    return name.rstrip(b"\0"), uid, reading


def test_a_thread_is_looked_up(names: ThreadNames, name: bytes) -> None:
    names.learn(OWN)
    assert known(names, OWN) == (name, os.getuid(), 0)


def test_the_first_record_of_a_process_waits_for_what_the_tracer_has_to_say_of_it(name: bytes) -> None:
    for is_told in (True, False):
        names = ThreadNames()
        names.learn(OWN)
        assert known(names, OWN)[2] == NOBODY_KNOWS
        if is_told:
            names.told(ThreadIdentity(PID, PID, b"before", 3, (1, 2)))
            assert known(names, OWN) == (b"before", 3, 0)
        else:
            names.look_again(0)
            names.learn(OWN)
            assert known(names, OWN) == (name, os.getuid(), 0)
        names.close()


def test_when_nothing_more_is_to_come_no_record_waits(name: bytes) -> None:
    names = ThreadNames()
    names.awaits_tracer = False
    names.learn(OWN)
    assert known(names, OWN) == (name, os.getuid(), 0)
    names.close()


def test_of_a_thread_that_is_gone_nobody_knows_until_the_tracer_tells(names: ThreadNames) -> None:
    key = thread_key(PID, NOBODY)
    names.learn(key)
    assert known(names, key)[2] == NOBODY_KNOWS
    names.told(ThreadIdentity(PID, NOBODY, b"gone", 3))
    assert known(names, key) == (b"gone", 3, 0)


def test_of_whom_nobody_knows_is_looked_up_again_or_called_as_another_one(names: ThreadNames, name: bytes) -> None:
    key = thread_key(PID, NOBODY)
    names.learn(OWN)
    names.learn(key)
    names.look_again(0)
    with pytest.raises(KeyError):
        known(names, key)
    names.learn(key)
    names.settle()
    assert known(names, key) == (name, os.getuid(), 0)


def test_a_thread_that_has_changed_its_name_is_found_out(
    names: ThreadNames, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    names.learn(OWN)
    names.seen.words[0] = OWN
    names.look_again(names.seen.address + 8)
    Path("/proc/self/comm").write_text("renamed")
    names.look_again(names.seen.address + 8)
    assert known(names, OWN)[0] == name, "it is too soon"
    now[0] += 20_000_000
    names.look_again(names.seen.address + 8)
    assert known(names, OWN)[0] == b"renamed"


def test_what_executes_another_program_keeps_its_name_until_that_has_handlers(names: ThreadNames, name: bytes) -> None:
    names.told(ThreadIdentity(PID, PID, b"before", 1, program=(0, 1)))
    names.seen.words[0] = OWN
    names.look_again(names.seen.address + 8)
    assert known(names, OWN)[0] == b"before"
    names.begin_program(PID)
    with pytest.raises(KeyError):
        known(names, OWN)
    names.learn(OWN)
    assert known(names, OWN)[0] == name


def test_other_processes_stay_known(names: ThreadNames) -> None:
    names.told(ThreadIdentity(PID, PID, b"one", 1))
    names.told(ThreadIdentity(PID + 1, 77, b"two", 2))
    names.begin_program(PID)
    assert known(names, thread_key(PID + 1, 77)) == (b"two", 2, 0)
