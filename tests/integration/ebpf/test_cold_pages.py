"""Code and data that are not in memory: probepoints hold there, and handlers read what is there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.ebpf.objects import await_attached
from integration.support import TIMEOUT, await_line, code_is_original, running

if TYPE_CHECKING:
    from integration.support import Builder, Result, Runner

ENGINE = ("--engine", "ebpf")
PAGE = 4096
PAGES = 24
PROGRAM = """name = "{path}"
offset = look
minor = 1
push 8
push r, arg0
log mrf
exit

offset = two_pages
minor = 2
exit
"""


@pytest.fixture(autouse=True)
def _bpf() -> None:
    require_bpf()
    require_initial_namespace()


@pytest.fixture
def program(build: Builder, tmp_path: Path) -> Path:
    """Return a program file that nobody has executed, and that is not in memory."""
    return make_cold(Path(shutil.copy(build("cold.c"), tmp_path / "cold")))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(PAGES * PAGE))
    return make_cold(path)


def make_cold(path: Path) -> Path:
    """Let the kernel forget what it has of a file in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return path


def expect(result: Result, data: Path, turns: int) -> None:
    contents = data.read_bytes()
    places = range(100, len(contents), PAGE)
    assert [result.counts[minor].hits for minor in (1, 2)] == [turns * PAGES] * 2
    assert [result.counts[minor].records for minor in (1, 2)] == [turns * PAGES] * 2
    found = [bytes.fromhex(r["data"]) for r in result.records if r["minor"] == 1]
    # A byte for the kind, two for the length: everything was there to be read.
    assert found == [b"\0\x08\0" + contents[n : n + 8] for n in places] * turns


def require_sleepable() -> None:
    if Feature.SLEEPABLE_UPROBE not in Features():
        pytest.skip("this kernel has no sleepable uprobe programs: what is not in memory cannot be read")


def test_a_program_is_probed_before_it_is_first_executed(run: Runner, program: Path, data: Path) -> None:
    require_sleepable()
    client, output = run.start(PROGRAM.format(path=program), [], ENGINE)
    await_attached(client)
    make_cold(program)
    text = subprocess.run([program, data], check=True, input="\n\n", capture_output=True, text=True, timeout=TIMEOUT)
    result = run.end(client, output)
    assert text.stdout.startswith("0 ")  # nothing of the data was in memory
    expect(result, data, 2)


def test_a_command_is_probed_whose_file_was_never_read(run: Runner, program: Path, data: Path) -> None:
    require_sleepable()
    result = run.command(PROGRAM.format(path=program), program, data, options=ENGINE, stdin=_lines(data.parent, 3))
    expect(result, data, 3)


def _lines(directory: Path, count: int) -> int:
    path = directory / "lines"
    path.write_text("\n" * count)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@pytest.mark.parametrize("scope", ["all", "process"])
def test_code_is_probed_that_has_been_thrown_out_of_memory(run: Runner, program: Path, data: Path, scope: str) -> None:
    require_sleepable()
    with running(program, data, stdin=subprocess.PIPE) as target:
        assert await_line(target) == "0 0\n"
        options = ["-p", str(target.pid)] if scope == "process" else []
        client, output = run.start(PROGRAM.format(path=program), options, ENGINE)
        await_attached(client)
        assert target.stdin is not None
        for _ in range(2):
            target.stdin.write("\n")
            target.stdin.flush()
            # The pages with breakpoints are copies, and belong to the file no more.
            assert await_line(target).split()[0] == "0"
        result = run.end(client, output)
        assert code_is_original(target.pid, program)
        target.stdin.close()
        assert target.wait(TIMEOUT) == 0
    assert result.status == 0, result.stderr
    expect(result, data, 2)
