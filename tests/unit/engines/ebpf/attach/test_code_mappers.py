"""What processes map, as it was a moment ago."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach import code_mappers
from dprobes.engines.ebpf.attach.code_mappers import RecentMaps, find_mappers

if TYPE_CHECKING:
    import pytest

CLOCK_NANOSLEEP = 230


def test_what_a_process_maps_is_read_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = 100.0, 0

    def maps_of(pid: int, limit: int | None) -> tuple[int, str]:
        nonlocal reads
        reads += 1
        return pid, f"read {reads}"

    monkeypatch.setattr(code_mappers, "_maps_of", maps_of)
    monkeypatch.setattr(code_mappers, "root_of", lambda thread: f"root of {thread}")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    recent = RecentMaps(age=2.0)
    assert recent.of(500) == (500, "read 1", "root of 500")
    now = 101.5
    assert recent.of(500) == (500, "read 1", "root of 500")
    assert recent.of(501) == (501, "read 2", "root of 501")
    now = 102.5
    assert recent.of(500) == (500, "read 3", "root of 500")
    assert recent.of(501) == (501, "read 2", "root of 501")


def test_the_processes_that_map_a_file_are_the_same_whether_the_kernel_answers_or_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            while not Path(f"/proc/{process.pid}/syscall").read_text().startswith(f"{CLOCK_NANOSLEEP} "):
                pass  # it is still loading what it maps
            pids = [os.getpid(), process.pid, 2, 1 << 22]
            for path in (f"/proc/{process.pid}/exe", "/proc/self/exe"):
                answered = find_mappers(path, pids)
                with monkeypatch.context() as patch:
                    patch.setattr(code_mappers, "_is_likely", lambda *_: True)
                    assert find_mappers(path, pids) == answered
                assert len(answered) == 1
        finally:
            process.kill()
