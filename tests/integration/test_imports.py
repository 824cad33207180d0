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


ONE_LINER = ["run", "--engine", "ebpf", "-e", "hotloop:tick {{ @ = count(); }}", "--", "{program}", "5"]


@pytest.mark.parametrize(
    ("command", "every", "ours"),
    [
        (["--help"], 127, 15),
        (["check", "{source}"], 220, 109),
        (["run", "--engine", "ptrace", "{source}", "--", "{program}", "5"], 336, 197),
        (["run", "--engine", "ebpf", "{source}", "--", "{program}", "5"], 427, 296),
        (ONE_LINER, 476, 361),
    ],
)
def test_a_start_imports_little(build: Builder, tmp_path: Path, command: list[str], every: int, ours: int) -> None:
    if "ebpf" in command:
        require_bpf()
    counts = imported(command, build("hotloop.c"), tmp_path)
    assert counts[0] <= every
    assert counts[1] <= ours


def test_a_one_liner_imports_less_when_it_is_run_again(build: Builder, tmp_path: Path) -> None:
    require_bpf()
    program = build("hotloop.c")
    imported(ONE_LINER, program, tmp_path, is_kept=True)
    counts = imported(ONE_LINER, program, tmp_path, is_kept=True)
    assert counts[0] <= 328
    assert counts[1] <= 218


EARLY = """
import sys
def hook(event, arguments):
    if event == "import" and arguments[0] in ("dprobes.cli.main", "dprobes.engines.ebpf.kernel.ring"):
        with open({place!r}, "a") as file:
            ours = [name for name in sys.modules if name.startswith("dprobes")]
            file.write("%d %d %d\\n" % (len(sys.modules), len(ours), "dprobes.engines.ebpf.headstart" in ours))
sys.addaudithook(hook)
"""
"""Has a Python process say what it has imported when it begins to import the command line, or the reader of rings."""


def test_a_head_start_imports_next_to_nothing(build: Builder, tmp_path: Path) -> None:
    require_bpf()
    place = tmp_path / "early"
    (tmp_path / "sitecustomize.py").write_text(EARLY.format(place=str(place)))
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("DPROBES_NO_CACHE", None)
    line = [*DPROBES, "run", "--engine", "ebpf", "-e", f'"{build("hotloop.c")}":tick {{ @ = count(); }}']
    for _ in range(2):
        with subprocess.Popen([*line, "--duration", "0.1s"], env=environment, stderr=subprocess.PIPE, text=True) as run:
            _, said = run.communicate(timeout=TIMEOUT)
        assert run.returncode == 0, said
    counts = [[int(word) for word in text.split()] for text in place.read_text().splitlines()]
    (early, *_) = [(every, ours) for every, ours, is_early in counts if is_early]
    assert not counts[0][2]
    assert early[0] <= 95
    assert early[1] <= 21


def imported(command: list[str], program: Path, directory: Path, *, is_kept: bool = False) -> tuple[int, int]:
    """Run a command; return how many modules its processes have imported at most, and how many of ours."""
    place, source = directory / "modules", directory / "p.rpn"
    place.unlink(missing_ok=True)
    (directory / "sitecustomize.py").write_text(SITE.format(place=str(place)))
    source.write_text(PROGRAM)
    words = [word.format(source=source, program=program) for word in command]
    path = os.pathsep.join((str(directory), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(directory / "cache")}
    if is_kept:
        environment.pop("DPROBES_NO_CACHE", None)
    done = subprocess.run(
        [*DPROBES, *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = [line.split() for line in place.read_text().splitlines()]
    return max(int(count) for count, _ in counts), max(int(count) for _, count in counts)
