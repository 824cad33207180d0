"""The recipes for the kernel (recipes.md) on other kernels: all of them are inserted, and memory runs out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from guests.initramfs import PYTHON

if TYPE_CHECKING:
    from guests.guest import Guest

pytestmark = pytest.mark.shared_guest

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACEPOINTS = re.compile("^(?:modtype = )?tracepoint", re.MULTILINE)
SOURCES = (*EXAMPLES.glob("*.rpn"), *EXAMPLES.glob("*.dpc"))
RECIPES = sorted(path for path in SOURCES if TRACEPOINTS.search(path.read_text()))
WORK = (
    "import os, socket, time\n"
    "time.sleep(0.05)\n"
    "for _ in range(20): os.getppid(), open('/etc/passwd').close(), socket.socketpair()\n"
)


def test_each_recipe_is_inserted_and_hit(guest: Guest) -> None:
    assert len(RECIPES) == 12
    guest.put("/tmp/work.py", WORK)
    hits = {}
    for recipe in (*map(str, RECIPES), "sched/off-cpu"):
        options = ("--templates", f"{EXAMPLES}/templates", "--engine", "ebpf")
        done = guest.dprobes("run", recipe, *options, "--", str(PYTHON), "/tmp/work.py")
        assert "error" not in done.stderr
        rows = re.findall(r"^\d+,\d+ +\S+(?: \(return\))? +(\d+) ", done.stderr, re.MULTILINE)
        hits[Path(recipe).stem] = sum(int(row) for row in rows)
    assert hits["files-opened"] > 20
    assert hits["page-faults"] > 100
    assert hits["kernel-allocations"] > 20
    assert hits["context-switches"] > 0
    assert hits["address-spaces"] > 0
    assert hits["off-cpu"] > 0


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
    killed = re.search(r"  \S+\[(\d+)\] wanted memory, and pid=(\d+) is killed$", done.stdout, re.MULTILINE)
    assert pid is not None, done
    assert killed is not None, done
    assert killed.groups() == (pid[1], pid[1])


SWITCHES = r"previous=(\d+) state=(\d+) stack=(\w+) -> next=(\d+) next_state=\w+ next_stack=(\w+): "
SWITCHES += r"table=(\w+) entry=(\w+) -> next_table=(\w+) next_entry=(\w+)"

TASK_DEAD = 0x80
"""The state of a thread that is switched out for the last time (``__TASK_DEAD``), include/linux/sched.h."""


def test_switches_show_both_address_spaces(guest: Guest) -> None:
    guest.put(
        "/tmp/work.py",
        "import os, time\nopen('/tmp/pid', 'w').write(str(os.getpid()))\nfor _ in range(5): time.sleep(0.02)\n",
    )
    options = ("--templates", f"{EXAMPLES}/templates", "--engine", "ebpf")
    done = guest.dprobes("run", f"{EXAMPLES}/address-spaces.rpn", *options, "--", str(PYTHON), "/tmp/work.py")
    pid = guest.get("/tmp/pid").decode()
    seen = [each for each in re.findall(SWITCHES, done.stdout) if each[0] == pid]
    assert len(seen) >= 5
    for _, state, stack, _, next_stack, table, entry, next_table, next_entry in seen:
        assert {int(word, 16) >> 63 for word in (stack, next_stack, table)} == {1}
        # The entry is present until the process has given its memory back.
        assert int(entry, 16) & 1 or int(state) & TASK_DEAD
        assert (int(next_table, 16) >> 63, int(next_entry, 16) & 1) in {(1, 1), (0, 0)}
    assert [int(each[1]) & TASK_DEAD for each in seen] == [0] * (len(seen) - 1) + [TASK_DEAD]
    # The table is the process's own while it lives, and stays the same.
    assert len({each[5] for each in seen[:-1]}) == 1


def test_who_calls_kill_is_seen_with_the_kernels_stack(guest: Guest) -> None:
    options = ("--templates", f"{EXAMPLES}/templates")
    script = "sleep 60 & kill -USR1 $!; kill -KILL $!; echo $$ $!"
    done = guest.dprobes("run", f"{EXAMPLES}/kill-calls.rpn", *options, "--", "/bin/sh", "-c", script)
    (pids,) = re.findall(r"^(\d+) (\d+)$", done.stdout, re.MULTILINE)
    calls = re.findall(
        r"sh\[(\d+)\] calls from \S+.* kill\(signal=(\d+), to=(\d+)\), number=(\d+), stack=", done.stdout
    )
    assert calls == [(pids[0], "10", pids[1], "1"), (pids[0], "9", pids[1], "2")]
