"""A manager that cannot start says why: in its log, and to the client that waits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dprobes.errors import ManagerError
from dprobes.manager import daemon

if TYPE_CHECKING:
    from dprobes.manager.manager_files import ManagerPaths


@pytest.fixture(autouse=True)
def _fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(paths: ManagerPaths, ready: int | None) -> int:
        raise ManagerError("there is no room")

    monkeypatch.setattr(daemon, "_run", run)


def test_the_reason_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert daemon.main([]) == 1
    assert capsys.readouterr().err == "dprobes manager: there is no room\n"


def test_the_client_that_waits_is_told() -> None:
    reading, writing = os.pipe()
    assert daemon.main([str(writing)]) == 1
    assert b"there is no room" in os.read(reading, 4096)
    os.close(reading)
