"""What tests of the eBPF engine share as fixtures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.engines.ebpf.kernel.kernel_features import Feature, Features
from integration.ebpf.kernel import descriptors, require_bpf, require_initial_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def leaves_no_descriptor() -> Iterator[None]:
    """Let a test use bpf(2), of which it leaves nothing open."""
    require_bpf()
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.fixture
def typed_tracepoints() -> None:
    """Let a test attach programs that follow the kernel's pointers, and see processes by their own ids."""
    require_initial_namespace()
    if (error := Features().error(Feature.TYPED_TRACEPOINT)) is not None:
        pytest.skip(f"this kernel has no {Feature.TYPED_TRACEPOINT.value}: {error}")


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Return a cgroup with one below it; both are gone at the end."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if root is None:
        pytest.skip("no cgroup file system of version 2 is mounted")
    directory = root / f"dprobes-test-{os.getpid()}"
    try:
        (directory / "below").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield directory
    (directory / "below").rmdir()
    directory.rmdir()
