"""Fixtures: a manager of the test's own, and a program that calls functions on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace
from integration.manager.sandbox import Sandbox, service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.manager.sandbox import Service
    from integration.support import Builder


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.close()


@pytest.fixture
def target(build: Builder) -> Iterator[Service]:
    with service(build) as started:
        yield started


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> str:
    """The name of each engine that works here."""
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return str(request.param)
