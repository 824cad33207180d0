"""
The list of what handlers in processes have written there, when it has no room: what is not listed is not written.

The list is as small here as a program of 10 000 functions needs it: what Python executes at its start makes it so.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import (
    TIMEOUT,
    await_line,
    await_traced,
    await_true,
    code_is_original,
    running,
)
from integration.test_inline_kills import await_clean

if TYPE_CHECKING:
    from integration.support import Builder, Runner

INLINE = ["--engine", "inline"]
HOT = "name = torture\nvars = 1\noffset = stepped\nminor = 1\nlogonfault = yes\ninc lv, 0\nexit\n"
SMALL = "from dprobes.engines.ptrace import restorer_messages\nrestorer_messages.MANIFEST_SIZE = {}\n"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Let the list have so many bytes."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SMALL.format(request.param))
    source = Path(__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", f"{place}:{source}")


def has_size(output: Path, size: int) -> bool:
    return output.exists() and output.stat().st_size >= size


@pytest.mark.parametrize("small", [320], indirect=True)
@pytest.mark.usefixtures("small")
def test_a_jump_that_cannot_be_listed_is_not_written(build: Builder, run: Runner) -> None:
    program = build("torture.c")
    with running(program, 600, 2) as target:
        await_line(target)
        notice = "a probepoint used a breakpoint instead of a jump: the list of what is written"
        for size in (1, 1 << 17, 1 << 19, 1 << 21):  # a run may end before its jump is tried: then the next is longer
            client, output = run.start(HOT, ["-p", str(target.pid)], INLINE)
            await_traced(target.pid)
            await_true(functools.partial(has_size, output, size), "hits of the breakpoint", TIMEOUT)
            assert not code_is_original(target.pid, program)
            result = run.end(client, output)
            assert result.status == 0, result.stderr
            if notice in result.stderr:
                break
            await_clean(target.pid, program)
        assert notice in result.stderr
        assert "is full (320 bytes)" in result.stderr
        assert "inline" not in result.counts[1].executed
        assert result.counts[1].hits
        await_clean(target.pid, program)
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
