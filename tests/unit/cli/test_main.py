"""Errors that become messages and exit statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.cli import main

if TYPE_CHECKING:
    import pytest


def test_a_thread_that_finds_no_room_is_too_little_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dispatch(_arguments: object) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(main, "_dispatch", dispatch)
    assert main.run(["doctor"]) == 1
    assert capsys.readouterr().err == (
        "dprobes: error: there is not enough memory\nhint: 'ulimit -v' shows the limit of the address space\n"
    )
