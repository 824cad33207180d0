"""Handlers in processes that follow each other: each has its own, and the client forgets those that have ended."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import dprobes
from dprobes.engines.inline.handlercode import CodeWriter

if TYPE_CHECKING:
    import pytest

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
