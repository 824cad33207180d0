"""The recipes for the kernel (docs/recipes.md) on other kernels: all of them are inserted, and memory runs out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(
    path.stem for path in EXAMPLES.glob("*.rpn") if re.search("^modtype = tracepoint", path.read_text(), re.MULTILINE)
)
WORK = (
    "import os, socket, time\n"
    "time.sleep(0.05)\n"
    "for _ in range(20): os.getppid(), open('/etc/passwd').close(), socket.socketpair()\n"
)


def test_each_recipe_is_inserted_and_hit(guest: Guest) -> None:
    assert len(RECIPES) == 11
    guest.put("/tmp/work.py", WORK)
    hits = {}
    for recipe in RECIPES:
        options = ("--templates", f"{EXAMPLES}/templates", "--engine", "ebpf")
        done = guest.dprobes("run", f"{EXAMPLES}/{recipe}.rpn", *options, "--", str(PYTHON), "/tmp/work.py")
        assert "error" not in done.stderr
        rows = re.findall(r"^\d+,\d+ +\S+(?: \(return\))? +(\d+) ", done.stderr, re.MULTILINE)
        hits[recipe] = sum(int(row) for row in rows)
    assert hits["files-opened"] > 20
    assert hits["page-faults"] > 100
    assert hits["kernel-allocations"] > 20
    assert hits["context-switches"] > 0


HUNGRY = "data = []\nwhile True: data.append(bytearray(1 << 20))\n"


def test_who_is_killed_for_want_of_memory(guest: Guest) -> None:
    guest.put("/tmp/hungry.py", HUNGRY)
    guest.run("mkdir -p /tmp/cgroup && mount -t cgroup2 none /tmp/cgroup")
    guest.run("echo +memory > /tmp/cgroup/cgroup.subtree_control && mkdir /tmp/cgroup/small")
    guest.run("echo 30M > /tmp/cgroup/small/memory.max")
    script = f"echo 0 > /tmp/cgroup/small/cgroup.procs; echo pid $$; exec {PYTHON} /tmp/hungry.py"
    options = ("--templates", f"{EXAMPLES}/templates", "--engine", "ebpf")
    done = guest.dprobes("run", f"{EXAMPLES}/oom-kills.rpn", *options, "--", "/bin/sh", "-c", script, check=False)
    pid = re.search(r"^pid (\d+)$", done.stdout, re.MULTILINE)
    killed = re.search(r"^\S+\[(\d+)\] wanted memory, and pid=(\d+) is killed$", done.stdout, re.MULTILINE)
    assert pid is not None, done
    assert killed is not None, done
    assert killed.groups() == (pid[1], pid[1])
