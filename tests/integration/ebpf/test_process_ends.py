"""What the kernel does for a process that ends is in scope, up to the last time that it leaves its CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import SCOPE_VALUE, Status
from dprobes.engines.ebpf.attach.process_programs import follow_processes
from dprobes.engines.ebpf.attach.run_scope import KEY
from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes
from integration.ebpf.kernel import memory, require_bpf, require_initial_namespace
from integration.support import TIMEOUT, await_line

if TYPE_CHECKING:
    from integration.support import Builder

ENDS = """
thread unsigned long state;
tracepoint sched:sched_process_exec { state = 7; }
tracepoint sched:sched_process_exit { @exits = count(); if (state == 7) @known = count(); }
tracepoint sched:sched_switch {
    if (prev_state & 0x30) { @last = count(); if (state == 7) @known_last = count(); }
}
tracepoint signal:signal_generate { if (sig == 17) @told = count(); }
"""
"""
Where sched_switch says EXIT_DEAD (0x10) or EXIT_ZOMBIE (0x20), a thread leaves its CPU for the last time
(include/linux/sched.h, TASK_REPORT).
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


def tables_of(*arguments: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", "--engine", "ebpf", "--overhead", "off", "-e", ENDS, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines() if line.startswith("@")]
    return {name: int(value) for name, _, value in lines}


def test_every_thread_of_a_command_is_seen_to_the_end(build: Builder) -> None:
    program = build("threads.c", "-pthread")
    assert tables_of("--", str(program), "8", "10") == {
        "@exits": 9,
        "@known": 1,
        "@known_last": 1,
        "@last": 9,
        "@told": 1,
    }


def test_so_are_children_whether_they_are_waited_for_or_not() -> None:
    # The first child is waited for; the second one's end is of no interest to its parent; the third one outlives it.
    script = "sh -c :; trap '' CHLD; sh -c :; sh -c 'sleep 0.2; exit 0' & exit 0"
    found = tables_of("--", "sh", "-c", script)
    assert found["@exits"] == found["@last"] == found["@known_last"] == 5
    assert found["@told"] == 5


def test_one_that_nobody_waits_for_ends_the_run() -> None:
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as process:
        text = f'begin {{ printf("there"); }} {ENDS}'
        client = subprocess.Popen(
            [sys.executable, "-m", "dprobes", "run", "--engine", "ebpf", "-e", text, "-p", str(process.pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "there" in await_line(client)
        assert process.stdin is not None
        process.stdin.close()
        output, errors = client.communicate(timeout=TIMEOUT)
        assert client.returncode == 0, errors
        # It is a zombie still.
        assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    assert "@exits: 1" in output
    assert "@last: 1" in output
    assert "@told: 1" in output


def fork_with_id(pid: int) -> bool:
    """Let this process have a child with an id, if nobody else is quicker; the child waits for a signal."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1), encoding="ascii")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    if child != pid:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return child == pid


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("children", [False, True])
def test_who_gets_the_number_of_one_that_has_ended_does_not_get_its_scope(in_scope: bool, children: bool) -> None:
    ended = SCOPE_VALUE.pack(0x1234, 1, 1)
    with memory() as shared, KernelTypes() as types, follow_processes(shared.maps, types, children=children):
        for _ in range(100):
            with subprocess.Popen(["true"]) as process:
                process.wait()
            key = KEY.pack(process.pid)
            shared.scope[key] = ended
            own = KEY.pack(os.getpid())
            if in_scope:
                shared.scope[own] = bytes(SCOPE_VALUE.size)
            alive = shared.word(Status.ALIVE)
            is_there = fork_with_id(process.pid)
            shared.scope.discard(own)
            if is_there:
                break
            for each in list(shared.scope):
                shared.scope.discard(each)
        else:
            pytest.fail("others took every number")
        try:
            found = {each: shared.scope[each] for each in list(shared.scope)}.get(key)
            assert found == (bytes(SCOPE_VALUE.size) if in_scope and children else None)
            assert shared.word(Status.ALIVE) - alive == (1 if in_scope and children else 0)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
