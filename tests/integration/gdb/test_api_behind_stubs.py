"""The Python API with stubs: the words of ``--engine gdb=``, for a stub that runs and for one that a command starts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.gdb.processors import EmulatedProgram, Processor
    from integration.support import Builder

CALLS = 7


def calls_of(path: Path) -> dprobes.ProgramBuilder:
    program = dprobes.ProgramBuilder(str(path), major=1)
    program.probe("tick", minor=1).push_r("arg0").log(1).exit()
    return program


def test_a_session_for_what_is_behind_a_stub(
    build: Builder, processor: Processor, start: Callable[..., EmulatedProgram]
) -> None:
    path = processor.build(build, "hotloop.c", "-static")
    behind = start(path, str(CALLS))
    with dprobes.attach(engine=f"gdb={behind.endpoint}") as session:
        inserted = session.insert(calls_of(path))
        assert inserted.engine == "gdb"
        assert [record.words() for record in session.records(TIMEOUT)] == [(n,) for n in range(CALLS)]
        assert session.wait(TIMEOUT) == 0
        assert inserted.counts().hits == CALLS
    assert behind.output() == "21\n"


def test_a_command_that_has_a_stub(build: Builder, processor: Processor, tmp_path: Path) -> None:
    if shutil.which(processor.emulator) is None:
        pytest.skip(f"{processor.emulator} is not installed")
    path, endpoint = processor.build(build, "hotloop.c", "-static"), tmp_path / "stub"
    command = [processor.emulator, "-g", str(endpoint), str(path), str(CALLS)]
    with dprobes.launch(command, engine=f"gdb={endpoint}") as session:
        inserted = session.insert(calls_of(path))
        assert session.wait(TIMEOUT) == inserted.exit_status == 0
        assert len(session.collect(timeout=0)) == inserted.counts(1).records == CALLS


def test_a_session_that_is_left_takes_its_breakpoints_along(
    build: Builder, processor: Processor, start: Callable[..., EmulatedProgram]
) -> None:
    path = processor.build(build, "hotloop.c", "-static")
    behind = start(path, "500")
    with dprobes.attach(engine=f"gdb={behind.endpoint}") as session:
        session.insert(calls_of(path))
        assert len(session.collect(3, timeout=TIMEOUT)) == 3
    assert behind.output() == f"{500 * 499 // 2}\n"
    assert session.exit_status is None


def test_without_a_process_and_without_a_stub() -> None:
    with pytest.raises(dprobes.EngineError, match="attach needs the number of a process") as caught:
        dprobes.attach()
    assert caught.value.hint == "or name the engine's target, as engine='gdb=HOST:PORT'"
