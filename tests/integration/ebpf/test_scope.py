"""SCOPE follows the processes that programs make in every way, and says when they end."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

from dprobes.bpf.map_layouts import SCOPE_VALUE, Entry, Status, awaiting_key
from dprobes.engines.ebpf.attach.process_programs import follow_processes, own_process
from dprobes.engines.ebpf.kernel.bpf_links import attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import load, wait
from dprobes.engines.ebpf.kernel.kernel_features import Features, KernelTypes
from dprobes.platform.linux.bpf_calls import ProgramType
from integration.ebpf.kernel import (
    Memory,
    file_offset,
    hit_program,
    memory,
)
from integration.support import TIMEOUT, Builder, await_line

pytestmark = pytest.mark.usefixtures("typed_tracepoints", "leaves_no_descriptor")


def start_in_scope(shared: Memory, *command: str) -> subprocess.Popen[str]:
    """Start a command that is in scope before it executes its program."""
    waiting = ["sh", "-c", 'read line; exec "$@"', "sh", *command]
    process = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    shared.status.words[Status.ALIVE // 8] = 1
    shared.scope[struct.pack("=I", process.pid)] = bytes(SCOPE_VALUE.size)
    return process


def start_awaited(shared: Memory, *command: str) -> subprocess.Popen[str]:
    """Start a command that comes into scope when it executes its program."""
    waiting = ["sh", "-c", 'echo ready; read line; exec "$@"', "sh", *command]
    process = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert await_line(process) == "ready\n"  # the exec of the shell is over
    shared.status.words[Status.ALIVE // 8] = 1
    shared.scope[struct.pack("=I", awaiting_key(process.pid))] = bytes(SCOPE_VALUE.size)
    return process


def await_empty(shared: Memory) -> None:
    """Wait until no process is in scope: the kernel gives threads up some time after their end."""
    until = time.monotonic() + TIMEOUT
    while list(shared.scope):
        assert time.monotonic() < until
        time.sleep(0.01)


def ended(shared: Memory) -> list[int]:
    return [struct.unpack("=I", body)[0] for kind, _, body in shared.entries() if kind is Entry.PROCESS]


def run_family(
    shared: Memory, program: Path, way: str, depth: int, *, children: bool = True
) -> tuple[int, list[int], set[int]]:
    """Return the first process, those that are told to have ended, and those that called tick()."""
    features = Features()
    hits = load(hit_program(), shared.maps, ProgramType.KPROBE, attach_type=uprobe_attach_type(features))
    with (
        KernelTypes() as types,
        follow_processes(shared.maps, types, children=children),
        attach_uprobes(hits, str(program), [(file_offset(program, "tick"), 0)], features),
    ):
        os.close(hits)
        process = start_in_scope(shared, str(program), way, str(depth))
        process.communicate("\n", timeout=TIMEOUT)
        assert process.returncode == 0
        await_empty(shared)
    gone: list[int] = []
    called = set()
    for kind, tid, body in shared.entries():
        if kind is Entry.PROCESS:
            gone += struct.unpack("=I", body)
        else:
            called.add(tid)
    return process.pid, gone, called


@pytest.mark.parametrize(
    ("way", "processes"), [("fork", 2), ("vfork", 4), ("spawn", 4), ("clone-vm", 2), ("exec", 1), ("thread-exec", 1)]
)
def test_children_of_every_kind_are_in_scope_until_they_end(build: Builder, way: str, processes: int) -> None:
    with memory() as shared:
        first, gone, called = run_family(shared, build("family.c"), way, 3)
        assert len(gone) == len(called) == processes
        assert set(gone) == called
        assert gone[-1] == first
        assert shared.word(Status.ALIVE) == 0


def test_children_are_left_alone_if_not_asked_for(build: Builder) -> None:
    with memory() as shared:
        first, gone, called = run_family(shared, build("family.c"), "spawn", 3, children=False)
        assert gone == [first]
        assert len(called) == 4


def test_children_for_which_scope_has_no_room_are_counted(build: Builder) -> None:
    with memory(scope_size=2) as shared:
        first, gone, called = run_family(shared, build("family.c"), "spawn", 3)
        assert len(called) == 4
        assert gone[-1] == first
        assert shared.word(Status.UNFOLLOWED) == 1
        assert shared.word(Status.ALIVE) == 0


def test_a_process_ends_with_its_last_thread(build: Builder) -> None:
    with memory() as shared, KernelTypes() as types, follow_processes(shared.maps, types, children=True):
        process = start_in_scope(shared, str(build("threads.c")), "8", "200", "short")
        output, _ = process.communicate("\n", timeout=TIMEOUT)
        assert output == "1600\n"
        assert ended(shared) == [process.pid]


def test_a_process_without_its_first_thread_is_still_alive(build: Builder) -> None:
    with memory() as shared, KernelTypes() as types, follow_processes(shared.maps, types, children=True):
        process = start_in_scope(shared, str(build("leaderless.c")), "0.5")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
        assert ended(shared) == []
        assert shared.word(Status.ALIVE) == 1
        # The end of a process wakes the reader.
        assert wait(shared.ring, shared.status.words, TIMEOUT)
        assert ended(shared) == [process.pid]
        assert shared.word(Status.ALIVE) == 0
        process.communicate(timeout=TIMEOUT)


def test_a_process_comes_into_scope_when_it_executes_its_program(build: Builder) -> None:
    with (
        memory() as shared,
        KernelTypes() as types,
        follow_processes(shared.maps, types, children=True, awaits_exec=True),
    ):
        process = start_awaited(shared, str(build("family.c")), "system", "2")
        subprocess.run(["true"], check=True)  # another process that executes something
        assert struct.pack("=I", process.pid) not in shared.scope
        process.communicate("\n", timeout=TIMEOUT)
        gone = ended(shared)
        assert gone[-1] == process.pid
        assert len(gone) > 1
        assert shared.word(Status.ALIVE) == 0
        await_empty(shared)


def test_a_process_that_ends_before_it_executes_its_program_is_not_alive() -> None:
    with (
        memory() as shared,
        KernelTypes() as types,
        follow_processes(shared.maps, types, children=True, awaits_exec=True),
    ):
        process = start_awaited(shared, "true")
        process.kill()
        process.communicate(timeout=TIMEOUT)
        assert ended(shared) == [process.pid]
        assert shared.word(Status.ALIVE) == 0
        await_empty(shared)


def test_other_processes_are_not_in_scope() -> None:
    with memory() as shared, KernelTypes() as types, follow_processes(shared.maps, types, children=True):
        subprocess.run(["sh", "-c", "sh -c true; true"], check=True)
        assert list(shared.scope) == []
        assert shared.entries() == []


def test_programs_see_this_process_by_its_initial_id() -> None:
    assert own_process() == os.getpid()
