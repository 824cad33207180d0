"""Returns that the kernel has no room to await are counted, in the scope of the run."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from kernel.module_calls import load

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

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


@pytest.mark.each_kernel
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


WAIT = f"""
import fcntl, os, struct, sys, threading
if not os.path.exists("/dev/net/tun"):
    os.makedirs("/dev/net", exist_ok=True)
    os.mknod("/dev/net/tun", 0o600 | 0x2000, os.makedev(10, 200))
tunnel = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tunnel, 0x400454CA, struct.pack("16sH22x", b"asleep", 0x1001))
for _ in range({SLEEPERS}):
    threading.Thread(target=os.read, args=(tunnel, 100)).start()
def is_asleep(task):
    return "tun_" in open(f"/proc/self/task/{{task}}/wchan").read()
while sum(map(is_asleep, os.listdir("/proc/self/task"))) < {SLEEPERS}:
    pass
print("asleep", flush=True)
"""
"""Let threads wait for packets, of which there are none."""


def test_returns_in_a_module_that_is_loaded_later_are_counted_as_well(guest: Guest) -> None:
    path = guest.put_module("tun")
    guest.put("/tmp/wait.py", WAIT)
    source = "name = tun\nmodtype = kmod\nmajor = 7\noffset = tun_chr_read_iter\nreturn = yes\nminor = 1\nexit\n"
    guest.put("/tmp/returns.rpn", source)
    run = guest.start_dprobes("run", "/tmp/returns.rpn", "--format", "csv", "-o", "/tmp/out")
    run.await_output("active when it is")
    guest.call(load, path)
    run.await_output("has been loaded")
    waiting = guest.start([str(PYTHON), "-S", "-E", "/tmp/wait.py"])
    waiting.await_output("asleep")
    waiting.kill()
    waiting.wait()
    run.signal(signal.SIGINT)
    said = run.completed().stderr
    (row,) = re.findall(r"^7,1 .*?tun_chr_read_iter.*? +(\d+) ", said, re.MULTILINE)
    (missed,) = re.findall(r"(\d+) hits of tun_chr_read_iter \(return\) ran no handler", said)
    assert int(row) == SLEEPERS, said
    assert SLEEPERS - ROOM <= int(missed) < SLEEPERS, said
