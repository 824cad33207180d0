"""What compiled handlers ask of the kernel itself: identities, names, the clock; long loops."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import LoopForm, Request
from dprobes.bpf.lower.hosts.handler_host import Host
from dprobes.diagnostics import Diagnostics
from dprobes.record.log_record import Item, LogRecord
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter
from support.ebpf_backend import EbpfRunner, obstacle

IDENTITIES = Item.PID | Item.TID | Item.UID | Item.CPU | Item.PROCESS_NAME | Item.TIME


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def record_of(handler: str, request: Request) -> LogRecord:
    """Return the record of a handler that runs in this thread and asks the kernel."""
    program = parse_source(SourceFile("x.rpn", f"name = x\noffset = 0\n{handler}"), Diagnostics(), CompileOptions())
    context, target = FakeContext("x86_64"), architecture("x86_64")
    image = encode(program, target)
    with EbpfRunner(image, target, context, request=request, host=Host) as runner:
        record = runner.run(image.handlers[0], prepare(program, 0, context))[1].record
    assert record is not None
    return record


def words_of(record: LogRecord) -> list[int]:
    return [int.from_bytes(record.data[n : n + 8], "little") for n in range(0, len(record.data), 8)]


def test_a_handler_is_told_who_hit() -> None:
    before = time.monotonic_ns()
    record = record_of("push time; push uid; push tid; push pid; log 4", Request(items=IDENTITIES, probe=2))
    pid, tid, uid, at = words_of(record)
    assert (pid, tid, uid) == (os.getpid(), threading.get_native_id(), os.getuid())
    assert (record.pid, record.tid, record.uid) == (pid, tid, uid)
    assert record.time is not None
    assert before <= record.time <= at <= time.monotonic_ns()
    assert record.cpu in os.sched_getaffinity(0)
    assert record.process_name == Path("/proc/self/comm").read_text().rstrip("\n")


@pytest.mark.parametrize("is_known", [True, False])
def test_in_a_namespace_processes_have_its_numbers(is_known: bool) -> None:
    """In another namespace, which this process is not in, those of the initial one stand in."""
    status = Path("/proc/self/ns/pid").stat()
    namespace = (status.st_dev, status.st_ino if is_known else status.st_ino + 1)
    record = record_of("push tid; push pid; log 2", Request(items=IDENTITIES, probe=2, namespace=namespace))
    assert words_of(record) == [record.pid, record.tid]
    if is_known or status.st_ino == INITIAL_NAMESPACE:
        assert words_of(record) == [os.getpid(), threading.get_native_id()]


INITIAL_NAMESPACE = 0xEFFF_FFFC
"""PROC_PID_INIT_INO of include/linux/proc_ns.h."""


@pytest.mark.parametrize("loops", LoopForm)
@pytest.mark.parametrize(
    ("handler", "log"),
    [
        # The budget ends the first; the second just has enough; the third catches the end and goes on from there.
        ("l: inc lv, 0; jmp l", []),
        ("push 65534; l: inc lv, 0; loop l; inc lv, 0; push lv, 0; log 1", [65535]),
        ("sx c; l: inc lv, 0; jmp l; c: log 2; push lv, 0; log 1", [4, 65535, 65536]),
        ("call f; push lv, 0; log 1; exit\nproc f; l: inc lv, 0; call g; jmp l; endproc\nproc g; ret; endproc", []),
    ],
)
def test_long_loops_end_where_the_budget_does(handler: str, log: list[int], loops: LoopForm) -> None:
    text = f"name = x; vars = 1; jmpmax = 65535\noffset = 0\n{handler}\n"
    program = parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())
    context, target = FakeContext("x86_64"), architecture("x86_64")
    image = encode(program, target)
    point = prepare(program, 0, context)
    with EbpfRunner(image, target, context, loops) as runner:
        found = runner.run(image.handlers[0], point)[0]
    turns = context.local_variables[0]
    context.local_variables[0] = 0
    assert found == Interpreter(image, target).run(image.handlers[0], point, context)
    assert turns == context.local_variables[0]
    assert found.log == b"".join(n.to_bytes(8, "little") for n in log)
