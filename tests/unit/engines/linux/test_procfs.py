"""What ``/proc`` says of processes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from dprobes.engines.linux.procfs import first_stack_of

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
