"""However a run in the kernel ends, and whatever becomes of what it probes: nothing is left, and nothing crashes."""

from __future__ import annotations

import errno
import signal
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON
from integration.support import await_true
from kernel.leftovers import leftovers, nothing_left, unload_module

if TYPE_CHECKING:
    from guests.guest import Guest, Process

INSIDE = {"6.1": 5, "6.12": 9}
"""How far behind its start a function of each kernel has a place that ftrace does not use."""

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
ALL_KINDS = """
offset = vfs_write
minor = 1
log 0
exit

offset = vfs_read + {inside}
minor = 2
log 0
exit

offset = vfs_open
return = yes
minor = 3
log 0
exit

offset = vfs_statx
return = yes
minor = 4
push r, ebx
log 1
exit

address = panic_timeout : panic_timeout + 3
watchpoint = rw
minor = 5
log 0
exit

sampler = 99hz
minor = 6
log 0
exit
"""
LOAD = """
import os
while True:
    with open("/proc/sys/kernel/panic", "w") as file:
        file.write("17")
    os.stat("/tmp"), os.getppid(), open("/proc/version").read()
"""


def start_load(guest: Guest) -> Process:
    """Start a process that reaches all probepoints again and again."""
    guest.put("/tmp/load.py", LOAD)
    return guest.start([str(PYTHON), "/tmp/load.py"])


def put_program(guest: Guest, program: str = ALL_KINDS, header: str = HEADER) -> None:
    guest.put("/tmp/program.rpn", header + program.format(inside=INSIDE[guest.machine.kernel]))


def start(guest: Guest) -> Process:
    process = guest.start_dprobes("run", "/tmp/program.rpn", "--format", "csv", "-o", "/tmp/records.csv")
    process.await_output("active")
    return process


def recorded(guest: Guest) -> bytes:
    return guest.get("/tmp/records.csv")


def test_nothing_is_left_of_a_run_that_is_killed(guest: Guest) -> None:
    put_program(guest)
    process = start(guest)
    load = start_load(guest)
    await_true(lambda: len(recorded(guest)) > 10_000, "records of the load")
    there = guest.call(leftovers)
    assert {"programs", "links", "debug registers in use", "/sys/kernel/debug/kprobes/list"} <= there.keys()
    process.kill()
    process.wait()
    assert guest.call(nothing_left) == {}
    assert load.status is None
    load.kill()


def test_nothing_is_left_of_a_manager_that_is_killed(guest: Guest) -> None:
    put_program(guest)
    guest.dprobes("insert", "/tmp/program.rpn")
    assert "programs" in guest.call(leftovers)
    load = start_load(guest)
    guest.run(["kill", "-9", guest.get("/run/dprobes/manager.lock").decode().strip()])
    assert guest.call(nothing_left) == {}
    load.kill()
    # Another one finds nothing that is in its way.
    assert "probepoints active" in guest.dprobes("insert", "/tmp/program.rpn").stdout
    guest.dprobes("stop", "--manager")
    assert guest.call(nothing_left) == {}


IN_MODULE = "name = dummy\nmodtype = kmod\nmajor = 8\n"
AT_ENTRY = "offset = dummy_xmit\nminor = 1\nexit\n"
ELSEWHERE = """
offset = dummy_xmit + {inside}
minor = 2
exit

offset = dummy_xmit
return = yes
minor = 3
push r, ebx
log 1
exit

address = dummy_netdev_ops
watchpoint = rw
minor = 4
exit
"""
SEND = "import socket\nsocket.socket(2, 2).sendto(b'x', ('10.9.9.2', 9))\n"


@pytest.mark.parametrize("places", [AT_ENTRY, ELSEWHERE], ids=["entry", "elsewhere"])
def test_a_module_is_unloaded_while_it_is_probed(guest: Guest, places: str) -> None:
    """The kernel takes kprobes in it away; it says that the module is in use where ftrace calls a handler."""
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 up")
    guest.put("/tmp/send.py", SEND)
    put_program(guest, places, IN_MODULE)
    process = start(guest)
    guest.run([str(PYTHON), "/tmp/send.py"])
    await_true(lambda: len(recorded(guest).splitlines()) > 1, "a hit in the module")
    error = guest.call(unload_module, "dummy")
    assert error in (0, errno.EWOULDBLOCK)
    assert (b"dummy " in guest.get("/proc/modules")) == (error != 0)
    if error:
        guest.run([str(PYTHON), "/tmp/send.py"])
    process.signal(signal.SIGINT)
    assert process.wait() == 0, process.stderr
    assert guest.call(nothing_left) == {}
    if error:
        assert guest.call(unload_module, "dummy") == 0
    guest.load_module("dummy", "numdummies=1")


def await_more(guest: Guest) -> None:
    size = len(recorded(guest))
    await_true(lambda: len(recorded(guest)) > size, "records")


def test_a_guest_is_suspended_and_resumed(guest: Guest) -> None:
    put_program(guest)
    process = start(guest)
    load = start_load(guest)
    for _ in range(5):
        await_more(guest)
        with guest.suspended():
            pass
    process.signal(signal.SIGINT)
    assert process.wait() == 0
    assert guest.call(nothing_left) == {}
    load.kill()
