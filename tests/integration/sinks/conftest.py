"""Fixtures: real receivers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.sinks.collector import Collector
from integration.sinks.rsyslog import Certificates, Rsyslog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a directory with a name that is short enough for sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="dp", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def rsyslog(short_path: Path) -> Iterator[Rsyslog]:
    server = Rsyslog(short_path)
    yield server
    server.end()


@pytest.fixture
def tls_rsyslog(short_path: Path, certificates: Certificates) -> Iterator[Rsyslog]:
    server = Rsyslog(short_path, certificates)
    yield server
    server.end()


@pytest.fixture
def asking_rsyslog(short_path: Path, certificates: Certificates) -> Iterator[Rsyslog]:
    server = Rsyslog(short_path, certificates, asks=True)
    yield server
    server.end()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.gate.set()
    made.kill()
