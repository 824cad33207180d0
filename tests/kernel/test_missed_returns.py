"""Returns that the kernel has no room to await are counted, in the scope of the run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
SLEEPERS = 60
ROOM = 10
"""How many returns of a function the kernel awaits at the same time on few processors (register_kretprobe)."""

SLEEP = f"""
import os, threading
reading, writing = os.pipe()
def read():
    os.read(reading, 1)
threads = [threading.Thread(target=read) for _ in range({SLEEPERS})]
for thread in threads:
    thread.start()
def is_asleep(task):
    return "pipe" in open(f"/proc/self/task/{{task}}/wchan").read()
while sum(map(is_asleep, os.listdir("/proc/self/task"))) < {SLEEPERS}:
    pass
os.write(writing, bytes({SLEEPERS}))
for thread in threads:
    thread.join()
"""


def run(guest: Guest, program: str) -> str:
    """Run a program while many threads sleep in a function; return the summary."""
    guest.put("/tmp/returns.rpn", HEADER + program)
    guest.put("/tmp/sleep.py", SLEEP)
    options = ("--format", "csv", "-o", "/tmp/out", "--", str(PYTHON), "/tmp/sleep.py")
    return guest.dprobes("run", "/tmp/returns.rpn", *options).stderr


def test_returns_for_which_there_is_no_room_are_counted(guest: Guest) -> None:
    program = "offset = pipe_read\nreturn = yes\nminor = 1\nexit\n"
    summary = run(guest, program + "offset = pipe_read\nminor = 2\nexit\n")
    returns, calls = (int(re.findall(rf"^7,{n} .*?pipe_read.*? +(\d+) ", summary, re.MULTILINE)[0]) for n in (1, 2))
    (missed,) = map(int, re.findall(r"(\d+) hits of pipe_read \(return\) ran no handler", summary))
    assert missed >= SLEEPERS - ROOM
    if guest.machine.kernel == "6.1":
        assert calls == returns
    else:
        assert calls <= returns, "this kernel counts the calls of all processes"


@pytest.mark.requires_feature("kprobe_multi")
def test_functions_with_one_link_miss_returns_together(guest: Guest) -> None:
    summary = run(guest, 'offset = "pipe_rea*"\nreturn = yes\nminor = 1\nexit\n')
    assert "ran no handler" in summary
