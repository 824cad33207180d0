"""Where a manager's files are: no other user can keep a user from having one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.manager.manager_files import RUNTIME, STATE, manager_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be a user without a run-time directory; return the one in /tmp, which nobody has made."""
    user = 3_000_000_000 + os.getpid()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for variable in (RUNTIME, "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    path = Path(f"/tmp/dprobes-{user}")
    yield path
    remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("/tmp")])
def test_what_somebody_else_has_made_in_tmp_is_left_alone(
    common: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    assert manager_paths().runtime == common
    make(common)
    own = tmp_path / "state" / "run"
    assert manager_paths().runtime == own
    remove(common)
    assert manager_paths().runtime == common
    own.mkdir(parents=True)
    (own / "manager.lock").touch()
    assert manager_paths().runtime == own


def test_what_is_the_users_own_is_used(common: Path) -> None:
    try:
        common.mkdir()
        os.chown(common, os.geteuid(), -1)
    except OSError:
        pytest.skip("a directory cannot be given to another user")
    assert manager_paths().runtime == common
