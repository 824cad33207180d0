"""The examples of docs/how-to/python.md run, and print what the guide says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integration.support import TIMEOUT

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "python.md"
_EXAMPLE = re.compile(r"^```python(?P<needs>[a-z ]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [(match["needs"].split(), match["code"]) for match in _EXAMPLE.finditer(GUIDE.read_text())]
HEADINGS = re.findall(r"^## (\d+)\. ", GUIDE.read_text(), re.MULTILINE)


def test_there_are_twelve_examples_and_more() -> None:
    assert [int(number) for number in HEADINGS] == list(range(1, 13))
    assert len(EXAMPLES) >= 12


@pytest.mark.parametrize(("needs", "code"), EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_an_example_prints_what_the_guide_says(needs: list[str], code: str, tmp_path: Path) -> None:
    if needs and os.geteuid() != 0:
        pytest.skip("the ebpf engine needs root")
    program, _, expected = code.partition("# prints\n")
    environment = {
        **os.environ,
        "DPROBES_RUNTIME_DIR": str(tmp_path / "run"),
        "DPROBES_STATE_DIR": str(tmp_path / "state"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [line.removeprefix("#").removeprefix(" ") for line in expected.splitlines()]


def test_the_examples_are_well_typed(tmp_path: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import mypy"], capture_output=True, check=False).returncode:
        pytest.skip("mypy is not installed")
    files = []
    for number, (_, code) in enumerate(EXAMPLES):
        files.append(tmp_path / f"example{number}.py")
        files[-1].write_text(code)
    environment = {**os.environ, "MYPYPATH": str(GUIDE.parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}",
         "--follow-imports=silent", *map(str, files)],
        capture_output=True, text=True, timeout=4 * TIMEOUT, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
