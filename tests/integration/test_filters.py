"""Filters at hits of real programs, by each engine; the truth is what the programs say that they have done."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

import pytest

import dprobes
from integration.ebpf.insessions import on_demand

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
