"""The call stacks of programs, and the names in them, on other kernels: right as far as they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from guests.guest import Guest
    from integration.support import Builder

pytestmark = pytest.mark.shared_guest

SOURCE = 'name = "/tmp/callstacks"\nlogmax = 2048\nmajor = 1\noffset = here\nminor = 1\nlog ustack\nexit\n'


def test_stacks_are_right_or_say_that_they_are_cut(guest: Guest, build: Builder) -> None:
    guest.put("/tmp/callstacks", build("callstacks.c", "-O1", "-pthread", "-fno-optimize-sibling-calls"))
    guest.put("/tmp/stacks.rpn", SOURCE)
    options = ("--engine", "ebpf", "--stacks", "folded")
    done = guest.dprobes("run", "/tmp/stacks.rpn", *options, "--", "/tmp/callstacks")
    stacks = [line.rpartition(" ")[0].split(";") for line in done.stdout.splitlines() if line.startswith("callstacks;")]
    # The C library of guests has no local symbols: what it calls main by has no name there.
    below = ["callstacks", "_start", "__libc_start_main", "[libc.so.6]", "main"]
    stacks = [["[libc.so.6]" if each == "__libc_start_call_main" else each for each in stack] for stack in stacks]
    whole = [[*below, *["down"] * (depth + 1), "here"] for depth in range(60)]
    assert any(stack in stacks for stack in whole)
    # What a helper could not copy is said to be cut, and nothing is wrong.
    direct = [stack for stack in stacks if stack[-2:] == ["down", "here"] and not {"work", "handle"} & {*stack}]
    assert all(stack in whole or stack[1].startswith("[cut: ") for stack in direct)
