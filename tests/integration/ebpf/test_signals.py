"""Faults at probed instructions: the kernel's signals carry the address of the probepoint."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from typing import Any

import pytest

from dprobes.bpf.map_layouts import Entry, Status
from dprobes.engines.ebpf.attach import process_programs as signal_programs
from dprobes.engines.ebpf.attach.process_programs import watch_signals
from dprobes.engines.ebpf.kernel.bpf_links import attach_typed_tracepoint, attach_uprobes, uprobe_attach_type
from dprobes.engines.ebpf.kernel.bpf_objects import load
from dprobes.engines.ebpf.kernel.kernel_features import Features, KernelTypes
from dprobes.errors import TargetError
from dprobes.platform.linux.bpf_calls import ProgramType
from dprobes.target.btf import Kind
from integration.ebpf.kernel import (
    Memory,
    file_offset,
    hit_program,
    memory,
)
from integration.support import I386_COMPILER, TIMEOUT, Builder

pytestmark = pytest.mark.usefixtures("typed_tracepoints", "leaves_no_descriptor")

COOKIE = 0x1234_5678_9ABC


def faults_seen(memory: Memory, command: list[str], offset: int) -> tuple[list[int], list[tuple[int, int, int]], str]:
    """Run a command with a uprobe; return the ips of hits, the (ip, signal, code) of signals, and what it printed."""
    features = Features()
    program = load(hit_program(), memory.maps, ProgramType.KPROBE, attach_type=uprobe_attach_type(features))
    try:
        with KernelTypes() as types:
            watching = watch_signals(memory.maps, types, in_scope=False)
        try:
            with attach_uprobes(program, command[0], [(offset, COOKIE)], features):
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                output, _ = process.communicate(timeout=TIMEOUT)
        finally:
            os.close(watching)
    finally:
        os.close(program)
    hits, signals = [], []
    entries = memory.entries()
    for kind, tid, body in entries:
        if kind is Entry.RECORD:
            cookie, ip = struct.unpack("=QQ", body)
            assert cookie == COOKIE
            hits.append(ip)
        elif tid == process.pid:
            signals.append(struct.unpack("=QII", body))
    kinds = [kind for kind, tid, _ in entries if tid == process.pid]
    assert kinds == [Entry.RECORD, Entry.SIGNAL, Entry.RECORD] * len(signals)
    return hits, signals, output


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [
        ("protected", signal.SIGSEGV, 2),  # SEGV_ACCERR
        ("pointer", signal.SIGSEGV, 1),  # SEGV_MAPERR
        ("bus", signal.SIGBUS, 2),  # BUS_ADRERR
        ("divide", signal.SIGFPE, 1),  # FPE_INTDIV
        ("stack", signal.SIGSEGV, 2),
    ],
)
@pytest.mark.parametrize("i386", [False, True], ids=["x86-64", "i386"])
def test_each_fault_of_a_probed_instruction_is_told_with_its_address(
    build: Builder, kind: str, number: int, code: int, i386: bool
) -> None:
    if i386 and shutil.which(I386_COMPILER) is None:
        pytest.skip(f"{I386_COMPILER} is not installed")
    program = build("faults.c", i386=i386)
    with memory() as shared:
        hits, signals, output = faults_seen(shared, [str(program), kind, "5"], file_offset(program, f"at_{kind}"))
        assert output == "5\n"
        address = hits[0]
        assert signals == [(address, number, code)] * 5
        # The instruction is hit again when it is retried.
        assert hits == [address] * 10
        assert shared.word(Status.UNSEEN) == 0


FAULTS = "import ctypes; ctypes.string_at(0)"
SENDS_THEN_FAULTS = f"""
import os, signal
signal.signal(signal.SIGSEGV, lambda *_: None)
os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGSEGV, signal.SIG_DFL)
{FAULTS}
"""


def signals_of(shared: Memory, code: str, *, in_scope: bool) -> list[tuple[int, int]]:
    """Run Python code, in SCOPE or not, that ends by a fault; return the signals and codes that are told of it."""
    with KernelTypes() as types:
        watching = watch_signals(shared.maps, types, in_scope=in_scope)
    try:
        process = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
        shared.scope[struct.pack("=I", process.pid)] = bytes(4)
        process.communicate(b"\n", timeout=TIMEOUT)
    finally:
        os.close(watching)
    assert process.returncode == -signal.SIGSEGV
    return [struct.unpack("=8xII", body) for _, tid, body in shared.entries() if tid == process.pid]


def test_a_fatal_fault_is_told_but_not_a_signal_that_was_sent() -> None:
    with memory() as shared:
        assert signals_of(shared, SENDS_THEN_FAULTS, in_scope=False) == [(signal.SIGSEGV, 1)]


def test_so_it_is_where_the_kernel_takes_the_information_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program, which follows the argument as it is, is refused as such a kernel does it."""
    attempts: list[int] = []

    def attach(*arguments: Any) -> int:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise PermissionError(errno.EACCES, "Permission denied")
        return attach_typed_tracepoint(*arguments)

    monkeypatch.setattr(signal_programs, "attach_typed_tracepoint", attach)
    with KernelTypes() as types:
        try:
            types.find(Kind.FUNC, "bpf_rdonly_cast")
        except TargetError:
            pytest.skip("this kernel has no bpf_rdonly_cast")
    with memory() as shared:
        assert signals_of(shared, SENDS_THEN_FAULTS, in_scope=True) == [(signal.SIGSEGV, 1)]
    assert attempts == [0, 1]


def test_only_signals_of_processes_in_scope_are_told_if_asked_for() -> None:
    with memory() as shared:
        with KernelTypes() as types:
            watching = watch_signals(shared.maps, types, in_scope=True)
        try:
            assert subprocess.run([sys.executable, "-c", FAULTS], check=False).returncode == -signal.SIGSEGV
        finally:
            os.close(watching)
        assert shared.entries() == []
        assert signals_of(shared, FAULTS, in_scope=True) == [(signal.SIGSEGV, 1)]


def test_signals_for_which_the_ring_has_no_room_are_counted(build: Builder) -> None:
    count = 3000
    with memory() as shared:
        with KernelTypes() as types:
            watching = watch_signals(shared.maps, types, in_scope=False)
        try:
            subprocess.run([str(build("faults.c")), "divide", str(count)], check=True, stdout=subprocess.DEVNULL)
        finally:
            os.close(watching)
        told = len(shared.entries())
        # A ring is full before its last byte is used.
        assert told == shared.ring.size // 32 - 1
        assert shared.word(Status.UNSEEN) >= count - told
