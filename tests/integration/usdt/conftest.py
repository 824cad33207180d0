"""Fixtures for tests of USDT probes: the engines, and the program with probes in several builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.ebpf.kernel import require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.support import Builder

HEADERS = ("sys/sdt.h", "sys/sdt-config.h")


@pytest.fixture(params=["ptrace", "ebpf"])
def engine(request: pytest.FixtureRequest) -> list[str]:
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return ["--engine", request.param]


@pytest.fixture(params=["ptrace", "inline", "ebpf"])
def any_engine(request: pytest.FixtureRequest) -> list[str]:
    """Return the option for an engine, whose records may come in any order."""
    if request.param == "ebpf":
        require_bpf()
        require_initial_namespace()
    return ["--engine", request.param]


@pytest.fixture(scope="session")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the headers of USDT probes alone, for compilers that look for none of this machine's."""
    directory = tmp_path_factory.mktemp("headers")
    for name in HEADERS:
        places = (Path(root, name) for root in ("/usr/include", "/usr/include/x86_64-linux-gnu"))
        found = next((path for path in places if path.exists()), None)
        if found is None:
            pytest.skip("systemtap-sdt-dev is not installed")
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copy(found, directory / name)
    return directory


@pytest.fixture
def usdt(build: Builder, headers: Path) -> Callable[..., Path]:
    return lambda *flags, i386=False: build("usdt.c", "-isystem", str(headers), *flags, i386=i386)
