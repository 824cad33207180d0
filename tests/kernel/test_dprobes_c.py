"""DProbes C in kernels that have kprobes: functions, their returns, memory, tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

READ = "dd if=/proc/version of=/dev/null bs=1 count=7 status=none"


def test_functions_of_the_kernel(guest: Guest) -> None:
    text = """
    kernel:vfs_read(struct file *file, buf, size_t size) when (comm == "dd" && size == 1) {
        @reads = count();
        @by[func, size] = sum(size);
        if (@reads == 3) printf("third read of %d by %s", size, comm);
    }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", *READ.split())
    lines = done.stdout.splitlines()
    assert "@reads: 7" in lines
    assert next(line for line in lines if "third" in line).endswith("third read of 1 by dd")
    assert next(line for line in lines if line.startswith("@by[")).endswith(", 1]: 7")


def test_returns_know_their_entry(guest: Guest) -> None:
    text = """
    return kernel:vfs_read(file, buf, size) when (comm == "dd" && size == 1) {
        @got[retval] = count();
        @ns = max(elapsed);
    }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", *READ.split())
    lines = done.stdout.splitlines()
    assert "@got[1]: 7" in lines
    (slowest,) = [line for line in lines if line.startswith("@ns: ")]
    assert slowest != "@ns: 0"


def test_types_are_those_of_the_kernel(guest: Guest) -> None:
    guest.run("echo hello > /tmp/hello.txt")
    text = """
    kernel:vfs_open(path) when (startswith(str(path->dentry->d_name.name), "hello")) {
        @opened[str(path->dentry->d_name.name), path->dentry->d_inode->i_size] = count();
    }
    return kernel:vfs_read when (comm == "cat" && retval > 0) { @bytes = sum(retval); @asked = max(count); }
    tracepoint sched:sched_process_exec { @[((struct task_struct *)args.p)->tgid == pid] = count(); }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", "sh", "-c", "cat /tmp/hello.txt; echo end")
    lines = done.stdout.splitlines()
    assert "@opened[hello.txt, 6]: 1" in lines
    assert "@[1]: 2" in lines
    (read,) = [int(line.partition(": ")[2]) for line in lines if line.startswith("@bytes: ")]
    assert read >= 6
    (asked,) = [int(line.partition(": ")[2]) for line in lines if line.startswith("@asked: ")]
    assert asked >= 4096


def test_what_the_kernel_has_not_is_refused(guest: Guest) -> None:
    text = "kernel:vfs_open(path) { @[path->dentri] = count(); }"
    done = guest.dprobes("run", "-e", text, "--", "true", check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[:4] == [
        "-e:1:27: error: 'struct path' has no member 'dentri'",
        f"    {text}",
        "                              ^~~~~~~~~~~~",
        "hint: did you mean 'dentry'?",
    ]


SEND = "import socket\nsocket.socket(2, 2).sendto(b'x' * 21, ('10.9.9.2', 9))\n"


@pytest.mark.requires_feature("btf_modules")
def test_functions_of_modules_have_the_types_of_the_module(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 arp off up")
    guest.put("/tmp/calls.py", SEND)
    text = "kmod dummy:dummy_xmit when (skb->protocol == 8) { @[str(dev->name), skb->len] = count(); }"
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", str(PYTHON), "/tmp/calls.py")
    assert "@[dummy0, 63]: 1" in done.stdout.splitlines()  # with the headers of Ethernet, IP and UDP
