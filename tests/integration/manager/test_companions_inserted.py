"""Programs for several modules in the manager: one program with one name, whatever they were inserted from."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.manager.sandbox import Sandbox

SOURCE = """
static long calls;
libc.so.6:abs(int x) { calls++; @calls[x] = count(); printf("abs %d", x); }
libz.so.1:zlibVersion { calls++; @calls[9] = count(); printf("zlib after %d", calls); }
"""
TARGET = (
    "import ctypes, sys; c = ctypes.CDLL(None); z = ctypes.CDLL('libz.so.1'); sys.stdin.readline(); "
    "c.abs(3); z.zlibVersion(); c.abs(4); print('called', flush=True); sys.stdin.readline()"
)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_program_has_places_in_several_modules(sandbox: Sandbox, engine: str, *, is_compiled: bool) -> None:
    source = sandbox.write("both.dpc", SOURCE)
    if is_compiled:
        sandbox(f"dprobes build {source} -o both.ppdf")
        source.unlink()
        source = sandbox.directory / "both.ppdf"
    target = sandbox.start(f'exec {sys.executable} -S -c "{TARGET}"', stdin=-1, stderr=-3)
    assert target.stdin is not None
    assert target.stdout is not None
    try:
        said = sandbox(f"dprobes insert {source} --as both --engine {engine} -p {target.pid}")
        assert said == "inserted 'both': 2 of 2 probepoints active\n"
        target.stdin.write("\n")
        target.stdin.flush()
        assert target.stdout.readline() == "called\n"
        assert sandbox.counts("both") == {1: 2, 2: 1}
        assert "@calls[9]: 1\n" in sandbox("dprobes getvars --name both")
        assert "cannot be replaced by another one" in sandbox.refused(
            f"dprobes insert {source} --as both --replace --engine {engine} -p {target.pid}"
        )
        assert sandbox("dprobes remove --name both").startswith("removed both\n")
        lines = [line.split("]  ")[-1] for line in sandbox("dprobes log").splitlines()]
        assert lines[:3] == ["abs 3", "zlib after 2", "abs 4"]
        assert sorted(lines[3:]) == ["@calls[3]: 1", "@calls[4]: 1", "@calls[9]: 1"]
    finally:
        target.stdin.close()
        assert target.wait() == 0
        target.stdout.close()


@pytest.mark.alone
def test_the_handlers_of_all_modules_are_shown(sandbox: Sandbox) -> None:
    sandbox.write(
        "both.dpc", '[group "a"] libc.so.6:abs(int x) { printf("%d", x) } [group "b"] libz.so.1:zlibVersion { }'
    )
    for words, handlers in (("", 2), ("--group b", 1)):
        said = sandbox(f"dprobes insert both.dpc {words} --as both -p {os.getpid()}")
        assert said == f"inserted 'both': {handlers} of {handlers} probepoints active\n"
        lines = sandbox("dprobes query -x").splitlines()
        assert "  groups: a, b" in lines
        places = [line.split()[1] for line in lines if line.startswith("0,")]
        assert places == ["abs", "zlibVersion"][-handlers:]
        at = next(number for number, line in enumerate(lines) if "zlibVersion" in line)
        assert [line.split(maxsplit=2)[2] for line in lines[at:] if re.match(r"  [0-9a-f]{4} ", line)] == ["abort"]
        sandbox("dprobes remove --name both")


def test_blocks_of_the_tool_are_refused(sandbox: Sandbox) -> None:
    source = sandbox.write("block.dpc", "libc.so.6:abs { } end { exit(); }")
    said = sandbox.refused(f"dprobes insert {source} -- true")
    assert "error: the program has a block 'end', which only 'dprobes run' executes\n" in said
    assert "hint: run it with 'dprobes run', or leave out 'begin', 'every' and 'end'\n" in said
