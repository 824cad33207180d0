"""vfyr and vfyrw say what the program itself could do, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf

if TYPE_CHECKING:
    from integration.support import Builder, Runner


@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_addresses_are_verified_as_the_program_could_use_them(build: Builder, run: Runner, engine: str) -> None:
    if engine == "ebpf":
        require_bpf()
    program = build("pages.c")
    source = f'name = "{program}"\noffset = look\nminor = 1\npush r, arg0; vfyrw; push r, arg0; vfyr; log 2\nexit\n'
    result = run.command(source, program, options=("--engine", engine))
    rows = [line.split() for line in result.stdout.splitlines()]
    found = {row[0]: tuple(words) for row, words in zip(rows, result.words(), strict=True)}
    # What the program found out with the system calls read and write.
    assert found == {row[0]: (int(row[1]), int(row[2])) for row in rows}
    assert found == {
        "none": (1, 1),
        "r--": (0, 1),
        "rw-": (0, 0),
        "untouched": (0, 0),
        "last": (0, 0),
        "behind": (1, 1),
        "file": (0, 0),
        "file-beyond": (1, 1),
        "file-r--": (0, 1),
        "code": (0, 1),
        "null": (1, 1),
        "kernel": (1, 1),
        "huge": (1, 1),
    }


def test_procid_is_the_cpu_and_task_is_refused(build: Builder, run: Runner) -> None:
    program = build("memory.c")
    source = "name = memory\noffset = look\nminor = 1\n"
    result = run(source + "push procid; log 1; exit\n", ["--exit-status", "--", "taskset", "-c", "0", str(program)])
    assert result.status == 0, result.stderr
    assert result.words() == [[0]] * 4
    refused = run(source + "push task; exit\n", ["--", str(program)])
    assert refused.status == 2
    assert "'push task' needs the kernel's task structure, which the ptrace engine lacks" in refused.stderr
