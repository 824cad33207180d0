"""
How many modules a start imports: what is not needed is imported late, because each takes 0.2 ms or more.

Versions of Python and click differ by some, for which there is room.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf
from integration.support import DPROBES, TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

SITE = """
import atexit, sys
before = set(sys.modules)
def count():
    names = sys.modules.keys() - before
    with open({place!r}, "a") as file:
        file.write("%d %d\\n" % (len(names), sum(name.startswith("dprobes") for name in names)))
atexit.register(count)
"""
"""
Has a Python process say at its end how many modules it has imported, and how many of ours are among them.

Not what Python itself imports at its start, nor the ``.pth`` files of what else is installed.
"""


PROGRAM = "name = hotloop\nvars = 1\noffset = tick\ninc lv, 0\nabort\n"


ONE_LINER = ["run", "--engine", "ebpf", "-e", "hotloop:tick {{ @ = count(); }}", "--", "{program}", "5"]


@pytest.mark.parametrize(
    ("command", "every", "ours"),
    [
        (["--help"], 104, 12),
        (["check", "{source}"], 178, 83),
        (["run", "--engine", "ptrace", "{source}", "--", "{program}", "5"], 255, 132),
        (["run", "--engine", "ebpf", "{source}", "--", "{program}", "5"], 301, 178),
        (ONE_LINER, 343, 219),
    ],
)
def test_a_start_imports_little(build: Builder, tmp_path: Path, command: list[str], every: int, ours: int) -> None:
    if "ebpf" in command:
        require_bpf()
    counts = imported(command, build("hotloop.c"), tmp_path)
    assert counts[0] <= every
    assert counts[1] <= ours


def imported(command: list[str], program: Path, directory: Path) -> tuple[int, int]:
    """Run a command; return how many modules its processes have imported at most, and how many of ours."""
    place, source = directory / "modules", directory / "p.rpn"
    place.unlink(missing_ok=True)
    (directory / "sitecustomize.py").write_text(SITE.format(place=str(place)))
    source.write_text(PROGRAM)
    words = [word.format(source=source, program=program) for word in command]
    path = os.pathsep.join((str(directory), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(directory / "cache")}
    done = subprocess.run(
        [*DPROBES, *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = [line.split() for line in place.read_text().splitlines()]
    return max(int(count) for count, _ in counts), max(int(count) for _, count in counts)
