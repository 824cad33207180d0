"""Fixtures: guests, one for each test."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from guests.emulator import GuestError, Machine, Snapshot
from guests.features import lack_of
from guests.guest import SharedGuest, boot, resumed
from guests.images import KERNELS, NotBuiltError, UnavailableError
from guests.kernel_choice import machine_of, superfluous
from integration.conftest import build, interruptible

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from guests.guest import Guest

__all__ = ["build", "interruptible"]

PASSED = pytest.StashKey[bool]()
"""Whether the test itself has passed, for what clears up."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out on all kernels but one, where one is enough."""
    if not config.getoption("--all-kernels", default=False) and (left := set(superfluous(items))):
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=[*left])
    # The tests that share a machine follow each other, and a file begins with the machine of the file before.
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    is_reversed = False
    for tests in files.values():
        if all(item.get_closest_marker("shared_guest") for item in tests):
            tests.sort(key=machine_of, reverse=is_reversed)
            is_reversed = not is_reversed
    items[:] = [item for tests in files.values() for item in tests]


@contextlib.contextmanager
def shared_snapshot(machine: Machine, directory: Path) -> Iterator[Snapshot]:
    """Give a snapshot that one process of the test run has booted: it leaves a note for others in the directory."""
    note = directory / f"snapshot-{hashlib.sha256(repr(machine).encode()).hexdigest()[:16]}"
    with note.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        said = file.read()
        snapshot = Snapshot.of_process(machine, said) if said else None
        if snapshot is None:
            snapshot = boot(machine)
            file.truncate(0)
            file.write(snapshot.note)
    with contextlib.closing(snapshot):
        yield snapshot


@pytest.fixture(scope="session")
def snapshot_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Machine], Snapshot]]:
    """Return what boots each machine once in a test run."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # that of the whole run
    with contextlib.ExitStack() as stack:
        snapshots: dict[Machine, Snapshot | UnavailableError | GuestError] = {}

        def find(machine: Machine) -> Snapshot:
            if machine not in snapshots:
                try:
                    snapshots[machine] = stack.enter_context(shared_snapshot(machine, directory))
                except (UnavailableError, GuestError) as error:
                    snapshots[machine] = error
            match snapshots[machine]:
                case NotBuiltError() as reason:
                    pytest.skip(f"older kernel: {reason}")
                case UnavailableError() as reason:
                    pytest.skip(f"no guest: {reason}")
                case GuestError() as failure:
                    raise failure
                case snapshot:
                    return snapshot

        yield find


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """Return each series of kernels in turn."""
    series: str = request.param
    return series


@pytest.fixture(scope="session")
def shared_guest() -> Iterator[SharedGuest]:
    """Return the guest of the tests that share one."""
    with contextlib.closing(SharedGuest()) as shared:
        yield shared


@pytest.fixture
def guest(
    kernel: str,
    request: pytest.FixtureRequest,
    snapshot_of: Callable[[Machine], Snapshot],
    shared_guest: SharedGuest,
) -> Iterator[Guest]:
    """
    Return a guest as it is after a boot; its kernel must not have warned at the end, nor crashed unnoticed.

    The marker ``machine`` says what is not as usual, such as ``cpus=4``, and ``requires_feature`` what the test needs.
    """
    options = {name: value for marker in request.node.iter_markers("machine") for name, value in marker.kwargs.items()}
    machine = replace(Machine(kernel), **options)
    is_shared = request.node.get_closest_marker("shared_guest") is not None
    if not (is_shared and shared_guest.runs(machine)):
        # A worker has one machine, also while it boots another one: with two, workers could wait for each other.
        shared_guest.close()
    for marker in request.node.iter_markers("requires_feature"):
        for feature in marker.args:
            if (reason := lack_of(feature, snapshot_of(machine).machine.image)) is not None:
                pytest.skip(f"older kernel: {reason}")
    if is_shared:
        is_sound = False
        try:
            running = shared_guest.of(machine, snapshot_of)
            yield running
            if running.is_alive:
                running.check_health()
            is_sound = request.node.stash.get(PASSED, False)
        finally:
            shared_guest.give_back(is_sound=is_sound)
        return
    with resumed(snapshot_of(machine)) as running:
        yield running
        if running.is_alive:
            running.check_health()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let no test decide in a guest that it needs something else: what a kernel must have is in one table."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    if report.skipped and call.when == "call" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.longrepr}\na test in a guest is skipped by requires_feature only"
    return report
