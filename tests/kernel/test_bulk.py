"""Very many probepoints in the kernel at once, and a report of what had to be left out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

HEADER = "name = vmlinux\nmodtype = kernel\nmajor = 7\n"
BOTH = 'offset = "{pattern}"\nminor = 1\nexit\noffset = "{pattern}"\nreturn = yes\nminor = 2\nexit\n'


def records_of(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.requires_feature("kprobe_multi")
def test_entry_and_exit_of_every_function_of_a_file_system(guest: Guest) -> None:
    """More than 1000 probepoints on two links; each call that begins comes to its end."""
    guest.load_module("brd", "rd_nr=1 rd_size=16384")
    guest.run("mkfs.ext4 -q /dev/ram0 && mkdir /tmp/disk && mount /dev/ram0 /tmp/disk")
    guest.put("/tmp/bulk.rpn", HEADER + BOTH.format(pattern="ext4_*"))
    work = "cd /tmp/disk && mkdir d && echo text > d/file && mv d/file d/other && cat d/other && rm -r d"
    options = ("--format", "json", "--log", "cseip", "-o", "/tmp/records")
    done = guest.dprobes("run", "/tmp/bulk.rpn", *options, "--", "/bin/sh", "-c", work)
    assert done.stdout == "text\n"
    records = records_of(guest.get("/tmp/records").decode())
    entries = [record["ip"] for record in records if record["minor"] == 1]
    returns = [record for record in records if record["minor"] == 2]
    assert len(entries) > 100, done.stderr
    assert len(set(entries)) > 20
    assert len(returns) == len(entries)
    initial = "the kernel has executed it when it started, and given its memory back (__init)"
    assert f"left out 9, because {initial}: ext4_init_" in done.stderr
    assert "left out 8, because ftrace cannot redirect it" in done.stderr


@pytest.mark.each_kernel
def test_too_many_kprobes_are_refused_before_anything_is_inserted(guest: Guest) -> None:
    handler = "push r, r15\nlog 1\nexit\n"  # ftrace does not save it
    guest.put("/tmp/bulk.rpn", HEADER + f'offset = "ext4_*"\nminor = 1\n{handler}')
    done = guest.dprobes("run", "/tmp/bulk.rpn", "--", "/bin/true", check=False)
    assert done.returncode == 2
    reason = {
        "6.1": "this kernel has no kprobe_multi links",
        "6.12": "the handler reads registers that ftrace does not save, or ftrace is not known to reach them",
    }[guest.machine.kernel]
    assert f"functions are too many for kprobes, which are attached and removed one by one: {reason}" in done.stderr
    assert guest.get("/sys/kernel/debug/kprobes/list") == b""


def test_what_is_left_out_is_listed_with_the_reason(guest: Guest) -> None:
    """``__x64_sys_*`` would be system calls; of the functions of exceptions the kernel lets nobody probe some."""
    guest.put("/tmp/bulk.rpn", HEADER + 'offset = "exc_[a-i]*"\nminor = 1\nexit\noffset = "vfs_r*d"\nminor = 2\nexit\n')
    done = guest.dprobes("run", "/tmp/bulk.rpn", "--format", "csv", "--", "/bin/true", check=False)
    assert "matches no function of 'vmlinux' that can carry a probe: the kernel allows no probe there" in done.stderr
    guest.put("/tmp/bulk.rpn", HEADER + 'offset = "*_nmi_handler*"\nminor = 1\nexit\n')
    listing = guest.dprobes("show", "/tmp/bulk.rpn").stdout
    assert "left out" in listing


def test_all_functions_of_a_module(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 up")
    guest.put("/tmp/bulk.rpn", "name = dummy\nmodtype = kmod\nmajor = 8\n" + BOTH.format(pattern="*"))
    guest.put("/tmp/calls.py", "import socket\nfor _ in range(9): socket.socket(2, 2).sendto(b'x', ('10.9.9.2', 9))\n")
    options = ("--format", "json", "--log", "cseip")
    done = guest.dprobes("run", "/tmp/bulk.rpn", *options, "--", str(PYTHON), "/tmp/calls.py")
    records = records_of(done.stdout)
    symbols = {line.split()[2]: int(line.split()[0], 16) for line in guest.run(SYMBOLS).stdout.splitlines()}
    calls = [record for record in records if record["minor"] == 1 and int(record["ip"], 16) == symbols["dummy_xmit"]]
    assert len(calls) == 9
    assert len([record for record in records if record["minor"] == 2]) == len(records) // 2


SYMBOLS = r"grep ' dummy_xmit\s' /proc/kallsyms"
