"""What processes map, as it was a moment ago."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach import mappers
from dprobes.engines.ebpf.attach.mappers import RecentMaps

if TYPE_CHECKING:
    import pytest


def test_what_a_process_maps_is_read_again_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = 100.0, 0

    def maps_of(pid: int, limit: int | None) -> tuple[int, str]:
        nonlocal reads
        reads += 1
        return pid, f"read {reads}"

    monkeypatch.setattr(mappers, "_maps_of", maps_of)
    monkeypatch.setattr(mappers, "root_of", lambda thread: f"root of {thread}")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    recent = RecentMaps(age=2.0)
    assert recent.of(500) == (500, "read 1", "root of 500")
    now = 101.5
    assert recent.of(500) == (500, "read 1", "root of 500")
    assert recent.of(501) == (501, "read 2", "root of 501")
    now = 102.5
    assert recent.of(500) == (500, "read 3", "root of 500")
    assert recent.of(501) == (501, "read 2", "root of 501")
