"""Several programs with handlers in one process: each has all of its hits, and jumps stay where they can."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.engine_interface import Counts
from dprobes.engines.inline.inline_engine import InlineEngine
from integration.ebpf.insessions import on_demand
from integration.several import Group, assert_complete, grouped
from integration.support import await_true, code_is_original, memory_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.several import Program
    from integration.support import Builder

STEPPED = "vars = 1\nlogonfault = yes\noffset = stepped\nminor = 1\ninc lv, 0\nexit\n"
EMULATED = "vars = 1\nlogonfault = yes\noffset = emulated\nminor = 2\ninc lv, 0\nexit\n"
JUMPS = (b"\xe9", b"\x2e", b"\xeb")


@pytest.fixture(scope="session")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@pytest.fixture
def group() -> Iterator[Group]:
    with grouped(engine=InlineEngine) as made:
        yield made


def is_jump_at(pid: int, path: Path, name: str) -> bool:
    return memory_at(pid, path, name, 1) in JUMPS


def await_jump(pid: int, path: Path, *functions: str) -> None:
    for name in functions:
        await_true(partial(is_jump_at, pid, path, name), f"a jump at {name}")


def executed(program: Program) -> str:
    """Return how the first probepoint of a program that has ended was executed."""
    (counts, *_) = program.session.counts()
    assert isinstance(counts, Counts)
    return ", ".join(counts.executed)


def test_jumps_come_back_when_other_programs_have_come_and_gone(path: Path, group: Group) -> None:
    with on_demand(path, 2) as target:
        pid = target.process.pid
        first = group.insert(path, STEPPED, pid)
        await_jump(pid, path, "stepped")
        target.say("call 10")
        for _ in range(3):
            second = group.insert(path, EMULATED, pid)
            await_jump(pid, path, "stepped", "emulated")
            target.say("call 10")
            second.end()
            group.programs.remove(second)
            assert second.hits == [10]
            assert "inline" in executed(second)
            assert_complete(second)
            await_jump(pid, path, "stepped")
        first.end()
        assert first.hits == [40]
        assert executed(first).startswith("inline"), executed(first)  # no hit was a breakpoint's
        assert_complete(first)
        assert code_is_original(pid, path)
        assert target.end() == 0
