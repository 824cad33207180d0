"""The command that waits to be probed."""

from __future__ import annotations

import os

import pytest

from dprobes.engines.launcher import Command


def test_a_command_that_is_never_let_go_ends_also_if_another_process_holds_its_pipe() -> None:
    command = Command(["/bin/true"])
    held = os.dup(command._go)  # as a child that was forked meanwhile
    try:
        command.close()
        with pytest.raises(ProcessLookupError):
            os.kill(command.pid, 0)
    finally:
        os.close(held)
