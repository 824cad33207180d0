"""How many modules a start imports: what is not needed is imported late, because each takes 0.2 ms or more."""

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
def count():
    with open({place!r}, "a") as file:
        file.write("%d %d\\n" % (len(sys.modules), sum(name.startswith("dprobes") for name in sys.modules)))
atexit.register(count)
"""
"""Has a Python process say at its end how many modules it has imported, and how many of ours are among them."""


PROGRAM = "name = hotloop\nvars = 1\noffset = tick\ninc lv, 0\nabort\n"


@pytest.mark.parametrize(
    ("command", "every", "ours"),
    [
        (["--help"], 127, 13),
        (["check", "{source}"], 220, 108),
        (["run", "--engine", "ptrace", "{source}", "--", "{program}", "5"], 320, 181),
        (["run", "--engine", "ebpf", "{source}", "--", "{program}", "5"], 403, 272),
        (["run", "--engine", "ebpf", "-e", "hotloop:tick {{ @ = count(); }}", "--", "{program}", "5"], 468, 337),
    ],
)
def test_a_start_imports_little(build: Builder, tmp_path: Path, command: list[str], every: int, ours: int) -> None:
    if "ebpf" in command:
        require_bpf()
    place, source = tmp_path / "modules", tmp_path / "p.rpn"
    (tmp_path / "sitecustomize.py").write_text(SITE.format(place=str(place)))
    source.write_text(PROGRAM)
    words = [word.format(source=source, program=build("hotloop.c")) for word in command]
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [*DPROBES, *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = [line.split() for line in place.read_text().splitlines()]
    assert max(int(count) for count, _ in counts) <= every
    assert max(int(count) for _, count in counts) <= ours
