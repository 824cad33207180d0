"""Semaphores of USDT probes in the kernel: by single uprobes as well, and whenever dprobes is killed."""

from __future__ import annotations

import random
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.engine import EbpfEngine
from dprobes.engines.ebpf.kernel.features import Feature, Features
from dprobes.engines.interface import Job, RecordBatch, Scope
from dprobes.resolve.resolution import resolve
from dprobes.rpn.pipeline import CompileOptions, parse_source
from dprobes.source import SourceFile
from dprobes.target.location import Module
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import await_line, await_true, load_bias, read_memory, read_result, running, symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.support import Runner

GUARDED = "offset = usdt:demo:guarded\nminor = 1\npush usdt, 1\nlog 1\nexit\n"


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def is_raised(pid: int, program: Path, value: int = 1) -> bool:
    address = load_bias(pid, program) + symbols_of(program)["demo_guarded_semaphore"]
    return int.from_bytes(read_memory(pid, address, 2), "little") == value


def test_single_uprobes_raise_it_too(usdt: Callable[..., Path]) -> None:
    program = usdt("-O2")
    engine = EbpfEngine(features=Features(overrides={Feature.UPROBE_MULTI: False}))
    parsed = parse_source(SourceFile("test.rpn", f'name = "{program}"\n{GUARDED}'), Diagnostics(), CompileOptions())
    resolved = resolve(parsed, Module.load(program), Diagnostics())
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        assert target.stdin is not None
        with engine.run(Job(parsed, Scope(pid=target.pid), resolved=resolved)) as session:
            records = 0
            for event in session.events():
                if isinstance(event, RecordBatch):
                    records += len(event.records)
                    session.stop()
                elif not records:
                    await_true(partial(is_raised, target.pid, program), "a raised semaphore")
                    target.stdin.write("call\n")
                    target.stdin.flush()
                    assert await_line(target).startswith("semaphore 1 passed ")
        assert records >= 1
        assert is_raised(target.pid, program, 0)


def test_it_is_lowered_whenever_dprobes_is_killed(usdt: Callable[..., Path], run: Runner) -> None:
    program = usdt("-O2")
    dice = random.Random(4)
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        for attempt in range(6):
            client, output = run.start(f"name = usdt\n{GUARDED}", ["-p", str(target.pid)], ["--engine", "ebpf"])
            if attempt % 2:
                await_true(partial(is_raised, target.pid, program), "a raised semaphore")
            else:
                time.sleep(dice.uniform(0.3, 0.9))  # somewhere in its start
            client.kill()
            read_result(client, output)
            await_true(partial(is_raised, target.pid, program, 0), "a lowered semaphore")
