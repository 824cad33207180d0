"""Fixtures: compile test programs once, and run probe programs in a directory of the test's own."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from integration.support import Builder, Runner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Take SIGINT as from a terminal: a shell lets its background jobs ignore it, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    directory = tmp_path_factory.mktemp("programs")
    for path in (directory, *directory.parents[:2]):
        path.chmod(0o755)  # for tests that run as another user
    return Builder(directory)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.close()
