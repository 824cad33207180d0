"""Inserting and removing again and again leaves nothing behind, neither here nor in the kernel."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.engine_interface import Finished, Scope, StateEvent, Stop
from dprobes.resolve.local_module import resolve
from dprobes.resolve.probepoints import ProbeState
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace
from integration.ebpf.objects import KernelObjects, await_gone, kernel_objects
from integration.support import TIMEOUT, await_line, code_is_original, running
from support.attachments import attached, job_of

if TYPE_CHECKING:
    import subprocess

    from integration.support import Builder

PROGRAM = """name = "{path}"
offset = stepped
minor = 1
maxhits = 1
exit

offset = emulated
minor = 2
remove

offset = on_*
minor = 3
exit
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def cycle(path: Path, target: subprocess.Popen[str], engine: EbpfEngine, turn: int) -> None:
    """Insert the program once, until the probepoints that are hit have gone, or at once if ``turn`` is odd."""
    program = parse_source(SourceFile("cycle.rpn", PROGRAM.format(path=path)), Diagnostics(), CompileOptions())
    resolved = resolve(program, Module.load(path), Diagnostics())
    # Every process, this one with its children, and only this one.
    scope = (Scope(), Scope(pid=target.pid), Scope(pid=target.pid, follow=False))[turn % 3]
    ended: set[int] = set()
    before = kernel_objects(os.getpid()).ids  # other tests hold some
    with attached(engine, job_of(program, scope, resolved=resolved)) as session:
        objects = KernelObjects(kernel_objects(os.getpid()).ids - before)
        for event in session.poll():
            match event:
                case StateEvent(probes, _, ProbeState.DISABLED | ProbeState.REMOVED):
                    ended.update(probes)
                case Finished(counts):
                    hits = [count.hits for count in counts[:2]]
            if turn % 2 or len(ended) == 2:
                session.change([Stop()])
    if not turn % 2:
        assert hits[0] == 1
        assert hits[1] >= 1
    assert code_is_original(target.pid, path)
    await_gone(objects)


def resident() -> int:
    """Return how much memory this process has, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.torture)])
def test_cycles_of_insert_and_remove_leak_nothing(build: Builder, count: int) -> None:
    path = build("torture.c")
    engine = EbpfEngine()
    threads = set(threading.enumerate())  # some may be of tests before this one
    with running(path, 36000, 1) as target:
        await_line(target)
        for turn in range(6):
            cycle(path, target, engine, turn)
        before, memory = descriptors(), resident()
        for turn in range(count):
            cycle(path, target, engine, turn)
            assert descriptors() == before
            assert threads.issuperset(threading.enumerate())
        assert resident() - memory < 8 << 20
        target.send_signal(signal.SIGUSR2)
        assert target.wait(TIMEOUT) == 0
