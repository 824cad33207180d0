"""What a thread is called in its own namespace is looked up once; who has no such namespace needs nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.ptrace.tracer import address_spaces
from dprobes.engines.ptrace.tracer.address_spaces import LocalIds

if TYPE_CHECKING:
    import pytest


def test_a_process_in_no_nested_namespace_needs_no_room() -> None:
    assert LocalIds.of(os.getpid()) is None


def test_the_innermost_id_of_a_thread_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ids_of(tid: int) -> tuple[int, ...]:
        asked.append(tid)
        return (tid, 40, 2) if tid < 10 else ()

    monkeypatch.setattr(address_spaces, "ids_of", ids_of)
    ids = LocalIds.of(7)
    assert ids is not None
    assert (ids.pid, ids.local_of(8), ids.local_of(8), ids.local_of(10)) == (7, 2, 2, None)
    assert (ids.by_thread, asked) == ({8: 2}, [7, 8, 10])
