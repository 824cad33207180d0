"""The line that says what takes long: at a terminal, after a second, and gone behind it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

SOURCE = """
import sys, time
from dprobes.cli.console import Progress
with Progress("counting records"):
    time.sleep({seconds})
print("done", file=sys.stderr)
"""


def said_at_terminal(seconds: float, **environment: str) -> str:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SOURCE.format(seconds=seconds)]
    with subprocess.Popen(command, stderr=slave, env=os.environ | {"TERM": "xterm"} | environment) as process:
        os.close(slave)
        said = b""
        while b"done\r\n" not in said:
            said += os.read(master, 1000)
        assert process.wait(20) == 0
    os.close(master)
    return said.decode()


def test_what_takes_a_second_is_said_at_a_terminal_and_cleared() -> None:
    said = said_at_terminal(1.8)
    assert said.startswith("\rcounting records ... 1 s\x1b[K\r")
    assert said.endswith("\r\x1b[Kdone\r\n")


def test_what_takes_less_is_not() -> None:
    assert said_at_terminal(0.1) == "done\r\n"


def test_nothing_is_said_elsewhere() -> None:
    assert said_at_terminal(1.3, TERM="dumb") == "done\r\n"
    command = [sys.executable, "-c", SOURCE.format(seconds=1.3)]
    assert subprocess.run(command, capture_output=True, check=True, timeout=20).stderr == b"done\n"


VERB = """
import sys, time
import dprobes.{module} as slow
original = slow.{function}
slow.{function} = lambda *a, **k: (time.sleep(1.6), original(*a, **k))[1]
from dprobes.cli.main import run
run({line!r})
print("done", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("line", "module", "function", "what", "printed"),
    [
        (
            ["list", "libc.so.6:getenv"],
            "target.module_lookup",
            "find_module",
            "looking for what can be probed",
            "getenv",
        ),
        (
            ["locate", "libc.so.6:getenv"],
            "target.module_lookup",
            "find_module",
            "looking for the place",
            "offset = getenv",
        ),
        (["doctor"], "engines.engine_registry", "rows", "testing this machine", "ptrace"),
    ],
)
def test_verbs_that_look_for_something_say_so_before_what_they_have_found(
    line: list[str], module: str, function: str, what: str, printed: str
) -> None:
    master, slave = pty.openpty()
    source = VERB.format(module=module, function=function, line=line)
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(slave)
        said = b""
        while b"done\r\n" not in said:
            said += os.read(master, 1000)
        assert process.stdout is not None
        assert printed in process.stdout.read().decode()
        assert process.wait(20) == 0
    os.close(master)
    assert said.decode().startswith(f"\r{what} ... 1 s\x1b[K\r")
    assert said.decode().endswith("\r\x1b[Kdone\r\n")
