"""Fixtures: compile test programs once, and run probe programs in a directory of the test's own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from integration.support import Builder, Runner
from support.forked_starts import ForkedPopen, Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="_interruptible", scope="session", autouse=True)
def interruptible() -> None:
    """Take SIGINT as from a terminal: a shell lets its background jobs ignore it, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _forked_starts(_interruptible: None) -> Iterator[None]:
    """Fork the ``dprobes`` that tests start from a process that has imported the package."""
    if os.environ.get("DPROBES_TEST_START", "fork") == "exec":
        yield
        return
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Server()) as server:
        patch.setattr(ForkedPopen, "server", server)
        patch.setattr(subprocess, "Popen", ForkedPopen)
        yield


@pytest.fixture(autouse=True)
def _reachable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """
    Let other users come to what tests make; pytest and its workers put directories of their own user around it.

    Each pytest that starts on this machine takes the outermost one for itself alone again.
    """
    base = tmp_path_factory.getbasetemp()
    for path in (base, *base.parents):
        if path.stat().st_uid == os.getuid() and path != Path(tempfile.gettempdir()):
            path.chmod(path.stat().st_mode | 0o055)
        else:
            break


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    if (compiled := os.environ.get("DPROBES_COMPILED_PROGRAMS")) is not None:
        return Builder(Path(compiled), Path(compiled))
    directory = tmp_path_factory.mktemp("programs")
    directory.chmod(0o755)  # for tests that run as another user
    return Builder(directory)


@pytest.fixture
def debug_registers() -> Iterator[None]:
    """Have the processor's debug registers for a test alone: other test runs on this machine wait."""
    with (Path(tempfile.gettempdir()) / f"dprobes-debug-registers-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def page_protection() -> None:
    """Skip a test if this kernel does not report writes to protected pages."""
    import ctypes

    from dprobes.platform.linux.userfault_calls import NEW_FLAGS, UserFaults

    number = ctypes.CDLL(None, use_errno=True).syscall(323, NEW_FLAGS)
    if number < 0:
        pytest.skip(f"userfaultfd(2): {os.strerror(ctypes.get_errno())}")
    try:
        UserFaults(number).close()
    except OSError as error:
        pytest.skip(f"write protection by userfaultfd(2): {error.strerror}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def nobody_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which an ordinary user can run the package: it may not read root's directories."""
    directory = tmp_path_factory.mktemp("package")
    directory.chmod(0o755)
    import click
    import iced_x86

    import dprobes

    for package in (click, dprobes, iced_x86):
        assert package.__file__ is not None
        shutil.copytree(Path(package.__file__).parent, directory / package.__name__)
    subprocess.run(["chmod", "-R", "a+rX", str(directory)], check=True)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
