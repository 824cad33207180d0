"""Filters at hits of real programs, by each engine; the truth is what the programs say that they have done."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.ebpf.insessions import on_demand
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.support import TIMEOUT, environment

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
    assert f"all hits are counted, and make a record where '{text}' holds" in result.stderr


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


@ENGINES
def test_records_are_filtered_as_hits_are(build: Builder, tmp_path: Path, engine: str) -> None:
    """The same condition selects as many records of a trace file as it lets hits make."""
    program, source = build("tallied.c", "-pthread"), tmp_path / "event.rpn"
    source.write_text(
        "name = tallied\noffset = event\nminor = 1\npush r, arg0\npush 100\npush r, arg1\nlog str\nlog 1\nexit\n"
        "offset = event\nminor = 2\nreturn = yes\npush r, retval\nlog 1\nexit\n"
    )

    def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dprobes", *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
        assert done.returncode == 0, done.stderr
        return done

    def total(path: Path, condition: str) -> int:
        return int(ran("log", path, "--total", "--filter", condition).stdout)

    target = ("--engine", engine, "--", program, 300)
    everything = tmp_path / "all.dpt"
    ran("run", source, "-o", everything, *target)
    for number, (at_hit, of_records) in enumerate(
        [
            ("minor == 1 and arg0 > 1K", "minor == 1 and arg0 > 1K"),
            ("minor == 2 and retval:s64 < 0", "minor == 2 and retval < 0"),
            ("minor == 2 and retval:u8 in (0, 7)", "retval:u8 in (0, 7)"),
            ('minor == 1 and str(arg1) startswith "a"', 'arg1 startswith "a"'),
        ]
    ):
        filtered = tmp_path / f"{number}.dpt"
        ran("run", source, "-o", filtered, "--filter", at_hit, *target)
        count = total(filtered, "major == 0")
        assert 0 < count < 300
        assert total(everything, of_records) == count
    command = [sys.executable, "-m", "dprobes", "log", str(everything), "--filter", "arg0 == 1 and retvl == 1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT, env=environment())
    assert done.returncode == 2
    assert "records have no field 'retvl'" in done.stderr
    assert "hint: did you mean 'retval'?" in done.stderr
