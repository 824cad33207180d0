"""Programs with ``patch =`` in the probe manager: ``query`` lists the patches, and ``remove`` takes them back."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ptrace.patching.patch_records import listed_patches
from integration.support import PROGRAMS, await_line, code_is_original, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Sandbox
    from integration.support import Builder


@pytest.fixture
def program(build: Builder) -> Path:
    return build("replaced.c", "-O1", str(PROGRAMS / "named_twice.c"))


@pytest.fixture
def replaced(program: Path) -> Iterator[subprocess.Popen[str]]:
    with running(program, stdin=subprocess.PIPE) as process:
        assert await_line(process) == "ready\n"
        yield process


def first_of(process: subprocess.Popen[str]) -> int:
    """Return the program's work(1): 1003 without a patch."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(await_line(process).split()[0])


def test_patches_are_inserted_listed_and_removed(
    build: Builder, sandbox: Sandbox, program: Path, replaced: subprocess.Popen[str]
) -> None:
    (sandbox.directory / "fix.so").symlink_to(build("replacing.c", "-shared", "-fPIC", "-nostartfiles"))
    for name in ("work", "doubled"):
        sandbox.write(f"{name}.rpn", f'name = "{program}"\noffset = work\npatch = "./fix.so:{name}"\n')
        inserting = f"dprobes insert --allow-write -p {replaced.pid} --as {name} {name}.rpn"
        assert "1 of 1 probepoints active" in sandbox(inserting)
    assert first_of(replaced) == 2 * 1_001_003
    (probe,) = sandbox.probes("doubled")
    path = sandbox.directory / "fix.so"
    assert (probe["kind"], probe["patch"], probe["state"]) == ("patch", f"{path}:doubled", "ACTIVE")
    assert re.search(rf"\n0,0 +work, replaced by {path}:doubled +ACTIVE", sandbox("dprobes query"))
    sandbox("dprobes remove --name work")
    assert first_of(replaced) == 2 * 1003
    sandbox("dprobes remove --name doubled")
    assert first_of(replaced) == 1003
    assert {state.value for _, state in listed_patches(replaced.pid)} == {"removed"}
    assert code_is_original(replaced.pid, program)


def test_the_end_of_the_manager_restores_the_functions(
    build: Builder, sandbox: Sandbox, program: Path, replaced: subprocess.Popen[str]
) -> None:
    replacing = build("replacing.c", "-shared", "-fPIC", "-nostartfiles")
    sandbox.write("fix.rpn", f'name = "{program}"\noffset = work\npatch = "{replacing}:work"\n')
    sandbox(f"dprobes insert --allow-write -p {replaced.pid} fix.rpn")
    assert first_of(replaced) == 1_001_003
    sandbox("dprobes stop")
    assert first_of(replaced) == 1003
    assert code_is_original(replaced.pid, program)


def test_a_process_that_another_program_traces_is_not_patched(
    build: Builder, sandbox: Sandbox, program: Path, replaced: subprocess.Popen[str]
) -> None:
    """The order matters: a process can be traced after it was patched."""
    replacing = build("replacing.c", "-shared", "-fPIC", "-nostartfiles")
    sandbox.write("fix.rpn", f'name = "{program}"\noffset = work\npatch = "{replacing}:work"\n')
    sandbox.write("probe.rpn", f'name = "{program}"\noffset = uses_spread\nexit\n')
    sandbox(f"dprobes insert --engine ptrace -p {replaced.pid} --as traced probe.rpn")
    patching = f"dprobes insert --allow-write -p {replaced.pid} --as fix fix.rpn"
    assert f"process {replaced.pid} is already traced by process " in sandbox.refused(patching)
    assert first_of(replaced) == 1003
    sandbox("dprobes remove --name traced")
    sandbox(patching)
    assert first_of(replaced) == 1_001_003
