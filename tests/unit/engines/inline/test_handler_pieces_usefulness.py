"""A program gains by handlers in the process if there is one that can be there."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.engines.inline.handler_pieces import obstacle_to_all
from dprobes.resolve.local_module import resolve_here
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("useful")
    (directory / "a.c").write_text("long plain(long a) { return a * 3; } long same(long a) { return a; } int main() {}")
    subprocess.run(["gcc", "-O1", "-o", directory / "useful", directory / "a.c"], check=True)
    return directory / "useful"


def said_of(name: Path | str, body: str) -> str | None:
    source = SourceFile("a.rpn", f'name = "{name}"\n{body}\n')
    program = parse_source(source, Diagnostics(), CompileOptions(allow_write=True))
    return obstacle_to_all(resolve_here(program, Diagnostics(), allow_write=True))


def test_one_handler_is_enough(module: Path) -> None:
    assert said_of(module, "offset = plain\nexit\noffset = same\nexit 1") is None
    assert said_of(module, "offset = plain\npush u, ds\nexit\noffset = same\nexit") is None


def test_the_last_reason_is_told(module: Path) -> None:
    assert said_of(module, "offset = plain\npush u, ds\nexit\noffset = same\npush uid\nexit") == (
        "its handler reads the process name or the user id, which only the kernel knows"
    )


def test_an_instruction_that_no_machine_code_is_made_of_counts(module: Path) -> None:
    assert said_of(module, "offset = plain\npush u, ds\nexit") == "handlers in the process have no 'push u, <register>'"


def test_a_program_as_a_whole_may_be_unfit(module: Path) -> None:
    assert said_of(module, "offset = plain\ncallk\nexit") == "the program calls extensions"


def test_of_a_module_that_is_not_there_nothing_is_known() -> None:
    assert said_of("missing", "offset = 1\nexit") == "its module is unknown"
