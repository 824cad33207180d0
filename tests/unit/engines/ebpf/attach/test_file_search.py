"""When files are looked for that processes map later."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.ebpf.attach.file_search import NewFiles
from dprobes.engines.engine_interface import Notice

if TYPE_CHECKING:
    import pytest


class Looks(NewFiles):
    """Looks that take until they are let go, and find a notice each."""

    def __init__(self) -> None:
        self.begun = 0
        self.gate = threading.Event()
        program, scope = SimpleNamespace(name="libx.so"), SimpleNamespace(is_tree=False)
        findings = SimpleNamespace(users=None, files=(), known=(), is_partial=False)
        job = SimpleNamespace(program=program, scope=scope)
        super().__init__(cast("Any", None), cast("Any", job), cast("Any", findings))

    def _look(self, pids: object, probed: object) -> None:
        self.begun += 1
        self.gate.wait()
        self._next = 103.0
        self._found.append(Notice(f"look {self.begun}"))

    def ask(self) -> list[str]:
        return [each.message for each in self.found(lambda: None) if isinstance(each, Notice)]

    def end_look(self) -> None:
        assert self._thread is not None
        self.gate.set()
        self._thread.join(20)
        self.gate.clear()


def test_one_look_at_a_time_is_begun_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    looks = Looks()
    assert (looks.ask(), looks.begun) == ([], 0)
    now = 102.0
    assert (looks.ask(), looks.ask(), looks.begun) == ([], [], 1)
    looks.end_look()
    assert (looks.ask(), looks.ask(), looks.begun) == (["look 1"], [], 1)
    now = 104.0
    assert (looks.ask(), looks.begun) == ([], 2)
    looks.end_look()
    looks.close()
