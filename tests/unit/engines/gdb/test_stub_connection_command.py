"""A command that has a stub ends with its target, or is ended."""

from __future__ import annotations

import sys
import time

import pytest

from dprobes.engines.gdb.stub_connection import StubCommand
from dprobes.errors import EngineError

SLEEPING = (sys.executable, "-c", "import time; time.sleep(60)")


def test_one_that_goes_on_is_ended() -> None:
    command = StubCommand(SLEEPING)
    assert command.problem() is None
    command.end()
    assert command.problem() == f"the command '{sys.executable}' was ended by signal 15"
    command.end()


def test_one_that_ends_by_itself_is_waited_for() -> None:
    began = time.monotonic()
    command = StubCommand((sys.executable, "-c", "raise SystemExit(3)"))
    command.await_end()
    assert time.monotonic() < began + 5
    assert command.problem() == f"the command '{sys.executable}' has ended with status 3"


def test_one_that_there_is_not() -> None:
    with pytest.raises(EngineError) as caught:
        StubCommand(("/nowhere/stub",))
    assert caught.value.message == "'/nowhere/stub' cannot be started: no such file or directory"
