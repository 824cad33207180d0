"""Performance counters of threads have the values that getrusage(2) and the clocks of the program show."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

DPROBES = (sys.executable, "-m", "dprobes")
THREADS, ROUNDS = 3, 12


class Reading(NamedTuple):
    """What the program reads of a thread beside a call: nanoseconds, and numbers of faults and switches."""

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
            # Other clocks may run at slightly other rates, and exclude the time of interrupts.
            off_cpu = second.before.slept - first.before.slept
            awake = most.wall - end.wall - off_cpu
            assert 0.99 * (least.cpu - begin.cpu) <= second.clock - first.clock <= 1.01 * awake
            if with_switches:
                assert least.switches - begin.switches <= second.switches - first.switches
                assert second.switches - first.switches <= most.switches - end.switches


def refusal(engine: str, counter: str, program: Path) -> str:
    text = f'"{program}":meter {{ printf("%lu\\n", pmc("{counter}")); }}'
    command = [*DPROBES, "run", "--engine", engine, "-e", text, "-c", str(program)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    return result.stderr


def test_ptrace_counts_no_context_switches(build: Builder) -> None:
    assert "'push pmc, context-switches' needs counting context switches, which the ptrace engine lacks" in refusal(
        "ptrace", "context-switches", build("metered.c", "-g", "-O1", "-pthread")
    )
