"""Programs that are checked and built for another kernel than the one that runs here, by a file with its types."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.main import run
from dprobes.ppdf.ppdf_file import decode

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
struct oddity { long first[77]; int counter; };
int handle_an_oddity(struct oddity *odd, int n) { return odd->counter + n; }
"""
PROGRAM = 'kernel:handle_an_oddity(odd, n) { printf("%d %d", odd->counter, n); }'
MISSPELT = "kernel:handle_an_oddity(odd) { @ = sum(odd->count); }"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with types as a ``vmlinux`` has them."""
    if shutil.which("gcc") is None or shutil.which("objcopy") is None:
        pytest.skip("gcc and objcopy are not installed")
    directory = tmp_path_factory.mktemp("kernel")
    source, kernel = directory / "kernel.c", directory / "vmlinux"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-gbtf", "-shared", "-fPIC", "-o", kernel, source], check=True)
    return kernel


@pytest.fixture(scope="module")
def copy(kernel: Path) -> Path:
    """Return the same as the kernel itself shows it."""
    copy = kernel.with_name("copy")
    flags = ["--only-section=.BTF", "--set-section-flags", ".BTF=alloc"]
    subprocess.run(["objcopy", "-O", "binary", *flags, kernel, copy], check=True)
    return copy


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("form", ["kernel", "copy"])
def test_types_are_those_of_the_file(
    request: pytest.FixtureRequest, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = request.getfixturevalue(form)
    status, _, said = outcome(capsys, "check", "--kernel-types", types, "-e", PROGRAM)
    assert status == 0
    assert "note: the program is for another kernel than the one that runs here: its places are not looked up" in said
    assert "error" not in said
    status, _, said = outcome(capsys, "check", "--kernel-types", types, "-e", MISSPELT)
    assert status == 2
    assert "error: 'struct oddity' has no member 'count'" in said
    status, _, said = outcome(capsys, "run", "--engine", "ebpf", "--kernel-types", types, "-e", MISSPELT)
    assert status == 2
    assert "error: 'struct oddity' has no member 'count'" in said
    status, _, said = outcome(capsys, "run", "--engine", "ebpf", "--kernel-types", types, "-e", PROGRAM)
    assert status != 0
    assert "handle_an_oddity" in said
    assert "has no member" not in said
    status, source, _ = outcome(capsys, "build", "--emit", "rpn", "--kernel-types", types, "-e", PROGRAM)
    assert status == 0
    assert re.search(rf"push {8 * 77}\b", source)
    built = tmp_path / "built.ppdf"
    status, _, said = outcome(capsys, "build", "--kernel-types", types, "-e", PROGRAM, "-o", built)
    assert status == 0
    assert "is for any build of the kernel: its places are found by name" in said
    assert decode(built.read_bytes()).kernels == ()


def test_a_file_without_types_is_refused_once(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = kernel.with_name("other")
    subprocess.run(["objcopy", "--remove-section=.BTF", kernel, other], check=True)
    for path, reason in (
        (other, "has no section .BTF, which has the types of a kernel"),
        (kernel.with_name("kernel.c"), "has no types of a kernel: BTF begins with "),
    ):
        status, _, said = outcome(capsys, "check", "--kernel-types", path, "-e", PROGRAM)
        assert status == 1
        assert said.startswith(f"dprobes: error: '{path}' {reason}")
        assert said.count("error") == 1
        assert "hint: name a vmlinux that was made with CONFIG_DEBUG_INFO_BTF" in said
