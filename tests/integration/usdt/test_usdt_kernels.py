"""Semaphores of USDT probes in the kernel: by single uprobes as well, and whenever dprobes is killed."""

from __future__ import annotations

import random
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.ebpf_engine import EbpfEngine
from dprobes.engines.ebpf.kernel import bpf_links
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.engines.engine_interface import RecordBatch, Scope, Stop
from dprobes.platform.linux import perf_calls
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import Module
from dprobes.target.usdt import usdt_sites
from integration.ebpf.kernel import has_begun, require_bpf, require_initial_namespace
from integration.support import await_line, await_true, load_bias, read_memory, read_result, running, symbols_of
from support.attachments import attached, job_of

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
        with attached(engine, job_of(parsed, Scope(pid=target.pid), resolved=resolved)) as session:
            records = 0
            for event in session.poll():
                if isinstance(event, RecordBatch):
                    records += len(event.records)
                    session.change([Stop()])
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


def test_a_probe_with_a_number_at_the_same_place_is_in_the_way(usdt: Callable[..., Path], run: Runner) -> None:
    """The kernel has one uprobe for both, which has a semaphore or has none."""
    program = usdt("-O2")
    site = next(site for site in usdt_sites(ElfFile.open(program)) if site.name == "guarded")
    plain = f'name = "{program}"\noffset = {site.offset}\nminor = 1\nexit\n'
    with running(program, "wait", stdin=subprocess.PIPE) as target:
        await_line(target)
        first, _ = run.start(plain, [], ["--engine", "ebpf"])
        await_true(lambda: has_begun(first.pid), "the run")
        second = run(f'name = "{program}"\n{GUARDED}', ["-p", str(target.pid)], ["--engine", "ebpf"])
        assert second.status != 0
        assert (
            f"the kernel refuses the probepoint at {site.offset:#x} in '{program}', which the semaphore of a USDT "
            "probe guards\nhint: another tracer may have a probe at the same place that does not raise the semaphore: "
            "the kernel takes both only if they agree; --engine ptrace does not ask it\n"
        ) in second.stderr
        first.kill()


def test_a_kernel_that_cannot_raise_it_is_told_from_one_that_cannot_place_the_breakpoint() -> None:
    unit = perf_calls.ProbeUnit(1, 0)
    with pytest.raises(OSError, match="not supported") as caught:
        perf_calls.open_uprobe(unit, "/bin/true", 0x1000, counter=0x4000)
    error = bpf_links._uprobe_error(caught.value, "/bin/true", [0x1000], counts=True)
    assert (
        error.message
        == "this kernel cannot raise the semaphore of the USDT probe of the probepoint at 0x1000 in '/bin/true'"
    )
    assert error.hint == "use --engine ptrace"
