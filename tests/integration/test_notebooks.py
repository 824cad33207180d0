"""Cells of notebooks on real programs: what runs yield, also those that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dprobes.notebook import RunError, load_ipython_extension, record

PROGRAM = """
libc.so.6:abs(int n) { printf("n=%d of %s", n, comm); @[n < 0] = count(); @all = sum(n); }
end { printf("a < b"); }
"""
TARGET = [sys.executable, "-S", "-c", "import ctypes; [ctypes.CDLL(None).abs(n) for n in (-3, 5, 7)]"]


def test_a_run_yields_records_tables_and_lines() -> None:
    found = record(PROGRAM, ["--engine", "ptrace", "--", *TARGET])
    assert [each["fields"]["n"] for each in found.records] == [-3, 5, 7]
    assert {name: [row["value"] for row in rows] for name, rows in found.tables.items()} == {"_": [1, 2], "all": [9]}
    assert found.lines == ("a < b",)
    assert "abs" in found.messages
    assert repr(found) == "<3 records, @: 2 rows, @all: 1 rows>"


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(RunError) as caught:
        record("libc.so.6:abs { @ = cont() }", ["--engine", "ptrace", "--", "true"])
    assert caught.value.messages.startswith("-e:1:21: error: there is no function 'cont'\n")
    assert "\nhint: did you mean 'count'?" in caught.value.messages


SCRIPT = """
import sys
from dprobes.notebook import record
found = record("libc.so.6:abs {{ @ = count() }}", ["--engine", "ptrace", "-p", "{pid}"])
print(len(found.rows), flush=True)
"""


def test_an_interrupt_ends_a_run_with_what_there_is() -> None:
    loop = "import ctypes, time\nprint(1, flush=True)\nwhile True: ctypes.CDLL(None).abs(1); time.sleep(0.01)"
    with (
        subprocess.Popen([sys.executable, "-S", "-c", loop], stdout=subprocess.PIPE) as target,
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(pid=target.pid)], stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        ) as client,
    ):  # fmt: skip
        try:
            assert target.stdout is not None
            assert client.stdout is not None
            assert target.stdout.readline() == b"1\n"
            status = Path(f"/proc/{target.pid}/status")
            while "TracerPid:\t0\n" in status.read_text():
                assert client.poll() is None
            os.kill(client.pid, signal.SIGINT)
            assert client.stdout.read() in (b"0\n", b"1\n")
            assert client.wait() == 0
            assert "TracerPid:\t0\n" in status.read_text()
        finally:
            client.kill()
            target.kill()


def test_the_magic_runs_a_cell(tmp_path: Path) -> None:
    shell_module: Any = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    script = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'dprobes.notebook')\n"
        "cell = '%%dprobes --engine ptrace -- true\\nlibc.so.6:_exit { @ = count() }'\n"
        "print('ROWS', len(shell.run_cell(cell).result.rows))\n"
        "print('NONE', shell.run_cell('%%dprobes -- true\\nlibc.so.6:_exit { @ = cont() }').result)\n"
    )
    assert shell_module is not None
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert "\nROWS 1\n" in f"\n{done.stdout}", done.stderr
    assert "NONE None\n" in done.stdout
    assert "there is no function 'cont'" in done.stderr
    assert callable(load_ipython_extension)
