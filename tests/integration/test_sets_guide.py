"""The page on instrumentation sets: its commands print what it shows."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from integration.documented_commands import ROOT, shapes, steps_of, under_test
from integration.served_programs import PYTHON, needs
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "how-to" / "instrumentation-sets.md"


def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    needs(PYTHON)
    program, *steps = steps_of(PAGE)
    assert program.command == "cat users.py"
    (tmp_path / "users.py").write_text(program.output)
    assert len(steps) == 10
    for step in steps:
        done = subprocess.run(
            ["sh", "-c", under_test(step)],
            capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=tmp_path,
            env={**os.environ, "LC_ALL": "C", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        found, shown = (
            {each for each in shapes(text) if not _varies(each)} for text in (done.stdout + done.stderr, step.output)
        )
        assert found == shown, step.command


def _varies(line: str) -> bool:
    """Return whether a line is about times, or the rights of a user."""
    return line.startswith(("dprobes: note: ", "hint: ", "ebpf "))
