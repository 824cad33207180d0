"""The one-liners of one-liners.md and the page that teaches DProbes C: with both engines what the pages say."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration.support import TIMEOUT

DOCS = Path(__file__).parents[2] / "docs"
TABLES = DOCS / "reference" / "tables.md"
ONE_LINERS, LESSON = DOCS / "how-to" / "one-liners.md", DOCS / "tutorial" / "dpc-in-80-lines.md"
_COMMAND = re.compile(r"^\$ (dprobes run .*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_HEADER = re.compile(r"^\d\d:\d\d:\d\d\.\d{6}  ([^\[\n]+)\[\d+\]  ", re.MULTILINE)


def lines_of(page: Path) -> list[tuple[str, str]]:
    """Return the commands of a page, with what they print."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [found for block in blocks for found in _COMMAND.findall(block)]


def anonymous(text: str) -> list[str]:
    """Return the lines without times and process ids: records may come before or behind what the command prints."""
    return sorted(line.rstrip() for line in _HEADER.sub(r"\1  ", text).splitlines() if line.strip())


def check(command: str, output: str, engine: str) -> None:
    words = shlex.split(command)
    program = words[words.index("--") + 1]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "run", "--engine", engine, *words[2:]],
        capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert anonymous(output) == anonymous(done.stdout), done.stderr


def test_there_are_twelve() -> None:
    assert len(lines_of(ONE_LINERS)) == 12


def commands(page: Path) -> pytest.MarkDecorator:
    """Give a test the commands of a page, by their numbers."""
    found = lines_of(page)
    return pytest.mark.parametrize(
        ("command", "output"), found, ids=[str(number) for number in range(1, len(found) + 1)]
    )


@commands(ONE_LINERS)
@pytest.mark.parametrize("engine", ["ptrace", "ebpf"])
def test_a_one_liner_prints_what_the_page_says(command: str, output: str, engine: str) -> None:
    if engine == "ebpf" and os.geteuid() != 0:
        pytest.skip("ebpf needs root")
    check(command, output, engine)


@commands(LESSON)
def test_the_lesson_prints_what_it_says(command: str, output: str) -> None:
    check(command, output, "auto" if "--allow-write" in command else "ptrace")


@commands(TABLES)
def test_the_reference_of_tables_prints_what_it_says(command: str, output: str) -> None:
    check(command, output, "ptrace")


def test_the_programs_of_the_lesson_compile(tmp_path: Path) -> None:
    programs = re.findall(r"^```c\n(.*?)^```$", LESSON.read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        file = tmp_path / "lesson.dpc"
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, "-m", "dprobes", "check", file],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_the_lesson_has_eighty_lines_at_most() -> None:
    assert len(LESSON.read_text().splitlines()) <= 80
