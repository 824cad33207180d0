"""What ``/proc`` says of processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from dprobes.platform.linux.procfs import MapQuestion, children_of, first_stack_of, ids_of, without_waiting

NOBODY = (1 << 22) - 1


def test_the_first_stack_ends_where_the_kernel_has_put_arguments() -> None:
    found = first_stack_of(os.getpid())
    assert found is not None
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[stack]"))
    start, end = (int(number, 16) for number in line.split()[0].split("-"))
    assert start < found < end
    # The first word of it is the number of arguments.
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    assert ctypes.c_long.from_address(found).value == len(arguments)


def test_a_process_that_is_gone_has_none() -> None:
    assert first_stack_of(NOBODY) is None


def test_a_thread_has_an_id_in_each_namespace_from_ours_on() -> None:
    assert ids_of(os.getpid()) == (os.getpid(),)
    assert ids_of(NOBODY) == ()
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo ready; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("no PID namespace can be made")
        (child,) = children_of(process.pid, process.pid)
        assert ids_of(child) == (child, 1)
        process.communicate(b"\n")


def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "program"
    os.mkfifo(path)
    with open(path, "rb", opener=without_waiting) as file:
        assert file.read(1) == b""
    # The name of the file is asked for where it cannot be mapped.
    question = MapQuestion.about(str(path), 7, "program")
    assert question.answer(os.getpid(), 1 << 12) in (False, None)
