"""Programs attached to uprobes, hardware breakpoints and clocks: hits are exact, and nothing is left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.bpf.map_layouts import Entry
from dprobes.engines.ebpf.kernel.bpf_links import (
    SINGLE_UPROBES_MAX,
    attach_breakpoint,
    attach_sampler,
    attach_uprobes,
    uprobe_attach_type,
)
from dprobes.engines.ebpf.kernel.bpf_objects import load, wait
from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from dprobes.errors import DprobesError, EngineError, NotSupportedError, TargetError
from dprobes.platform.linux.bpf_calls import ProgramType
from dprobes.platform.linux.perf_calls import Access
from dprobes.platform.linux.procfs import online_cpus
from dprobes.rpn.rpn_program import Sampler
from integration.ebpf.kernel import Memory, file_offset, hit_program, memory
from integration.support import TIMEOUT, Builder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("leaves_no_descriptor")

MULTI = Features()
SINGLE = Features(overrides={Feature.UPROBE_MULTI: False})
COOKIE = 0xFEDC_BA98_7654_3210


@pytest.fixture(params=[MULTI, SINGLE], ids=["multi", "single"])
def features(request: pytest.FixtureRequest) -> Features:
    features: Features = request.param
    if features is MULTI and Feature.UPROBE_MULTI not in features:
        pytest.skip("this kernel has no uprobe_multi links")
    return features


@pytest.fixture
def shared() -> Iterator[Memory]:
    with memory() as made:
        yield made


@pytest.fixture
def uprobe_program(shared: Memory, features: Features) -> Iterator[int]:
    fd = load(hit_program(), shared.maps, ProgramType.KPROBE, attach_type=uprobe_attach_type(features))
    yield fd
    os.close(fd)


@pytest.fixture
def event_program(shared: Memory) -> Iterator[int]:
    fd = load(hit_program(), shared.maps, ProgramType.PERF_EVENT)
    yield fd
    os.close(fd)


def hits(shared: Memory) -> list[tuple[int, int, int]]:
    """Return the thread id, the cookie and the ip of each hit."""
    return [(tid, *struct.unpack("=QQ", body)) for kind, tid, body in shared.entries() if kind is Entry.RECORD]


def run(*command: str | Path) -> int:
    """Run a command to its end and return its process id."""
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    assert process.wait(TIMEOUT) == 0
    return process.pid


def test_every_hit_runs_the_program_with_the_cookie_of_its_place(
    build: Builder, shared: Memory, features: Features, uprobe_program: int
) -> None:
    program = build("hotloop.c")
    entry, main = file_offset(program, "tick"), file_offset(program, "main")
    with attach_uprobes(uprobe_program, str(program), [(entry, COOKIE), (main, 7)], features):
        pid = run(program, "50")
    seen = collections.Counter((tid, cookie) for tid, cookie, _ in hits(shared))
    assert seen == {(pid, COOKIE): 50, (pid, 7): 1}
    run(program, "50")
    assert hits(shared) == []


def test_a_return_is_seen_at_the_address_that_it_returns_to(
    build: Builder, shared: Memory, features: Features, uprobe_program: int
) -> None:
    program = build("hotloop.c", "-no-pie")
    with attach_uprobes(uprobe_program, str(program), [(file_offset(program, "tick"), 5)], features, at_return=True):
        run(program, "9")
    disassembly = subprocess.run(["objdump", "-d", program], check=True, capture_output=True, text=True).stdout
    after_call = re.search(r"call\s.*<tick>\n\s*([0-9a-f]+):", disassembly)
    assert after_call is not None
    assert {(cookie, ip) for _, cookie, ip in hits(shared)} == {(5, int(after_call[1], 16))}


def test_one_process_alone_is_hit_if_asked_for(
    build: Builder, shared: Memory, features: Features, uprobe_program: int
) -> None:
    program = build("hotloop.c")
    command = ["sh", "-c", 'read line; exec "$@"', "sh", str(program), "20"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    places = [(file_offset(program, "tick"), 1)]
    with attach_uprobes(uprobe_program, str(program), places, features, pid=process.pid):
        run(program, "20")
        process.communicate(b"\n", timeout=TIMEOUT)
    assert [tid for tid, _, _ in hits(shared)] == [process.pid] * 20


def test_a_process_that_has_ended_is_named_as_the_reason(
    build: Builder, features: Features, uprobe_program: int
) -> None:
    program = build("hotloop.c")
    gone = run("true")
    with pytest.raises(TargetError, match=r"^the process has ended$"):
        attach_uprobes(uprobe_program, str(program), [(file_offset(program, "tick"), 1)], features, pid=gone)


def test_a_file_that_is_gone_is_named(features: Features, uprobe_program: int, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=rf"^'{tmp_path}/gone' no longer exists$"):
        attach_uprobes(uprobe_program, f"{tmp_path}/gone", [(0, 1)], features)


def test_a_directory_is_refused(uprobe_program: int, features: Features, tmp_path: Path) -> None:
    # The uprobe PMU gives no reason of its own.
    single = f"the kernel refuses the probepoint at 0x0 in '{tmp_path}' (invalid argument)"
    expected = single if features is SINGLE else f"'{tmp_path}' is not a regular file"
    with pytest.raises(DprobesError, match=f"^{re.escape(expected)}$"):
        attach_uprobes(uprobe_program, str(tmp_path), [(0, 1)], features)


def test_an_offset_beyond_the_file_is_refused(build: Builder, features: Features, uprobe_program: int) -> None:
    program = build("hotloop.c")
    with pytest.raises(EngineError, match=rf"^the kernel refuses the probepoint at 0x40000000 in '{program}' \(.*\)$"):
        attach_uprobes(uprobe_program, str(program), [(0x40000000, 1)], features)


def test_many_places_without_uprobe_multi_are_refused_before_anything_is_attached(build: Builder) -> None:
    program = build("hotloop.c")
    places = [(number, number) for number in range(SINGLE_UPROBES_MAX + 1)]
    with pytest.raises(NotSupportedError) as caught:
        attach_uprobes(-1, str(program), places, SINGLE)
    assert caught.value.message == (
        f"17 probepoints in '{program}' are too many for this kernel: it has no uprobe_multi links, "
        "attaches them one by one, and takes 0.1 s to detach each"
    )
    assert caught.value.hint == "use at most 16 probepoints, Linux 6.6 or later, or --engine ptrace"


ADDRESS = re.compile(r"([0-9a-f]+) . cell$", re.MULTILINE)


def address_of_cell(program: Path) -> int:
    found = ADDRESS.search(subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout)
    assert found is not None
    return int(found[1], 16)


def accesses(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Let a process that waits for a line run to its end; return how many writes and reads it says it made."""
    output, _ = process.communicate("\n", timeout=TIMEOUT)
    assert process.returncode == 0
    writes, reads = output.splitlines()[-1].split()
    return int(writes), int(reads)


