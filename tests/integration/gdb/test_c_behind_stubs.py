"""DProbes C on programs of other processors: their types, tables, stacks and blocks, from the source and compiled."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.support import DPROBES, TIMEOUT, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from integration.gdb.processors import EmulatedProgram, Processor
    from integration.support import Builder

    Starter = Callable[..., EmulatedProgram]


@pytest.fixture
def path(build: Builder, processor: Processor) -> Path:
    """A program of the processor; i386 has no libraries of its own to link with."""
    return processor.build(build, "handled.c", *(["-static"] if processor.name == "i386" else []))


def dprobes(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*DPROBES, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert result.returncode == 0, result.stderr
    return result


STRUCTURES = """module "%s";
handle(request, n) {
    printf("%%d %%s %%S %%d", n, request->name, *request, ::total);
    @[str(request->name)] = sum(request->size);
}
return handle { @returned[retval] = count(); }
"""

TABLES = {
    ("_", "first"): 200,
    ("_", "second"): 400,
    ("returned", 0): 1,
    ("returned", 9): 1,
    ("returned", 23): 1,
    ("returned", 50): 1,
}


def check(lines: list[str]) -> None:
    """Look at what was printed of four calls."""
    objects = [json.loads(line) for line in lines]
    fields = [each["fields"] for each in objects if "fields" in each]
    assert [(each["n"], each["name"], each["id"], each["size"], each["total"]) for each in fields] == [
        (0, "first", 7, 100, 0),
        (1, "second", 9, 200, 0),
        (2, "first", 7, 100, 9),
        (3, "second", 9, 200, 23),
    ]
    assert fields[0]["next"] == "0x0" != fields[1]["next"]
    tables = [each for each in objects if "table" in each]
    assert {(each["table"], *each["keys"]): each["value"] for each in tables} == TABLES


def test_structures_and_tables(path: Path, start: Starter, tmp_path: Path) -> None:
    program = start(path, 4)
    source = tmp_path / "handled.dpc"
    source.write_text(STRUCTURES % path)
    result = dprobes("run", source, "--engine", f"gdb={program.endpoint}", "--format", "json")
    assert program.output() == "50\n"
    check(result.stdout.splitlines())


def test_a_compiled_program_and_a_trace_file(path: Path, start: Starter, tmp_path: Path) -> None:
    """The file is for the processor of the module, and what it logs is read without it."""
    source, compiled, trace = tmp_path / "handled.dpc", tmp_path / "handled.ppdf", tmp_path / "handled.dpt"
    source.write_text(STRUCTURES % path)
    assert dprobes("check", source).stderr == ""
    dprobes("build", source, "-o", compiled)
    source.unlink()
    assert f"build {build_id(path)} of" in dprobes("show", compiled).stdout
    program = start(path, 4)
    dprobes("run", compiled, "--engine", f"gdb={program.endpoint}", "-o", trace)
    assert program.output() == "50\n"
    check(dprobes("log", trace, "--format", "json").stdout.splitlines())


def build_id(path: Path) -> str:
    notes = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
    return notes.split("Build ID: ")[1].split()[0]


BLOCKS = """module "%s";
static long seen;
begin { seen = 10; @kept[5] = 7; printf("begin"); }
handle { seen++; @calls = count(); @stacks[ustack(2)] = count(); }
every 100ms { if (seen > 11) exit(); }
end { printf("end %%d", seen); print(@kept); print(@calls); }
"""


def test_blocks_of_the_tool(path: Path, start: Starter) -> None:
    """What ``begin`` sets is there at the first hit: the program stands still until then."""
    program = start(path, 3, 300000)
    result = dprobes("run", "--engine", f"gdb={program.endpoint}", "-e", BLOCKS % path)
    begin, end, kept, calls, *stacks = result.stdout.splitlines()
    assert begin == "begin"
    assert end in ("end 12", "end 13")
    assert kept == "@kept[5]: 7"
    assert calls in ("@calls: 2", "@calls: 3")
    # The process may be gone when it is printed: its files say what was where.
    assert f"handle [{path.name}]" in stacks[1]
    assert "main+" in stacks[2]


def test_the_command_is_the_stubs_and_not_the_module(tmp_path: Path) -> None:
    command = ["qemu-x86_64", "-g", str(tmp_path / "stub"), "/bin/true"]
    run = [*DPROBES, "run", "-e", "handle { return; }", "--engine", f"gdb={tmp_path / 'stub'}", "--", *command]
    result = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
    assert result.stderr.count("-e:1:1: error: the module of 'handle' is not known") == 1
