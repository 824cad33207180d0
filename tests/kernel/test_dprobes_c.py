"""DProbes C in kernels that have kprobes: functions, their returns, memory, tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest
    from integration.support import Builder

pytestmark = pytest.mark.shared_guest

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


def test_what_a_process_does_at_its_end_is_in_scope(guest: Guest, build: Builder) -> None:
    guest.put("/tmp/threads", build("threads.c", "-pthread"))
    text = """
    thread unsigned long n;
    kernel:do_exit { n = 5; }
    tracepoint sched:sched_process_exit { if (n == 5) @exits = count(); }
    kernel:exit_task_namespaces { if (n == 5) @spaces = count(); }
    kernel:do_task_dead { if (n == 5) @dead = count(); }
    tracepoint sched:sched_switch { if (n == 5 && (prev_state & 0x30)) @last = count(); }
    tracepoint signal:signal_generate { if (sig == 17) @told = count(); }
    """
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", "/tmp/threads", "3", "10")
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    assert lines == ["@exits: 4", "@spaces: 4", "@dead: 4", "@last: 4", "@told: 1"]


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
def test_why_a_function_cannot_be_probed_is_said(guest: Guest) -> None:
    def refused(place: str) -> str:
        done = guest.dprobes("run", "-e", f"kernel:{place} {{ @ = count(); }}", "--", "true", check=False)
        assert done.returncode in (1, 2)
        return done.stderr

    given_back = (
        "EXCLUDED: start_kernel: the kernel has executed it when it started, and given its memory back (__init)"
    )
    assert given_back in refused("start_kernel")
    untraceable = "the function cannot be traced (notrace, or part of the tracing code)"
    handling = "the kernel allows no probe there: the code may be used by kprobes themselves (kprobe blacklist)"
    said = refused("native_sched_clock")
    assert f"EXCLUDED: native_sched_clock: {untraceable}" in said or handling in said
    if b" __pfx_vfs_read\n" in guest.get("/proc/kallsyms"):
        padding = "EXCLUDED: __pfx_vfs_read: it is the space before 'vfs_read', and never executed"
        assert padding in refused("__pfx_vfs_read")


def test_functions_of_one_name_are_told_apart_and_probed_together(guest: Guest) -> None:
    done = guest.dprobes("run", "-e", "kernel:type_show { }", "--", "true", check=False)
    found = re.search(r"error: 'type_show' is the name of (\d+) places in the kernel, at offsets (.*)", done.stderr)
    assert found is not None, done.stderr
    places = dict(re.findall(r"(0x[0-9a-f]+) \(after '(\w+)'\)", found[2]))
    assert len(places) == int(found[1]) > 1
    assert (
        "hint: write the intended one as '\"type_show,1\"', or all as a pattern, '\"*:type_show\"'; "
        "debug information of the kernel would show their source files\n" in done.stderr
    )
    shown = "/sys/bus/event_source/devices/software/type"  # by type_show of kernel/events/core.c
    done = guest.dprobes("run", "-e", 'kernel:"*:type_show" { @[func] = count(); }', "--", "cat", shown)
    rows = re.findall(r"^0,0 +type_show,(\d+) +(\d+) ", done.stderr, re.MULTILINE)
    assert sorted(int(number) for number, _ in rows) == list(range(1, len(places) + 1))
    (hit,) = (number for number, hits in rows if hits != "0")
    assert f"@[type_show,{hit} [vmlinux]]: 1\n" in done.stdout
    one = f'kernel:"type_show,{hit}" {{ printf("%s", func); }}'
    done = guest.dprobes("run", "-e", one, "--", "cat", shown)
    assert re.search(rf"  type_show,{hit} \[vmlinux\]$", done.stdout, re.MULTILINE)
    assert re.search(rf"^0,0 +type_show,{hit} +1 ", done.stderr, re.MULTILINE)


def test_a_kernel_without_types_is_named(guest: Guest) -> None:
    guest.run("mount -t tmpfs none /sys/kernel/btf")
    text = "kernel:vfs_read(struct file *file) { @[file->f_pos] = count(); }"
    done = guest.dprobes("run", "-e", text, "--", "true", check=False)
    lack = "this kernel does not describe its types (CONFIG_DEBUG_INFO_BTF)"
    assert f"hint: {lack}; define them: struct file {{ … }};\n" in done.stderr
    done = guest.dprobes("run", "-e", "kernel:vfs_read { @[curtask->pid] = count(); }", "--", "true", check=False)
    assert f"hint: {lack}\n" in done.stderr


def test_functions_of_modules_have_the_types_of_the_module(guest: Guest) -> None:
    guest.load_module("dummy", "numdummies=1")
    guest.run("ip addr add 10.9.9.1/24 dev dummy0 && ip link set dummy0 arp off up")
    guest.put("/tmp/calls.py", SEND)
    text = "kmod dummy:dummy_xmit when (skb->protocol == 8) { @[str(dev->name), skb->len] = count(); }"
    done = guest.dprobes("run", "--overhead", "off", "-e", text, "--", str(PYTHON), "/tmp/calls.py")
    assert "@[dummy0, 63]: 1" in done.stdout.splitlines()  # with the headers of Ethernet, IP and UDP
