"""The guard takes away the lines of its group, and no others, when its owner has ended; a file stands for tracefs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.inkernel.kprobe_guard import Guard
from integration.support import await_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINES = "p:mine/e0 dummy:one\nr16:mine/e1 dummy:two+0\np:others/e0 dummy:three\n"
REMOVALS = "-:mine/e0\n-:mine/e1\n"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "kprobe_events").write_text(LINES)
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_at_the_end_of_its_context(directory: int, tmp_path: Path) -> None:
    with Guard("mine", directory):
        assert (tmp_path / "kprobe_events").read_text() == LINES
    assert (tmp_path / "kprobe_events").read_text() == LINES + REMOVALS


def test_after_its_owner_was_killed(directory: int, tmp_path: Path) -> None:
    code = f"""
import os, signal
from dprobes.engines.ebpf.inkernel.kprobe_guard import Guard
guard = Guard("mine", {directory})
os.killpg(0, signal.SIGKILL)
"""
    owner = subprocess.run(
        [sys.executable, "-c", code], pass_fds=(directory,), stdout=subprocess.PIPE, start_new_session=True, check=False
    )
    assert owner.returncode == -signal.SIGKILL
    await_true(lambda: (tmp_path / "kprobe_events").read_text() == LINES + REMOVALS, "the removal")
