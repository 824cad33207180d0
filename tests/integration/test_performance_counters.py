"""Performance counters of threads have the values that getrusage(2) and the clocks of the program show."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import dprobes
from dprobes.platform.linux.perf_calls import open_counter
from integration.support import as_nobody, nobody_python

if TYPE_CHECKING:
    from integration.support import Builder

DPROBES = (sys.executable, "-m", "dprobes")
THREADS, ROUNDS = 3, 12
SWITCH = 50_000
"""Nanoseconds of a context switch that one clock may count for another thread than the other clock does."""


class Reading(NamedTuple):
    """Times in nanoseconds and numbers of faults and switches that a thread reads about itself."""

    cpu: int
    wall: int
    slept: int
    minor: int
    switches: int


class Call(NamedTuple):
    """A call of ``meter``: what the program read before it and after the previous one, and the counters in it."""

    before: Reading
    after_previous: Reading
    clock: int
    minor: int
    faults: int
    switches: int


def calls_of(program: Path, engine: str, *, with_switches: bool) -> dict[int, list[Call]]:
    """Run the program, and return the calls of each of its threads in their order."""
    members = [f"{each}->{name}" for each in ("before", "after") for name in Reading._fields]
    counters = ["task-clock", "minor-faults", "page-faults", *(["context-switches"] if with_switches else [])]
    values = ["thread", *members, *(f'pmc("{name}")' for name in counters)]
    text = f'"{program}":meter {{ printf("{" ".join(["%lu"] * len(values))}\\n", {", ".join(values)}); }}'
    command = [*DPROBES, "run", "--engine", engine, "-e", text, "-c", str(program)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = defaultdict(list)
    for line in output.splitlines():
        if "]  " not in line:  # the program's own output
            continue
        thread, *numbers = map(int, line.partition("]  ")[2].split())
        before, after, counted = numbers[:5], numbers[5:10], [*numbers[10:], 0]
        calls[thread].append(Call(Reading(*before), Reading(*after), *counted[:4]))
    assert {thread: len(each) for thread, each in calls.items()} == dict.fromkeys(range(THREADS), ROUNDS)
    return calls


@pytest.mark.parametrize("engine", ["ptrace", "ebpf", "inline"])
def test_counters_agree_with_those_of_the_program(build: Builder, engine: str) -> None:
    with_switches = engine == "ebpf"
    calls = calls_of(build("metered.c", "-g", "-O1", "-pthread"), engine, with_switches=with_switches)
    for each in calls.values():
        for first, second, third in zip(each, each[1:], each[2:], strict=False):
            least, most = second.before, third.after_previous
            begin, end = second.after_previous, first.before
            assert least.minor - begin.minor <= second.minor - first.minor <= most.minor - end.minor
            assert least.minor - begin.minor <= second.faults - first.faults
            # Other clocks may run at slightly other rates, exclude interrupts, and include parts of a context switch.
            switching = SWITCH * (1 + most.switches - end.switches)
            awake = most.wall - end.wall - (second.before.slept - first.before.slept)
            counted = second.clock - first.clock
            assert 0.99 * (least.cpu - begin.cpu) - switching <= counted <= 1.01 * awake + switching
            if with_switches:
                assert least.switches - begin.switches <= second.switches - first.switches
                assert second.switches - first.switches <= most.switches - end.switches


FAULTING = """
import mmap, os
memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
with open("/dev/zero", "rb", buffering=0) as zeros:
    for _ in range(3):
        zeros.readinto(memory)
"""
"""A program whose first read of /dev/zero has a page fault for each of 64 pages, and the others none."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root probes system calls")
def test_the_return_of_a_system_call_knows_what_the_call_took() -> None:
    text = (
        "return syscall read when (args.count == 64 * 4096) {"
        ' printf("%lu %lu\\n", elapsed("minor-faults"), elapsed); @ns = sum(elapsed); }'
    )
    command = [*DPROBES, "run", "-e", text, "--", sys.executable, "-c", FAULTING]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = [tuple(map(int, line.split()[-2:])) for line in output.splitlines() if "]  " in line]
    assert [faults for faults, _ in calls] == [64, 0, 0]
    assert all(0 < time < 10**9 for _, time in calls)
    assert "@ns: " in output


