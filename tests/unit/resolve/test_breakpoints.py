"""A program's definitions against a module: patterns, what they leave out, and who gets a place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.resolve.local_module import resolve
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from dprobes.resolve.probepoints import ResolvedModule

SOURCE = """
int task_value;
int task_one(int x) { return x * 3; }
int task_two(int x) { return x - 1; }
__asm__(".globl task_stop\\n.type task_stop, @function\\ntask_stop: int3\\nret\\n.size task_stop, 2\\n"
        ".globl other_name, third_name\\n.type other_name, @function\\n.type third_name, @function\\n"
        "other_name:\\nthird_name: nop\\nret\\n.size other_name, 2\\n.size third_name, 2\\n"
        ".globl task_bad\\n.type task_bad, @function\\ntask_bad: .byte 0x06\\nret\\n.size task_bad, 2\\n");
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Module:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    directory = tmp_path_factory.mktemp("tasks")
    source, library = directory / "tasks.c", directory / "libtasks.so"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return Module.load(library)


def resolved(text: str, module: Module) -> ResolvedModule:
    program = parse_source(SourceFile("test.rpn", f"name = tasks\n{text}"), Diagnostics())
    return resolve(program, module, Diagnostics())


def test_a_pattern_takes_what_can_carry_a_probe(tasks: Module) -> None:
    found = resolved("offset = task_*\nminor = 2\nexit\n", tasks)
    assert [(p.number, p.where, p.function) for p in found.probepoints] == [
        (0, "task_one", "task_one"),
        (0, "task_two", "task_two"),
    ]
    assert sorted((x.name, x.reason) for x in found.left_out) == [
        ("task_bad", "its first instruction is '(bad)': it is not a valid instruction"),
        ("task_stop", "its first instruction is 'int3': it is a breakpoint instruction itself"),
        ("task_value", "it is not a function"),
    ]


@pytest.mark.parametrize("name", ["other_name", "third_name"])
def test_of_several_names_a_place_has_the_one_that_is_written(name: str, tasks: Module) -> None:
    found = resolved(f"offset = {name}\nexit\noffset = {name} + 1\nexit\n", tasks)
    assert [p.where for p in found.probepoints] == [name, f"{name}+0x1"]


def test_what_is_written_out_comes_before_patterns_and_those_in_order(tasks: Module) -> None:
    found = resolved("offset = task_*\nexit\noffset = task_o*\nexit\noffset = task_two\nexit\n", tasks)
    assert [(p.number, p.where) for p in found.probepoints] == [(0, "task_one"), (2, "task_two")]
    taken = [(x.number, x.name) for x in found.left_out if x.reason == "it is the place of another probe definition"]
    assert taken == [(0, "task_two"), (1, "task_one")]


def test_an_opcode_chooses_among_the_matches(tasks: Module) -> None:
    one, two = (tasks.elf.data[tasks.file_offset(tasks.address_of(f"task_{name}"))] for name in ("one", "two"))
    assert one == two  # both are lea
    found = resolved(f"offset = task_[obst]*\nopcode = {one:#04x}\nexit\n", tasks)
    assert [p.where for p in found.probepoints] == ["task_one", "task_two"]
    found = resolved(f"offset = task_two\nexit\noffset = task_*\nopcode = {one:#04x}\nexit\n", tasks)
    assert [p.where for p in found.probepoints] == ["task_two", "task_one"]


def test_a_pattern_without_a_place_is_an_error(tasks: Module) -> None:
    with pytest.raises(SourceError) as caught:
        resolved("offset = nothing*\nexit\n", tasks)
    assert caught.value.message.splitlines()[0] == (
        f"test.rpn:2:1: error: 'nothing*' matches no function of '{tasks.path}'"
    )
    with pytest.raises(SourceError) as caught:
        resolved("offset = task_[bs]*\nexit\n", tasks)
    assert caught.value.message.splitlines()[0] == (
        f"test.rpn:2:1: error: 'task_[bs]*' matches no function of '{tasks.path}' that can carry a probe, "
        "only task_stop and 1 more"
    )


def test_a_name_with_brackets_that_was_taken_for_a_pattern_is_to_be_quoted(tasks: Module) -> None:
    with pytest.raises(SourceError) as caught:
        resolved("offset = name[abi:cxx11]*\nexit\n", tasks)
    first, *_, hint = caught.value.message.splitlines()
    assert first == f"test.rpn:2:1: error: 'name[abi:cxx11]*' matches no function of '{tasks.path}'"
    assert hint == (
        "hint: brackets make a pattern: write a name that has them itself in quotes, as 'dprobes list' has it"
    )


def test_the_path_is_that_of_the_module(tasks: Module) -> None:
    assert {Path(p.path) for p in resolved("offset = task_*\nexit\n", tasks).probepoints} == {tasks.path}
