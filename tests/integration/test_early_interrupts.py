"""A Ctrl-C that comes while a run starts ends it as a later one does: with a summary, and everything as it was."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.cli.main import run
from dprobes.engines.ebpf.read.ebpf_session import EbpfSession
from dprobes.engines.ptrace.ptrace_engine import PtraceSession
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_line, code_is_original, running

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

SESSIONS = {"ebpf": EbpfSession, "ptrace": PtraceSession}


def interrupted(monkeypatch: pytest.MonkeyPatch, engine: str, times: int = 1, *, at_begin: bool) -> None:
    """Let a Ctrl-C come when a session begins to start, or has just started."""
    session: Any = SESSIONS[engine]
    begin = session.begin

    def begun(self: Any) -> None:
        def send() -> None:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

        if at_begin:
            send()
        begin(self)
        if not at_begin:
            send()

    monkeypatch.setattr(session, "begin", begun)


def objects() -> set[str]:
    """Return what this process holds of the kernel's objects, and its pipes; a type description it may keep."""
    return {each for each in descriptors() if "btf" not in each}


@pytest.mark.parametrize("at_begin", [True, False])
@pytest.mark.parametrize(("engine", "scope"), [("ebpf", "all"), ("ebpf", "process"), ("ptrace", "process")])
def test_the_run_ends_with_a_summary(
    build: Builder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    scope: str,
    at_begin: bool,
) -> None:
    if engine == "ebpf":
        require_bpf()
        require_initial_namespace()
    program, source = build("torture.c"), tmp_path / "quiet.rpn"
    source.write_text(f'name = "{program}"\noffset = emulated\nminor = 1\nabort\n')
    interrupted(monkeypatch, engine, at_begin=at_begin)
    with running(program, 600, 1) as target:
        await_line(target)
        before = objects()
        words = ["run", str(source), "--engine", engine, *(["-p", str(target.pid)] if scope == "process" else [])]
        assert run(words) == 0
        assert objects() == before
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert code_is_original(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
    said = capsys.readouterr().err
    assert re.search(r"^0,1 +emulated +\d+ +0 +0 ", said, re.MULTILINE), said
    assert "; Ctrl-C ends the run" not in said


def test_a_second_one_gives_up_the_start(
    build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_bpf()
    program, source = build("hotloop.c"), tmp_path / "tick.rpn"
    source.write_text(f'name = "{program}"\noffset = tick\nabort\n')
    interrupted(monkeypatch, "ebpf", 2, at_begin=True)
    before = objects()
    assert run(["run", str(source), "--engine", "ebpf"]) == 128 + signal.SIGINT
    assert objects() == before
    assert capsys.readouterr() == ("", "\n")


def test_a_command_is_not_started(
    build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_bpf()
    require_initial_namespace()
    marker, source = tmp_path / "marker", tmp_path / "tick.rpn"
    source.write_text(f'name = "{build("hotloop.c")}"\noffset = tick\nabort\n')
    interrupted(monkeypatch, "ebpf", at_begin=True)
    before = objects()
    assert run(["run", str(source), "--engine", "ebpf", "--", "touch", str(marker)]) == 128 + signal.SIGINT
    assert objects() == before
    assert not marker.exists()
    assert capsys.readouterr() == ("", "\n")
