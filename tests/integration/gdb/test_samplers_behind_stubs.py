"""Samplers on a machine of two processors without a kernel, and on a process, which has none."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.gdb.connection_counter import ConnectionCounter
from integration.gdb.test_firmware import machine
from integration.gdb.test_user_stubs import StubbedProgram
from integration.support import TIMEOUT, await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Builder, Runner

HEAD = "name = machine\nmodtype = kernel\nvars = 1\nsampler = 25hz\nminor = 1\n"
LOG = "push r, rip; push r, cs; push procid; log 3\n"
SAMPLES = 4
REAL_MODE = 0xF000
BASES = REAL_MODE << 4, 0xFFFF0000
"""Where the code segment of that name begins: set by the firmware, and by the reset."""
STANDS = re.compile(r"the machine is stopped at (0x[0-9a-f]+) \(25hz\) on CPU (\d)\n")
HINT = re.compile(r"hint: gdb -ex '(target remote \S+)' -ex '(thread \d)'\n")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Path]:
    """Start a machine of two processors, of which the second one soon has nothing to do."""
    with machine(tmp_path, "-smp", "2") as directory:
        yield directory


def executed(directory: Path) -> int:
    """Return the size of the log of what the machine executes: its firmware counts 18 times a second."""
    log = directory / "executed"
    return log.stat().st_size if log.exists() else 0


def await_execution(directory: Path) -> None:
    before = executed(directory)
    await_true(lambda: executed(directory) > before, "the machine's going on")


def stands(directory: Path) -> bool:
    """Return whether the machine executes nothing for a time in which its firmware counts on an idle machine."""
    before = executed(directory)
    time.sleep(0.5)
    return executed(directory) == before


@pytest.mark.parametrize("processor", [0, 1])
def test_exit_1_leaves_the_machine_standing_where_it_was_sampled(pair: Path, run: Runner, processor: int) -> None:
    """GDB is told which processor that is: it shows the first one."""
    stop = f"push procid; push {processor}; eq; jz more\ninc lv, 0; push lv, 0; push {SAMPLES}; eq; jz more\nexit 1\n"
    handler = f"{LOG}{stop}more: exit\n"
    result = run(HEAD + handler, [], ["--engine", f"gdb={pair / 'stub'}", "--allow-write"])
    assert result.status == 0, result.stderr
    found, hint = STANDS.search(result.stderr), HINT.search(result.stderr)
    assert found is not None, result.stderr
    assert hint is not None, result.stderr
    words = result.words()
    cpu, cs, rip = words[-1]
    assert [each[0] for each in words].count(processor) == SAMPLES
    assert cpu == int(found[2]) == processor
    assert int(found[1], 16) - rip in (BASES if cs == REAL_MODE else (0,))
    assert result.counts[1].hits == len(words)
    assert stands(pair)
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    wanted = [hint[1], hint[2], "print/x $pc", "print/x $cs", "detach"]
    gdb = ["gdb", "-nx", "-batch", *(part for each in wanted for part in ("-ex", each))]
    shown = subprocess.run(gdb, capture_output=True, text=True, timeout=TIMEOUT, check=False).stdout
    assert f"$1 = {rip:#x}" in shown
    assert f"$2 = {cs:#x}" in shown
    await_execution(pair)


def test_exit_2_at_a_sample_is_one_dump_for_all_processors(pair: Path, run: Runner) -> None:
    options = ["--engine", f"gdb={pair / 'stub'}", "--allow-write"]
    client, output = run.start(f"{HEAD}{LOG}exit 2\n", [], options, cwd=pair)
    await_true(lambda: output.exists() and output.stat().st_size > 0, "the sample")
    await_true((pair / "vmcore").exists, "the dump")
    await_execution(pair)
    result = run.end(client, output)
    assert result.status == 0, result.stderr
    assert f"the machine's memory is in '{pair / 'vmcore'}', where its stub runs" in result.stderr
    assert [each.name for each in pair.glob("vmcore*")] == ["vmcore"]
    assert result.counts[1].hits == len(result.records) == 1
    await_execution(pair)


def test_a_machine_that_one_program_leaves_is_sampled_by_no_other(pair: Path) -> None:
    """Both want to leave it from the same moment on."""

    def leaving(major: int, moment: int) -> dprobes.ProgramBuilder:
        program = dprobes.ProgramBuilder("machine", modtype="kernel", major=major)
        handler = program.sample(1000).push_time().push(moment).lt().jz("early")
        handler.push_r("rip").log(1).exit(1).label("early").abort()
        return program

    with dprobes.attach(engine=f"gdb={pair / 'stub'}", allow_write=True) as session:
        began = time.monotonic_ns()
        session.insert(leaving(3, 1 << 62)).remove()
        now = time.monotonic_ns()
        moment = now + 1_000_000_000 + 10 * (now - began)
        first, second = (session.insert(leaving(major, moment)) for major in (1, 2))
        assert time.monotonic_ns() < moment
        await_true(lambda: first.has_ended and second.has_ended, "the end of both programs")
        said = [notice for each in (first, second) for notice in each.notices() if "is stopped at" in notice]
        records = session.collect(timeout=0)
    assert len(said) == len(records) == 1
    assert stands(pair)


ANYWHERE = f'name = "*"\nmodtype = user\nsampler = 25hz\nminor = 1\n{LOG}exit\n'
PROCESS = "serves a process, which has neither processors nor a kernel"


def test_whatever_runs_is_sampled_on_the_only_connection(pair: Path, run: Runner) -> None:
    with ConnectionCounter(pair / "counted", pair / "stub") as counter:
        result = run(ANYWHERE, [], ["--engine", f"gdb={counter.path}", "--duration", "3"])
    assert result.status == 0, result.stderr
    assert len(result.records) >= SAMPLES
    assert counter.count == 1


@pytest.mark.parametrize("name", ["qemu-x86_64", "gdbserver"])
def test_a_process_goes_on_that_cannot_be_sampled(build: Builder, run: Runner, tmp_path: Path, name: str) -> None:
    program = StubbedProgram(name, tmp_path, [str(build("hotloop.c")), "300"])
    result = run(ANYWHERE, [], program.options)
    assert result.status == 1
    assert f"error: the stub {program.endpoint} {PROCESS}\n" in result.stderr
    assert "44850" in program.output()
    assert program.process.returncode == 0


@pytest.mark.parametrize("text", [ANYWHERE, f"{HEAD}{LOG}exit\n"])
def test_a_process_that_is_started_for_it_is_none_of_a_machine(
    build: Builder, run: Runner, tmp_path: Path, text: str
) -> None:
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed")
    endpoint = tmp_path / "stub"
    command = f"qemu-x86_64 -g {endpoint} {build('hotloop.c')} 300"
    result = run(text, ["-c", command], ["--engine", f"gdb={endpoint}"])
    assert result.status == 1
    assert f"error: the stub {endpoint} {PROCESS}\n" in result.stderr
    assert not result.records
