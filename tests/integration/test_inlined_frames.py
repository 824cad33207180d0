"""Frames of calls that were inlined are in stacks as gdb shows them, in all forms in which stacks come out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ENGINES = ["ptrace", "ebpf"]
SOURCE = "name = inlined\nlogmax = 1024\noffset = here\nminor = 1\nlog ustack\nexit\n"
HITS = 8


def stacks_of_gdb(program: Path) -> list[list[str]]:
    """Return the functions in the stacks of all calls, from the inside up to ``main``."""
    script = [part for _ in range(HITS) for part in ("-ex", "bt", "-ex", "continue")]
    command = ["gdb", "-nx", "-batch", "-ex", "break *here", "-ex", "run", *script, str(program)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    frames = re.findall(r"^#(\d+) +(?:0x[0-9a-f]+ in )?(\w+) \(", output, re.MULTILINE)
    stacks: list[list[str]] = []
    for number, name in frames:
        if number == "0":
            stacks.append([])
        stacks[-1].append(name)
    return stacks[:HITS]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [("-O2",), ("-O1", "-gdwarf-4"), ("-O3", "-flto")], ids=" ".join)
def test_stacks_are_those_of_gdb(build: Builder, run: Runner, engine: str, options: tuple[str, ...]) -> None:
    program = build("inlined.c", "-g", *options)
    expected = stacks_of_gdb(program)
    assert len(expected) == HITS
    assert {name for stack in expected for name in stack} == {"here", "inner", "outer", "work", "main"}
    result = run.command(SOURCE, program, options=["--engine", engine])
    found = []
    for record in result.records:
        names: list[str] = []
        for frame in record["fields"]["stack"]:
            names += [*frame.get("inlined", ()), frame["name"].partition(" ")[0].partition("+")[0]]
        found.append(names[: names.index("main") + 1])
    assert found == expected


def test_names_travel_to_where_the_program_is_not(build: Builder, tmp_path: Path) -> None:
    program, source, trace = build("inlined.c", "-g", "-O2"), tmp_path / "stacks.rpn", tmp_path / "stacks.dpt"
    source.write_text(SOURCE.replace("inlined", f'"{program}"', 1))
    command = [sys.executable, "-m", "dprobes"]
    subprocess.run([*command, "run", source, "-o", trace, "--", program], check=True, capture_output=True)
    away = program.rename(tmp_path / "away")
    try:
        text = subprocess.run([*command, "log", trace], check=True, capture_output=True, text=True).stdout
        said = subprocess.run(
            [*command, "log", "--format", "json", trace], check=True, capture_output=True, text=True
        ).stdout
    finally:
        away.rename(program)
    lines = [line.strip() for line in text.splitlines()]
    first = lines.index("inner (inlined) [inlined]")
    assert lines[first - 1] == "here [inlined]"
    assert lines[first + 1] == "outer (inlined) [inlined]"
    assert lines[first + 2].startswith("work+0x")
    frame = json.loads(said.splitlines()[0])["fields"]["stack"][1]
    assert frame["inlined"] == ["inner", "outer"]


def test_flame_graphs_have_them(build: Builder, tmp_path: Path) -> None:
    program, source = build("inlined.c", "-g", "-O2"), tmp_path / "stacks.rpn"
    source.write_text(SOURCE.replace("inlined", f'"{program}"', 1))
    command = [sys.executable, "-m", "dprobes", "run", str(source), "--stacks", "folded", "--", str(program)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    weights = {
        line.rpartition(" ")[0].partition(";main;")[2]: int(line.rpartition(" ")[2])
        for line in output.splitlines()
        if ";main;" in line
    }
    assert weights == {"work;outer_[i];inner_[i];here": 6, "work;inner_[i];here": 2}


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_of_tables_have_them(build: Builder, engine: str) -> None:
    program = build("inlined.c", "-g", "-O2")
    text = f'"{program}":here {{ @[ustack(3)] = count(); }}'
    command = [sys.executable, "-m", "dprobes", "run", "--engine", engine, "-e", text, "--format", "json", "--"]
    output = subprocess.run([*command, str(program)], check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    stacks = {tuple(re.sub(r"\+0x\w+", "", frame) for frame in row["keys"][0]) for row in rows}
    inner, outer = "inner (inlined) [inlined]", "outer (inlined) [inlined]"
    assert stacks == {
        ("here [inlined]", inner, "work [inlined]", "main [inlined]"),
        ("here [inlined]", inner, outer, "work [inlined]", "main [inlined]"),
    }
    assert sum(row["value"] for row in rows) == HITS