def waiting(*command: str | Path) -> subprocess.Popen[str]:
    words = ["sh", "-c", 'read line; exec "$@"', "sh", *(str(word) for word in command)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("debug_registers")
@pytest.mark.parametrize("access", [Access.WRITE, Access.READ | Access.WRITE])
def test_every_access_in_every_process_hits_a_breakpoint_on_all_cpus(
    build: Builder, shared: Memory, event_program: int, access: Access
) -> None:
    program = build("watched.c", "-no-pie")
    expected = 0
    with attach_breakpoint(event_program, address_of_cell(program), 8, access, cookie=COOKIE) as links:
        assert len(links) == len(online_cpus())
        for mode in (["threads", "30", "3"], ["fork", "5"]):
            writes, reads = accesses(waiting(program, *mode))
            expected += writes + (reads if access & Access.READ else 0)
    assert collections.Counter(cookie for _, cookie, _ in hits(shared)) == {COOKIE: expected}


@pytest.mark.usefixtures("debug_registers")
@pytest.mark.parametrize("mode", [["threads", "30", "3"], ["fork", "5"], ["spawn", "5"]])
def test_what_a_watched_process_starts_is_watched_and_others_are_not(
    build: Builder, shared: Memory, mode: list[str]
) -> None:
    program = build("watched.c", "-no-pie")
    event_program = load(hit_program(77), shared.maps, ProgramType.PERF_EVENT)
    process = waiting(program, *mode)
    cell = address_of_cell(program)
    with attach_breakpoint(event_program, cell, 8, Access.WRITE, threads=(process.pid,)):
        os.close(event_program)
        accesses(waiting(program, *mode))
        assert hits(shared) == []
        writes, _ = accesses(process)
    assert collections.Counter(cookie for _, cookie, _ in hits(shared)) == {77: writes}


@pytest.mark.usefixtures("debug_registers")
def test_an_execute_breakpoint_hits_before_the_instruction(build: Builder, shared: Memory, event_program: int) -> None:
    program = build("hotloop.c", "-no-pie")
    names = subprocess.run(["nm", program], check=True, capture_output=True, text=True).stdout
    tick = next(int(line.split()[0], 16) for line in names.splitlines() if line.endswith(" tick"))
    with attach_breakpoint(event_program, tick, 1, Access.EXECUTE, cookie=9):
        pid = run(program, "25")
    assert hits(shared) == [(pid, 9, tick)] * 25


@pytest.mark.usefixtures("debug_registers")
def test_a_breakpoint_too_many_is_the_kernels_enospc_and_takes_none_of_the_others(
    build: Builder, shared: Memory, event_program: int
) -> None:
    program = build("watched.c", "-no-pie")
    cell = address_of_cell(program)
    with contextlib.ExitStack() as attached:
        for number in range(4):
            attached.enter_context(attach_breakpoint(event_program, cell, 8, Access.WRITE, cookie=number))
        with pytest.raises(OSError, match=r"^\[Errno 28\] perf_event_open: No space left on device$"):
            attach_breakpoint(event_program, cell, 8, Access.WRITE, cookie=4)
        writes, _ = accesses(waiting(program, "threads", "5", "2"))
    seen = collections.Counter(cookie for _, cookie, _ in hits(shared))
    assert seen == dict.fromkeys(range(4), writes)


@pytest.mark.parametrize("sampler", [Sampler(1000), Sampler(1_000_000, "task-clock")])
def test_a_sampler_hits_on_every_cpu_with_its_cookie(shared: Memory, event_program: int, sampler: Sampler) -> None:
    with attach_sampler(event_program, sampler, COOKIE) as links:
        assert len(links) == len(online_cpus())
        spinning = subprocess.Popen(["sh", "-c", "while :; do :; done"])
        try:
            seen: list[tuple[int, int, int]] = []
            while [tid for tid, _, _ in seen].count(spinning.pid) < 20:
                wait(shared.ring, shared.status.words, 0.05)
                seen += hits(shared)
        finally:
            spinning.kill()
            spinning.wait()
    assert {cookie for _, cookie, _ in seen} == {COOKIE}
