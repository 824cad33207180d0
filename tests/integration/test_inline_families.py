"""Handlers in processes that follow each other: each has its own, and the client forgets those that have ended."""

from __future__ import annotations

import gc
import subprocess
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import dprobes
from dprobes.engines.inline.handler_code import CodeWriter
from integration.support import (
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    children_of,
    code_is_original,
    memory_at,
    running,
)

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

HITS = 1000
PROCESSES = 4


def test_processes_without_random_addresses_all_have_jumps(build: Builder, run: Runner) -> None:
    """Their memory is at the same addresses in each."""
    program = build("hotloop.c")
    source = f'name = "{program}"\noffset = tick\nminor = 1\nabort\n'
    loop = f"for i in $(seq {PROCESSES}); do {program} {HITS}; done"
    result = run.command(source, "setarch", "-R", "sh", "-c", loop, options=["--engine", "inline"])
    assert result.status == 0, result.stderr
    assert result.counts[1].hits == PROCESSES * HITS
    assert result.counts[1].executed.startswith("inline (")
    assert "," not in result.counts[1].executed  # no breakpoint was hit


def tell(target: subprocess.Popen[str]) -> None:
    assert target.stdin is not None
    target.stdin.write(" ")
    target.stdin.flush()


def has_jump(pid: int, program: Path) -> bool:
    return memory_at(pid, program, "called", 1) == b"\xe9"


@pytest.mark.parametrize(("size", "pause"), [(0, 3), (256, 0)], ids=["small", "large"])
def test_children_that_are_born_while_their_parent_waits_for_jumps_have_some_as_well(
    build: Builder, run: Runner, size: int, pause: int
) -> None:
    """
    They meet no breakpoint, whether they were born before the parent had memory for handlers or after that.

    A large parent is nearly always making one, also at the moment at which its jumps are written.
    """
    program = build("broods.c")
    source = "name = broods\noffset = called\nminor = 1\nabort\n"
    with running(program, size, pause, stdin=subprocess.PIPE, start_new_session=True) as target:
        await_line(target)
        client, output = run.start(source, ["-p", str(target.pid)], ["--engine", "inline"])
        await_traced(target.pid)
        tell(target)
        await_true(lambda: has_jump(target.pid, program), "a jump", TIMEOUT)
        tell(target)
        assert await_line(target, TIMEOUT) == "made\n"
        children = children_of(target.pid)
        assert len(children) > 1
        await_true(lambda: all(has_jump(pid, program) for pid in children), "jumps in all children")
        result = run.end(client, output)
        assert result.status == 0, result.stderr
        assert result.counts[1].executed.startswith("inline (")
        assert "," not in result.counts[1].executed  # no breakpoint was hit
        assert all(code_is_original(pid, program) for pid in children)
        assert target.communicate(" ", TIMEOUT)[0] == "0\n"


def test_what_was_planned_for_processes_that_have_ended_is_forgotten(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build("hotloop.c")
    program = dprobes.ProgramBuilder(str(path), major=1)
    program.probe("tick", minor=1).push_r("arg0").log(1).exit()
    loop = f"for i in $(seq {PROCESSES}); do {path} 3 > /dev/null; done"
    left: list[weakref.ref[CodeWriter]] = []
    make = CodeWriter.__init__

    def make_and_note(writer: CodeWriter, *arguments: Any) -> None:
        make(writer, *arguments)
        left.append(weakref.ref(writer))

    monkeypatch.setattr(CodeWriter, "__init__", make_and_note)
    with dprobes.launch(["sh", "-c", loop], engine="inline", items=dprobes.Item.TIME) as session:
        session.insert(program)
        assert len(session.collect()) == 3 * PROCESSES
        gc.collect()
        assert [reference() for reference in left] == [None] * PROCESSES
