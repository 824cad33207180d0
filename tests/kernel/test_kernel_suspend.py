"""
A guest that suspends itself while it is probed: its processes are frozen, its devices stand still, and all goes on.

It sleeps with all CPUs idle (s2idle). This emulator cannot wake up a guest from S3, be it probed or not; what that does
to CPUs is in ``test_kernel_cpus``.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter
from typing import TYPE_CHECKING

from guests.emulator import GuestError
from guests.initramfs import PYTHON
from integration.support import await_true
from kernel.leftovers import nothing_left

if TYPE_CHECKING:
    from guests.guest import Guest, Process
    from integration.support import Builder

ENTRY, RETURN, WATCHED, SAMPLED = range(1, 5)
KERNEL = f"""
name = vmlinux
modtype = kernel
major = 7

offset = __x64_sys_getsid
minor = {ENTRY}
exit

offset = do_sys_openat2
return = yes
minor = {RETURN}
exit

address = panic_timeout : panic_timeout + 3
watchpoint = w
minor = {WATCHED}
exit

sampler = 99hz
minor = {SAMPLED}
exit
"""
PROGRAM = 'name = "/tmp/hotloop"\nmajor = 8\noffset = tick\nminor = 1\nexit\n'
WORK = """
import os
for _ in range(50):
    os.getsid(0), open('/proc/sys/kernel/panic', 'w').write('17')
"""
ASLEEP = "Freezing remaining freezable tasks completed"
"""What the kernel says before it sleeps."""


def counts(guest: Guest) -> Counter[tuple[int, int]]:
    lines = [line for name in ("kernel", "loop") for line in guest.get(f"/tmp/{name}.json").splitlines(keepends=True)]
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last of a file may be in the writing
    return Counter((record["major"], record["minor"]) for record in records)


def work(guest: Guest, times: int) -> None:
    """Hit all, so many times by now, and wait for the records."""
    guest.run([str(PYTHON), "/tmp/work.py"])
    guest.run("/tmp/hotloop 7")
    sampled = counts(guest)[7, SAMPLED]
    await_true(
        lambda: (
            counts(guest)[7, WATCHED] >= 50 * times
            and counts(guest)[8, 1] >= 7 * times
            and counts(guest)[7, SAMPLED] > sampled
        ),
        "hits of all kinds",
    )


def wake(guest: Guest, sleep: Process) -> None:
    """Press the power button until a process has come back from sleep: too early, it does nothing."""
    for _ in range(60):
        guest.press_power_button()
        with contextlib.suppress(GuestError):
            guest.wait_until(lambda: sleep.status is not None, "the end of sleep", 1)
            break
    sleep.completed()


def test_a_guest_suspends_itself_while_it_is_probed(guest: Guest, build: Builder) -> None:
    guest.load_module("button")  # it wakes the machine up
    guest.put("/tmp/hotloop", build("hotloop.c"))
    guest.put("/tmp/work.py", WORK)
    options = ("--engine", "ebpf", "--format", "json", "--overhead", "off")
    runs = []
    for name, program in (("kernel", KERNEL), ("loop", PROGRAM)):
        guest.put(f"/tmp/{name}.rpn", program)
        runs.append(guest.start_dprobes("run", f"/tmp/{name}.rpn", *options, "-o", f"/tmp/{name}.json"))
        runs[-1].await_output("Ctrl-C ends the run")
    work(guest, 1)
    guest.put("/proc/sys/kernel/printk", "8")  # all that it says comes to the console
    for times in (2, 3):
        already = guest.console.count(ASLEEP)
        sleep = guest.start("echo freeze > /sys/power/state")
        await_true(lambda: guest.console.count(ASLEEP) > already, "the guest to sleep")  # noqa: B023
        wake(guest, sleep)
        work(guest, times)
    for process in runs:
        process.signal(signal.SIGINT)
        process.completed()
    found = counts(guest)
    assert (found[7, ENTRY], found[7, WATCHED], found[8, 1]) == (150, 150, 21)
    assert found[7, RETURN] > 150
    assert guest.kernel_log.count("PM: suspend exit") == 2
    assert guest.call(nothing_left) == {}
