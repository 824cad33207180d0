"""A connection says why it cannot be made, and is made again only where a stub may listen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.engines.gdb import stub_connection
from dprobes.engines.gdb.stub_connection import StubConnection
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_connection, "_PATIENCE", 0.2)
    monkeypatch.setattr(stub_connection, "_RETURN_PATIENCE", 0.2)


def test_a_command_that_has_ended_is_part_of_the_reason(tmp_path: Path) -> None:
    made = StubConnection(str(tmp_path / "none"), ("false",))
    with pytest.raises(EngineError) as caught:
        made.open()
    assert caught.value.message == (
        f"there is no stub at {tmp_path / 'none'}: no such file or directory; "
        "the command 'false' has ended with status 1"
    )
    made.abandon()


def test_nothing_is_there_any_more(tmp_path: Path) -> None:
    made = StubConnection(str(tmp_path / "none"), ())
    assert made.reopen() is None
    assert StubConnection("|false", ()).reopen() is None
    made.close()
