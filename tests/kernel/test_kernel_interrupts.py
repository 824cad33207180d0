"""
Probepoints in the timer interrupt, while both CPUs have work: each tick is a hit, at the entry and at the return.

ftrace is the independent witness: each CPU must have its ticks in turn with the records, with nothing missing on either
side, and the kernel's own count of timer interrupts bounds them. A tick that interrupts the run itself is no hit.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from integration.support import await_true
from kernel.leftovers import nothing_left

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from guests.guest import Guest, Process

INSIDE = {"6.1": 5, "6.12": 9}
TRACING = "/sys/kernel/tracing"
TICKS = ("tick_sched_timer", "tick_nohz_handler")
"""The function of the tick, by its name before and since Linux 6.9."""

ENTRY, EXIT, INTERRUPT = 1, 2, 3
HANDLER = """
    push jiffies
    push mem, u64
    log 1
    push 13
    push linux_banner
    log str
    push 64
    push task
    log mrf
    inc cv, 0
    exit
"""
LOGGED = 8 + (3 + 13) + (3 + 64)
"""The bytes that the handler logs: a word, a string and memory with their tokens and lengths."""


@contextlib.contextmanager
def load(guest: Guest) -> Iterator[None]:
    """Keep both CPUs busy: an idle one has no ticks."""
    processes = [guest.start("while :; do : $(cat /proc/self/stat); done") for _ in range(guest.machine.cpus)]
    yield
    for process in processes:
        process.kill()


def await_records(guest: Guest) -> None:
    with load(guest):
        await_true(lambda: len(records(guest)) > 400, "ticks")


def tick_of(guest: Guest) -> str:
    symbols = {line.split()[2] for line in guest.get("/proc/kallsyms").decode().splitlines()}
    return next(name for name in TICKS if name in symbols)


def definition(place: str, minor: int, header: str = "", handler: str = HANDLER) -> str:
    return f"offset = {place}\nminor = {minor}\n{header}{handler}"


def start(guest: Guest, *definitions: str) -> Process:
    program = "name = vmlinux\nmodtype = kernel\nmajor = 7\ncvars = 1\nlogmax = 512\n" + "".join(definitions)
    guest.put("/tmp/program.rpn", program)
    options = ("--format", "json", "--log", "tsc", "--overhead", "off", "-o", "/tmp/records.json")
    process = guest.start_dprobes("run", "--explain", "/tmp/program.rpn", *options)
    process.await_output("active")
    return process


def records(guest: Guest) -> list[dict[str, Any]]:
    return [json.loads(line) for line in guest.get("/tmp/records.json").decode().splitlines() if line.endswith("}")]


def finish(guest: Guest, process: Process) -> tuple[list[dict[str, Any]], dict[int, list[int]]]:
    """End a run; return its records, and the numbers of the summary by probepoint."""
    process.signal(signal.SIGINT)
    assert process.wait() == 0, process.stderr
    rows = re.findall(r"^7,(\d+) .*?  +((?:\d+ +){4})", process.stderr, re.MULTILINE)
    return records(guest), {int(minor): [int(number) for number in numbers.split()] for minor, numbers in rows}


def timer_interrupts(guest: Guest) -> int:
    (line,) = (line for line in guest.get("/proc/interrupts").decode().splitlines() if line.lstrip().startswith("LOC:"))
    return sum(int(word) for word in line.split() if word.isdigit())


def times_of(found: Iterable[dict[str, Any]], minor: int) -> dict[int, list[int]]:
    """Return the times of the records of a probepoint, in nanoseconds, by CPU."""
    return by_cpu((record["cpu"], record["time"]) for record in found if record["minor"] == minor)


def by_cpu(found: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    times: dict[int, list[int]] = {}
    for cpu, time in found:
        times.setdefault(cpu, []).append(time)
    return times


def threads_of(guest: Guest, process: Process) -> set[str]:
    return set(guest.run(["ls", f"/proc/{process.pid}/task"]).stdout.split())


def ticks_of_ftrace(guest: Guest, function: str, besides: set[str]) -> dict[int, list[int]]:
    """Return when ftrace saw a function, in nanoseconds, by CPU; but not in threads that are not probed."""
    line = rf"-(\d+) +\[(\d+)\] +\S+ +([\d.]+): {function} <-"
    found = re.findall(line, guest.get(f"{TRACING}/trace").decode())
    return by_cpu((int(cpu), round(1e9 * float(time))) for tid, cpu, time in found if tid not in besides)


def assert_in_turn(some: Iterable[int], others: Iterable[int]) -> None:
    """Check that things at two kinds of times come in turn, once both are there and as long as they are."""
    kinds = [kind for _, kind in sorted([(time, 0) for time in some] + [(time, 1) for time in others])]
    first = next(index for index, (kind, following) in enumerate(pairwise(kinds)) if kind != following)
    last = len(kinds) - next(index for index, (kind, other) in enumerate(pairwise(kinds[::-1])) if kind != other)
    both = kinds[first:last]
    assert len(both) > 40
    assert all(one != other for one, other in pairwise(both)), both


@pytest.mark.parametrize("place", ["entry", "inside"])
def test_each_tick_is_a_hit_as_ftrace_sees_it(guest: Guest, place: str) -> None:
    tick = tick_of(guest)
    where = tick if place == "entry" else f"{tick} + {INSIDE[guest.machine.kernel]}"
    before = timer_interrupts(guest)
    process = start(guest, definition(where, ENTRY), definition("hrtimer_interrupt", INTERRUPT, handler="exit\n"))
    guest.run(
        f"cd {TRACING} && echo mono > trace_clock && echo {tick} > set_ftrace_filter && echo function > current_tracer"
    )
    await_records(guest)
    guest.put(f"{TRACING}/tracing_on", "0")
    own = threads_of(guest, process)
    found, counts = finish(guest, process)
    after = timer_interrupts(guest)

    ticks = [record for record in found if record["minor"] == ENTRY]
    hits, logged, lost, *_ = counts[ENTRY]
    assert (hits, logged, lost) == (len(ticks), len(ticks), 0)
    assert {len(bytes.fromhex(record["data"])) for record in ticks} == {LOGGED}
    assert all(b"Linux version" in bytes.fromhex(record["data"]) for record in ticks)
    of_cpu = times_of(ticks, ENTRY)
    seen = ticks_of_ftrace(guest, tick, own)
    assert of_cpu.keys() == seen.keys() == {0, 1}
    for cpu, times in of_cpu.items():
        assert_in_turn(times, seen[cpu])
    assert hits <= after - before
    assert 0 < counts[INTERRUPT][0] <= after - before
    guest.put(f"{TRACING}/current_tracer", "nop")
    guest.put(f"{TRACING}/set_ftrace_filter", "")
    assert guest.call(nothing_left) == {}


def test_each_tick_returns(guest: Guest) -> None:
    """Entry and return come in turn on each CPU; an interrupt interrupts no other one of its kind."""
    tick = tick_of(guest)
    process = start(guest, definition(tick, ENTRY), definition(tick, EXIT, "return = yes\n"))
    await_records(guest)
    found, counts = finish(guest, process)
    assert {minor: numbers[:3] for minor, numbers in counts.items()} == {
        minor: [count, count, 0] for minor, count in Counter(record["minor"] for record in found).items()
    }
    of_cpu = {minor: times_of(found, minor) for minor in (ENTRY, EXIT)}
    for cpu in range(guest.machine.cpus):
        assert_in_turn(of_cpu[ENTRY][cpu], of_cpu[EXIT][cpu])
    assert guest.call(nothing_left) == {}
