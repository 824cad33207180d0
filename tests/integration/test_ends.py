"""However a command ends, it says what is to be said, and no traceback."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT = 60
EXAMPLE = Path(__file__).parents[2] / "examples" / "malloc.rpn"
LIMITED = """
import resource, runpy, sys
from pathlib import Path
import {modules}
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + {room}, used + {room}))
{then}
"""
CHECK = f'sys.argv = ["dprobes", "check", {str(EXAMPLE)!r}]; runpy.run_module("dprobes", run_name="__main__")'


def limited(room: int, modules: str, then: str) -> subprocess.CompletedProcess[str]:
    """Do something with so many bytes of memory left."""
    script = LIMITED.format(modules=modules, room=room, then=then)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=TIMEOUT)


@pytest.mark.parametrize("room", [1 << 20, 4 << 20, 8 << 20, 15 << 20])
def test_too_little_memory_is_an_error_as_others(room: int) -> None:
    done = limited(room, "dprobes.cli.main, dprobes.cli.verbs.check, dprobes.rpn.rpn_parser", CHECK)
    assert done.returncode == 1, done.stderr
    assert (
        done.stderr
        == "dprobes: error: there is not enough memory\nhint: 'ulimit -v' shows the limit of the address space\n"
    )


def test_a_small_program_needs_no_memory_for_a_large_one() -> None:
    """Programs may have up to 16 MiB."""
    read = f"print(len(dprobes.preprocessor.source_reader.read_source(Path({str(EXAMPLE)!r})).text))"
    done = limited(8 << 20, "dprobes.preprocessor.source_reader", read)
    assert (done.stdout, done.stderr) == (f"{len(EXAMPLE.read_text())}\n", "")


def test_a_ctrl_c_at_any_moment_prints_no_traceback(tmp_path: Path) -> None:
    """Also while modules are imported: as soon as ours are looked for, a module says so, and Ctrl-C comes then."""
    package = tmp_path / "click"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.torture
def test_two_ctrl_c_at_random_moments_print_no_traceback() -> None:
    chance = random.Random(1)
    command = [sys.executable, "-m", "dprobes", "run", str(EXAMPLE), "-c", "sleep 5"]
    for _ in range(100):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(chance.uniform(0.1, 1.0))
        process.send_signal(signal.SIGINT)
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=TIMEOUT)
        # Before our code runs, Python itself says that it was interrupted.
        assert re.search(r'__main__\.py", line \d+, in main', said) is None, said
