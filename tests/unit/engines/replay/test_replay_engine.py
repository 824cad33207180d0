"""Whose hits a recording may hold."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_interface import Job, ProbeRemoval, Scope, StateEvent
from dprobes.engines.replay.replay_engine import ReplaySession
from dprobes.engines.shared_globals import GlobalVariables
from dprobes.resolve.local_module import resolve_here
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from pathlib import Path


def session_of(
    tmp_path: Path, text: str, *hits: dict[str, object], shared: GlobalVariables | None = None
) -> ReplaySession:
    """Return the session of a program on recorded hits."""
    recording = tmp_path / "hits.jsonl"
    recording.write_text("".join(json.dumps(hit) + "\n" for hit in hits))
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("x.rpn", text), diagnostics)
    compiled = resolve_here(program, diagnostics)
    assert compiled.architecture == architecture("x86_64")
    return ReplaySession(Job(compiled, Scope(), globals=shared), str(recording))


def test_a_program_about_all_processes_has_hits_of_its_watchpoints(tmp_path: Path) -> None:
    text = "name = vmlinux\nmodtype = kernel\naddress = 0x1000\nwatchpoint = w\nexit\n"
    with contextlib.closing(session_of(tmp_path, text, {"probe": 0}, {"probe": 0})) as session:
        list(session.poll())
        assert [probe.memory.address for probe in session.probes] == [0x1000]
        assert [count.hits for count in session.counts()] == [2]


def test_shared_variables_have_the_result_and_are_unmapped_at_the_end(tmp_path: Path) -> None:
    text = "name = vmlinux\nmodtype = kernel\ngvars = 1\naddress = 0x1000\nwatchpoint = w\ninc gv, 0\nexit\n"
    with GlobalVariables(1) as shared, contextlib.closing(shared.cells()) as cells:
        session = session_of(tmp_path, text, {"probe": 0}, {"probe": 0}, shared=shared)
        list(session.poll())
        mapped = session._globals
        assert (cells[0], mapped[0]) == (2, 2)
        session.close()
        session.close()
        with pytest.raises(ValueError, match="released memoryview"):
            mapped[0]


def test_functions_of_a_pattern_that_cannot_be_probed_are_left_out(tmp_path: Path) -> None:
    text = 'name = "libc.so.6"\noffset = "*mem*"\nreturn = yes\nexit\n'
    with contextlib.closing(session_of(tmp_path, text)) as session:
        assert session.probes
        assert session.left_out


def test_a_removal_is_reported_once_and_ends_the_hits(tmp_path: Path) -> None:
    text = "name = vmlinux\nmodtype = kernel\naddress = 0x1000\nwatchpoint = w\nexit\n"
    with contextlib.closing(session_of(tmp_path, text, {"probe": 0}, {"probe": 0})) as session:
        events = session.poll()
        active = next(events)
        session.change([ProbeRemoval([0]), ProbeRemoval([0])])
        states = [event for event in (active, *events) if isinstance(event, StateEvent)]
        assert states == [StateEvent((0,), 0, ProbeState.ACTIVE), StateEvent((0,), 0, ProbeState.REMOVED)]
        assert [count.hits for count in session.counts()] == [0]
