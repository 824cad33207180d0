"""What handlers of returns in the kernel know of the entry: the time of this very call, and its arguments."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON
from kernel.test_kernel_returns import CHAINS, DEPTH, ROUNDS
from kernel.test_trampolines import NO_KPROBES
from kernel.trampoline_calls import run_without

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

ENTRY, RETURN = 1, 2
UNSEEN = 1 << 63
SLEEPS = 8
ASKED = [100_000_000 + 10_000_000 * n for n in range(SLEEPS)]
"""
For how many nanoseconds the program below asks to sleep.

Python asks for the end of that time, which begins before the call.
"""

SLEEP = f"""
import time
for asked in {ASKED}:
    before = time.monotonic_ns()
    time.sleep(asked / 1e9)
    print(time.monotonic_ns() - before, flush=True)
"""


def run(guest: Guest, function: str, returned: str, code: str) -> tuple[list[dict[str, Any]], str]:
    """Run code with probepoints at entry and return of a function; return the records in order, and what it printed."""
    text = (
        f"name = vmlinux\nmodtype = kernel\nmajor = 7\noffset = {function}\nminor = {ENTRY}\n"
        f"push r, arg0\nlog 1\nexit\n"
        f"offset = {function}\nreturn = yes\nminor = {RETURN}\nsx unseen\n{returned}push time\npush elapsed\n"
        f"push entry, arg0\nlog 3\nexit\nunseen: push {UNSEEN}\nlog 1\nexit\n"
    )
    guest.put("/tmp/program.rpn", text)
    guest.put("/tmp/code.py", code)
    options = ("--format", "json", "--log", "tsc,tid", "--overhead", "off", "-o", "/tmp/records")
    done = guest.dprobes("run", "/tmp/program.rpn", *options, "--", str(PYTHON), "/tmp/code.py")
    lines = guest.run("cat /tmp/records").stdout.splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda record: record["time"]), done.stdout


def words(record: dict[str, Any]) -> list[int]:
    data = bytes.fromhex(record["data"])
    return [int.from_bytes(data[n : n + 8], "little") for n in range(0, len(data), 8)]


def paired(records: list[dict[str, Any]]) -> int:
    """
    Compare each return with the entry that it belongs to, by the order in its thread; return how many there were.

    A call began between what its thread did before and behind the hit at the entry. The handler reads the clock more
    than once, and an interrupt may come in between: the end that ``elapsed`` goes back from is one of its times, or
    between them.
    """
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        threads[record["tid"]].append(record)
    count = 0
    for mine in threads.values():
        under_way: list[tuple[int, float, float]] = []
        for n, record in enumerate(mine):
            if record["minor"] == ENTRY:
                before = mine[n - 1]["time"] if n else 0
                after = mine[n + 1]["time"] if n + 1 < len(mine) else math.inf
                under_way.append((words(record)[0], before, after))
            elif under_way:
                argument, elapsed, now = words(record)
                expected, before, after = under_way.pop()
                assert argument == expected
                first, last = sorted((now, record["time"]))
                assert before < last - elapsed
                assert first - elapsed < after
                count += 1
            else:
                assert words(record) == [UNSEEN]
    return count


@pytest.mark.parametrize("registers", ["", "push r, ebx\nros 1\n"], ids=["registers of ftrace", "all registers"])
def test_calls_of_calls_have_their_own_entries(guest: Guest, registers: str) -> None:
    records, _ = run(guest, "ep_loop_check_proc", registers, CHAINS)
    assert paired(records) >= ROUNDS * (DEPTH - 1)


def test_a_sleeping_call_takes_most_of_what_the_program_asks_for(guest: Guest) -> None:
    records, printed = run(guest, "hrtimer_nanosleep", "", SLEEP)
    assert paired(records) == SLEEPS
    times = [words(record)[1] for record in records if record["minor"] == RETURN]
    for asked, elapsed, measured in zip(ASKED, times, map(int, printed.split()), strict=True):
        assert asked / 2 < elapsed <= measured


def test_a_pattern_keeps_the_entries_of_all_that_it_matches(guest: Guest) -> None:
    text = (
        'name = vmlinux\nmodtype = kernel\nmajor = 7\noffset = "hrtimer_nano*"\nreturn = yes\nminor = 1\n'
        "push elapsed\npush entry, arg2\nlog 2\nexit\n"
    )
    guest.put("/tmp/program.rpn", text)
    guest.put("/tmp/code.py", SLEEP)
    done = guest.dprobes(
        "run", "/tmp/program.rpn", "--format", "json", "-o", "/tmp/records", "--", str(PYTHON), "/tmp/code.py"
    )
    records = [json.loads(line) for line in guest.run("cat /tmp/records").stdout.splitlines()]
    slept = [words(record) for record in records if record.get("function", record["symbol"]) == "hrtimer_nanosleep"]
    assert len(slept) == SLEEPS
    for asked, (clock, elapsed), measured in zip(ASKED, slept, map(int, done.stdout.split()), strict=True):
        assert asked / 2 < elapsed <= measured
        assert clock == 1  # CLOCK_MONOTONIC, what time.sleep asks for


@pytest.mark.requires_feature("fentry")
def test_a_trampoline_knows_the_entry_as_well(guest: Guest) -> None:
    text = (
        "name = vmlinux\nmodtype = kernel\nmajor = 7\noffset = hrtimer_nanosleep\nreturn = yes\nminor = 1\n"
        "push elapsed\npush entry, arg2\nlog 2\nexit\n"
    )
    guest.put("/tmp/program.rpn", text)
    guest.put("/tmp/code.py", f"out = open('/tmp/measured', 'w')\n{SLEEP}".replace("flush=True", "file=out"))
    options = ("--format", "json", "-o", "/tmp/records", "--", str(PYTHON), "/tmp/code.py")
    status, _, errors = guest.call(run_without, NO_KPROBES, "run", "/tmp/program.rpn", *options, timeout=120)
    assert (status, "fexit" in errors, "fentry" in errors) == (0, True, True), errors
    slept = [words(json.loads(line)) for line in guest.run("cat /tmp/records").stdout.splitlines()]
    assert len(slept) == SLEEPS
    measurements = map(int, guest.get("/tmp/measured").split())
    for asked, (clock, elapsed), measured in zip(ASKED, slept, measurements, strict=True):
        assert asked / 2 < elapsed <= measured
        assert clock == 1
