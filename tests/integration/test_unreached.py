"""What is said at the end of runs that reached nothing: what ran instead, and what was probably meant."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder, Runner

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the ebpf engine needs root")
EBPF = ["--engine", "ebpf"]
INSERTED = "dprobes: note: the probepoints were inserted, but never reached\n"


@needs_root
def test_another_program_of_that_name_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(program, tmp_path / "hotloop")
    script = tmp_path / "start"
    script.write_text(f"#!{other}\n")
    script.chmod(0o755)
    source = f'name = "{program}"\noffset = tick\nexit\n'
    said = run(source, ["--", str(other), "5"], EBPF).stderr
    where = f"and the probepoints are in '{program}'; what else it starts is probed as well\n"
    assert said.endswith(f"{INSERTED}hint: the command executes '{other}', {where}")
    said = run(source, ["--", str(script)], EBPF).stderr
    assert said.endswith(f"{INSERTED}hint: the command executes '{other}' for the script '{script}', {where}")


@needs_root
def test_a_library_that_the_program_is_not_linked_with_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(build("hotloop.c", "-shared", "-fPIC", name="libother.so"), tmp_path / "libother.so")
    said = run(f'name = "{other}"\noffset = tick\nexit\n', ["--", str(program), "5"], EBPF).stderr
    assert said.endswith(f"{INSERTED}hint: the command executes '{program}', which is not linked with '{other}'\n")


@needs_root
def test_nothing_is_said_of_the_program_that_did_run(build: Builder, run: Runner) -> None:
    program = build("hotloop.c")
    said = run('name = "libc.so.6"\noffset = getpwuid\nexit\n', ["--", str(program), "5"], EBPF).stderr
    assert said.endswith(INSERTED)


def test_a_file_of_that_name_that_was_mapped_is_named(build: Builder, run: Runner, tmp_path: Path) -> None:
    program = build("hotloop.c")
    other = shutil.copy(program, tmp_path / "hotloop")
    said = run(f'name = "{program}"\noffset = tick\nexit\n', ["--", str(other), "5"]).stderr
    assert said.endswith(
        f"dprobes: error: no probepoint was inserted: no process mapped '{program}' as code\n"
        f"hint: processes mapped '{other}': is that meant?\n"
    )
