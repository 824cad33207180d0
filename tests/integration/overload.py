"""Programs that are hit until the test has seen enough, and what their hits came to."""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from integration.support import TIMEOUT, await_true, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.support import Result

__all__ = ["EMPTY", "LONG", "Endless", "await_records", "endless", "skipped"]

EMPTY = """name = "{path}"
offset = spot
minor = 1
{handler}
"""

LONG = """name = "{path}"
jmpmax = 65535
offset = spot
minor = 1
    push 65000
again:
    push 7
    push 9
    mul
    pop lv, 0
    loop again
    exit
"""
"""A handler that takes about a millisecond, on any machine much more than its trap."""


class Endless:
    """A running program (endless.c), which is hit until it is told to end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def end(self) -> int:
        """Let it end, and return how often it says that it was hit."""
        output, _ = self._process.communicate(timeout=TIMEOUT)
        assert self._process.returncode == 0
        return int(output)


@contextmanager
def endless(path: Path, pause: int) -> Iterator[Endless]:
    """Run the program with a pause of so many microseconds between two hits."""
    with running(path, pause, stdin=subprocess.PIPE) as process:
        yield Endless(process)


def await_records(output: Path, count: int) -> None:
    """Wait until so many more records than now are in a file; hits between those of a thinned handler were skipped."""

    def lines() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    wanted = lines() + count
    await_true(lambda: lines() >= wanted, f"{count} records")


def skipped(result: Result) -> int:
    """Return how many hits of 'spot' the summary says were skipped."""
    found = re.search(
        r"^\d+,1  (\d+) hits? of spot ran no handler: more would have taken too much of a CPU \(--overhead\)$",
        result.stderr,
        re.MULTILINE,
    )
    return int(found[1]) if found else 0
