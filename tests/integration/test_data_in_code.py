"""Data between functions is never taken for code: a breakpoint there would change what the program computes."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.target.probed_module import Module
from integration.support import DPROBES

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

ENGINES = pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
SUM = f"{0x55 + 0x90909090 + 7 + 0xC3} 5\n"


@pytest.fixture(autouse=True)
def _engine(engine: str) -> None:
    if engine == "ebpf":
        from integration.ebpf.kernel import require_bpf

        require_bpf()


def file_offset(program: Path, place: str) -> int:
    module, (name, _, distance) = Module.load(program), place.partition("+")
    return module.file_offset(module.address_of(name)) + int(distance or "0")


def source(place: object, extra: str = "") -> str:
    return f"name = tables\noffset = {place}\nminor = 1\n{extra}exit\n"


@ENGINES
@pytest.mark.parametrize("place", ["table", "table+4", "constants", "undescribed"])
@pytest.mark.parametrize("as_number", [False, True])
def test_a_place_where_no_function_is_known_is_refused(
    build: Builder, run: Runner, engine: str, place: str, as_number: bool
) -> None:
    program = build("tables.S")
    offset = file_offset(program, place)
    first = program.read_bytes()[offset]
    result = run(source(hex(offset) if as_number else place), ["--", str(program), "4"], ["--engine", engine])
    assert result.status != 0
    assert result.stdout == ""
    if place == "constants" and not as_number:
        assert "to see accesses to it, write 'address = constants' and 'watchpoint = w' (or rw)" in result.stderr
        return
    assert f"error: no function is known at offset {offset:#x} of '{program}': it may be data, " in result.stderr
    assert f"if an instruction starts there, confirm it by its first byte: opcode = {first:#04x}" in result.stderr


@ENGINES
def test_opcode_says_that_there_is_code(build: Builder, run: Runner, engine: str) -> None:
    program = build("tables.S")
    offset = file_offset(program, "undescribed")
    result = run.command(source("undescribed", "opcode = 0x90\n"), program, 4, options=("--engine", engine))
    assert (result.stdout, result.counts[1].hits) == (SUM, 1)
    assert f"warning: no function is known at offset {offset:#x}: only 'opcode' confirms" in result.stderr


@ENGINES
@pytest.mark.parametrize("place", ["described", "described+5"])
@pytest.mark.parametrize("stripped", [False, True])
def test_a_label_with_unwind_information_is_code(
    build: Builder, run: Runner, tmp_path: Path, engine: str, place: str, stripped: bool
) -> None:
    program = build("tables.S")
    offset: object = place
    if stripped:
        offset = hex(file_offset(program, place))
        copy = tmp_path / "tables"
        subprocess.run(["strip", "-o", copy, program], check=True)
        program = copy
    result = run.command(source(offset), program, 4, options=("--engine", engine))
    assert (result.stdout, result.counts[1].hits) == (SUM, 1)
    assert "warning" not in result.stderr


@ENGINES
def test_the_inside_of_its_instructions_is_not(build: Builder, run: Runner, engine: str) -> None:
    result = run(source("described+1"), ["--", str(build("tables.S")), "4"], ["--engine", engine])
    assert "is inside an instruction of" in result.stderr
    assert result.status != 0


@ENGINES
def test_a_pattern_matches_no_data(build: Builder, run: Runner, engine: str) -> None:
    program = build("tables.S")
    result = run.command(source("[mtu]*"), program, 4, options=("--engine", engine))
    assert (result.stdout, result.counts[1].hits) == (SUM, 1)
    assert "left out 2, because it is not a function: table, undescribed" in result.stderr


@pytest.mark.parametrize("engine", ["ptrace"])
def test_a_compiled_program_is_as_careful(build: Builder, tmp_path: Path, engine: str) -> None:
    program, text = build("tables.S"), tmp_path / "tables.rpn"
    compiled = tmp_path / "tables.ppdf"

    def build_it(body: str) -> subprocess.CompletedProcess[str]:
        text.write_text(body)
        command = [*DPROBES, "build", str(text), "--for", str(program), "-o", str(compiled)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=False)

    refused = build_it(source("table"))
    assert refused.returncode != 0
    assert "it may be data, which a breakpoint would change" in refused.stderr
    assert build_it(source("described")).returncode == 0
    stripped = tmp_path / "tables"
    subprocess.run(["strip", "-o", stripped, program], check=True)
    command = [*DPROBES, "run", "--engine", engine, str(compiled), "--", str(stripped), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert SUM in done.stdout
    assert "described" in done.stderr
