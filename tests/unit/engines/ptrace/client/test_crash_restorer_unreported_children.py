"""Children that are traced and that nobody was told of are found, and no other ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.client.crash_restorer import unreported_children
from dprobes.platform.linux import ptrace_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

ME = os.getpid()
_PARENT = """
import os, sys, time
pid = os.fork()
if pid == 0 and len(sys.argv) > 1:
    os.execvp("sleep", ["sleep", "1000"])
if pid:
    print(pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Yield a process and its child, which executes another file if the test asks for that."""
    command = [sys.executable, "-c", _PARENT, *getattr(request, "param", ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child
        os.kill(child, 9)
        parent.kill()


def test_a_child_is_found_if_the_tracer_has_it(family: tuple[int, int]) -> None:
    parent, child = family
    assert not list(unreported_children([parent], ME))
    ptrace_calls.seize(child)
    assert list(unreported_children([parent], ME)) == [(child, parent)]
    assert not list(unreported_children([parent], ME + 1))
    assert not list(unreported_children([parent, child], ME))
    ptrace_calls.interrupt(child)
    os.waitpid(child, ptrace_calls.WALL)
    ptrace_calls.detach(child)


@pytest.mark.parametrize("family", [("executes",)], indirect=True)
def test_a_child_that_executes_another_file_is_none_of_these(family: tuple[int, int]) -> None:
    parent, child = family
    while Path(f"/proc/{child}/comm").read_text() != "sleep\n":
        pass
    ptrace_calls.seize(child)
    assert not list(unreported_children([parent], ME))


def test_processes_that_are_gone_have_no_children() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert not list(unreported_children([gone.pid], ME))
