"""The line that says what takes long: at a terminal, after a second, and gone behind it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from dprobes.cli import console

SOURCE = """
import sys, time
from dprobes.cli.console import Progress
with Progress("counting records"):
    {operation}
print("done", file=sys.stderr)
"""
UNTIL_TOLD = "sys.stdin.read()"
"""An operation that goes on until its standard input ends."""
SHOWN = re.compile(rb"\r([a-z ]+) \.\.\. [0-9]+ s\x1b\[K\r")


def said_at_terminal(source: str, until: re.Pattern[bytes] | None, **environment: str) -> tuple[str, str]:
    """Run a program at a terminal, and end its input when ``until`` has been said; return standard error and output."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave,
        env=os.environ | {"TERM": "xterm"} | environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        os.close(slave)
        said = b""
        while b"done\r\n" not in said:
            if until is None or until.search(said):
                process.stdin.close()
            said += os.read(master, 1000)
        printed = process.stdout.read().decode()
        assert process.wait(60) == 0
    os.close(master)
    return said.decode(), printed


def test_what_takes_a_second_is_said_at_a_terminal_and_cleared() -> None:
    said, _ = said_at_terminal(SOURCE.format(operation=UNTIL_TOLD), SHOWN)
    assert said.startswith("\rcounting records ... ")
    assert said.endswith("\r\x1b[Kdone\r\n")


def test_what_takes_less_is_not() -> None:
    assert said_at_terminal(SOURCE.format(operation="pass"), None)[0] == "done\r\n"


def test_nothing_is_said_elsewhere() -> None:
    source = SOURCE.format(operation="time.sleep(1.3)")
    assert said_at_terminal(source, None, TERM="dumb")[0] == "done\r\n"
    command = [sys.executable, "-c", source]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stderr == b"done\n"


VERB = """
import sys
import dprobes.{module} as slow
original = slow.{function}
slow.{function} = lambda *a, **k: (sys.stdin.read(), original(*a, **k))[1]
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
    said, output = said_at_terminal(VERB.format(module=module, function=function, line=line), SHOWN)
    assert printed in output
    assert said.startswith(f"\r{what} ... ")
    assert said.endswith("\r\x1b[Kdone\r\n")


def test_only_one_thing_is_in_the_singular() -> None:
    assert [console.counted(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
