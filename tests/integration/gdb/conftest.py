"""Programs of each processor, which an emulator executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.gdb.processors import PROCESSORS, EmulatedProgram, Processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Processor:
    """Return each processor in turn."""
    return PROCESSORS[request.param]


@pytest.fixture
def start(processor: Processor, tmp_path: Path) -> Iterator[Callable[..., EmulatedProgram]]:
    """Return what starts a program of the processor, whose end comes with that of the test."""
    started: list[EmulatedProgram] = []

    def begin(*command: object) -> EmulatedProgram:
        started.append(EmulatedProgram(processor, tmp_path, *map(str, command)))
        return started[-1]

    yield begin
    for each in started:
        each.close()
