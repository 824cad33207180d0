"""Files in memory that other processes get keep their size."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb import stub_restorer
from dprobes.engines.inline.shared_memory import Region
from dprobes.engines.ptrace.shared_counters import SharedCounters
from dprobes.engines.ptrace.tracer.native import handler_memory
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.platform.linux.process_calls import MEMORY_SEALS, growing_memory_file, memory_file

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 4096


@pytest.fixture
def descriptor() -> Iterator[int]:
    file = memory_file("test", PAGE)
    yield file
    os.close(file)


def seals_of(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)


@pytest.mark.parametrize("size", [0, PAGE - 1, 2 * PAGE])
def test_nobody_changes_the_size(descriptor: int, size: int) -> None:
    other = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as a target opens what it has been handed
    try:
        for each in (descriptor, other):
            with pytest.raises(PermissionError):
                os.ftruncate(each, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(other)
    assert os.fstat(descriptor).st_size == PAGE


def test_a_growing_file_gets_no_shorter() -> None:
    file = growing_memory_file("test")
    try:
        os.posix_fallocate(file, 0, PAGE)
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def test_all_that_leaves_the_process_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    with Region(PAGE) as region:
        assert seals_of(region.descriptor) == MEMORY_SEALS
    monkeypatch.setattr("dprobes.platform.linux.bpf_calls.create_map", _refuse)  # as for a user who may make no maps
    with GlobalVariables(3) as variables:
        assert seals_of(variables.descriptor) == MEMORY_SEALS
    counters = SharedCounters.new(1, 0)
    assert seals_of(counters.descriptor) == MEMORY_SEALS & ~fcntl.F_SEAL_GROW
    # Those that are handed on at once come from the same function.
    for module in (handler_memory, stub_restorer):
        assert module.memory_file is memory_file


def _refuse(*_: object) -> int:
    raise PermissionError
