"""Items of the loops of blocks, from a /proc that hides processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.cli.runs import tool_blocks
from dprobes.dpc.typedtree.process_items import ItemKind

if TYPE_CHECKING:
    import pytest


def test_hidden_processes_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    me, seen = os.getpid(), tool_blocks._numbers

    def numbers(directory: str) -> list[int]:
        if directory == "/proc/1/task":
            raise PermissionError(directory)
        return [1, me] if directory == "/proc" else seen(directory)

    monkeypatch.setattr(tool_blocks, "_numbers", numbers)
    unread = set[tuple[ItemKind, int]]()
    assert {item.numbers[0] for item in tool_blocks._tasks(unread)} == {me}
    assert unread == {(ItemKind.TASKS, 1)}