def test_events_of_cpus_count_for_the_thread_that_runs(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock stands in for the processor's cycles, which virtual machines hide: it is an event of a CPU as well."""

    def open_clock(kind: int, config: int, **where: int) -> int:
        return open_counter(1, 0, **where) if (kind, config) == (0, 0) else open_counter(kind, config, **where)

    for module in ("counter_events", "ebpf.attach.map_objects"):
        monkeypatch.setattr(f"dprobes.engines.{module}.open_counter", open_clock)
    path = build("metered.c", "-g", "-O1", "-pthread")
    program = dprobes.ProgramBuilder(str(path))
    with program.probe("meter") as handler:
        handler.push_pmc("cycles").push_pmc("task-clock").push_r("arg2").log(3).exit()
    readings = defaultdict(list)
    with dprobes.launch([str(path)], engine="ebpf") as session:
        session.insert(program)
        for record in session.records():
            thread, clock, cycles = record.words()
            readings[thread].append((clock, cycles))
    assert {thread: len(each) for thread, each in readings.items()} == dict.fromkeys(range(THREADS), ROUNDS)
    for each in readings.values():
        # Both are read in the same hit, a moment after each other: their differences are nearly equal.
        for (clock, cycles), (next_clock, next_cycles) in itertools.pairwise(each):
            assert next_cycles - cycles == pytest.approx(next_clock - clock, rel=0.5, abs=5e6)


def refusal(engine: str, counter: str, program: Path, status: int, python: str = sys.executable, **popen: Any) -> str:
    text = f'"{program}":meter {{ printf("%lu\\n", pmc("{counter}")); }}'
    command = [python, "-m", "dprobes", "run", "--engine", engine, "-e", text, "-c", str(program)]
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, check=False, capture_output=True, text=True, **popen
    )
    assert result.returncode == status
    return result.stderr


def test_ptrace_counts_no_context_switches(build: Builder) -> None:
    assert "'push pmc, context-switches' needs counting context switches, which the ptrace engine lacks" in refusal(
        "ptrace", "context-switches", build("metered.c", "-g", "-O1", "-pthread"), 2
    )


@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_a_counter_that_the_machine_does_not_have_is_refused(build: Builder, engine: str) -> None:
    try:
        os.close(open_counter(0, 0, tid=0))
    except OSError:
        said = refusal(engine, "cycles", build("metered.c", "-g", "-O1", "-pthread"), 1)
    else:
        pytest.skip("this machine has a PMU")
    assert said == (
        "dprobes: error: the counter 'cycles' cannot be read: the processor shows no such counter (PMU)\n"
        "hint: virtual machines often hide the processor's counters; those of the kernel are task-clock, page-faults, "
        "context-switches, cpu-migrations, minor-faults, major-faults\n"
    )


PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_the_right_to_count_learns_what_to_allow(
    build: Builder, nobody_environment: dict[str, str]
) -> None:
    level = PARANOID.read_text().strip()
    if int(level) < 2:
        pytest.skip(f"kernel.perf_event_paranoid is {level}: every user may count in the kernel")
    program = build("metered.c", "-g", "-O1", "-pthread")
    said = refusal("ptrace", "page-faults", program, 1, nobody_python(), env=nobody_environment, cwd="/", **as_nobody())
    assert said == (
        f"dprobes: error: the counter 'page-faults' cannot be read: kernel.perf_event_paranoid is {level}\n"
        "hint: run dprobes as root, give it CAP_PERFMON, or set kernel.perf_event_paranoid to 1\n"
    )
