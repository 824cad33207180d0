from __future__ import annotations

import threading
from typing import Any

import pytest

from dprobes.cli.output.tableoutput import TableOptions, TableOutput


class Session:
    """A session that somebody ends."""

    def __init__(self) -> None:
        self.is_stopped = threading.Event()

    def stop(self) -> None:
        self.is_stopped.set()


@pytest.mark.parametrize("lead", [3600.0, 5000.0])
def test_the_time_of_a_run_that_has_passed_already_counts(lead: float) -> None:
    session: Any = Session()
    with TableOutput(TableOptions(duration=3600.0), session, 0).shown(lead):
        assert session.is_stopped.wait(60)


def test_a_run_has_all_of_its_time_else() -> None:
    session: Any = Session()
    with TableOutput(TableOptions(duration=3600.0), session, 0).shown():
        assert not session.is_stopped.wait(0.05)
    assert not session.is_stopped.is_set()
