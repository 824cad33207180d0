"""Filters at hits of real programs, by each engine; the truth is what the programs say that they have done."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.ebpf.insessions import on_demand
from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Result, Runner

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
ENGINES = pytest.mark.parametrize("engine", ["ptrace", pytest.param("ebpf", marks=needs_root)])

FOPEN = 'name = "libc.so.6"\noffset = fopen\n    push 100\n    push r, arg0\n    log str\n    exit\n'

OPENS = """
import ctypes
libc = ctypes.CDLL(None)
for name in (b"/etc/hosts", b"/dev/null", b"/etc/passwd", b"", b"/etc/no/such", b"x" * 90 + b"/etc"):
    libc.fopen(name, b"r")
libc.fopen(ctypes.c_void_p(0x10), b"r")  # EFAULT, and no string
"""


@pytest.fixture(scope="module")
def path(build: Builder) -> Path:
    return build("ondemand.c", "-pthread")


@ENGINES
def test_only_hits_that_the_filter_holds_for_make_records(run: Runner, engine: str) -> None:
    text = 'str(arg0) startswith "/etc/" and not str(arg0) contains "such" and comm startswith "python" and uid < 1M'
    everything = run(FOPEN, ["--", sys.executable, "-c", OPENS], ["--engine", engine])
    result = run(FOPEN, ["--", sys.executable, "-c", OPENS], ["--engine", engine, "--filter", text])
    assert names_of(result) == [
        name for name in names_of(everything) if name.startswith("/etc/") and "such" not in name
    ]
    assert {"/etc/hosts", "/etc/passwd"} <= set(names_of(result))
    assert result.counts[0].hits == everything.counts[0].hits > result.counts[0].records == len(result.records)
    assert f"hits count in any case, and make a record where '{text}' holds" in result.stderr


def names_of(result: Result) -> list[str]:
    """Return the strings that were logged; a string that is not there is a fault item."""
    data = [bytes.fromhex(record["data"]) for record in result.records]
    return [each[3:].decode() for each in data if each[0] == 1]


@ENGINES
def test_numbers_are_compared_as_their_types_say(path: Path, engine: str) -> None:
    program = dprobes.ProgramBuilder(str(path))
    program.probe("stepped").push_r("arg0").log(1)
    with on_demand(path) as target, dprobes.attach(target.process.pid, engine=engine) as session:
        session.insert(program, filter="arg0 >= 3 and arg0:s8 != 5 and (tid == pid or arg0 < 1) and not arg0 in (7, 8)")
        target.say("call 12")
        found = [record.words()[0] for record in itertools.islice(session.records(), 6)]
        assert found == [3, 4, 6, 9, 10, 11]
        assert session.counts()[0, 0].hits == 12
        assert session.counts()[0, 0].records == 6


OPENED = (
    "name = vmlinux\nmodtype = tracepoint\noffset = syscall:openat\n    push 100\n    push tp, filename\n    log str\n"
)


@needs_root
def test_fields_of_a_system_call_are_compared(run: Runner) -> None:
    require_bpf()
    require_initial_namespace()
    files = ["/etc/passwd", "/dev/null", "/etc/group", "/etc/passwd"]
    text = 'str(filename) startswith "/etc/" and not str(filename) contains "ld.so" and comm == "cat" and flags:u8 == 0'
    result = run(OPENED, ["--", "cat", *files], ["--engine", "ebpf", "--filter", text])
    assert names_of(result) == [name for name in files if name.startswith("/etc/")]
    assert result.counts[0].hits > len(names_of(result))


def test_a_call_that_took_long_makes_a_record(run: Runner) -> None:
    command = ["--", sys.executable, "-c", "import time\nfor n in (0, 30, 0, 40):\n    time.sleep(n / 1000)"]
    source = 'name = "libc.so.6"\noffset = clock_nanosleep\nreturn = yes\n    push elapsed\n    log 1\n'
    slow = run(source, command, ["--engine", "ptrace", "--filter", "elapsed >= 25ms"])
    assert len(slow.records) >= 2
    assert all(elapsed >= 25_000_000 for (elapsed,) in slow.words())
    fast = run(source, command, ["--engine", "ptrace", "--filter", "elapsed < 25ms"])
    assert all(elapsed < 25_000_000 for (elapsed,) in fast.words())
    assert slow.counts[0].hits == fast.counts[0].hits == 4


def test_a_wrong_filter_is_shown_before_anything_is_inserted(run: Runner, path: Path) -> None:
    source = f'name = "{path}"\noffset = stepped\nexit\n'
    result = run(source, ["--", str(path)], ["--filter", "arg0 == 1 and commm > 5"])
    assert result.status == 2
    assert result.stderr == (
        "--filter:1:15: error: there is no 'commm' at a hit\n"
        "    arg0 == 1 and commm > 5\n"
        "                  ^~~~~\n"
        "hint: did you mean 'comm'?\n"
    )
