"""
The files of a user's manager.

::

    run-time directory      mode 0700; DPROBES_RUNTIME_DIR, else /run/dprobes for root, else $XDG_RUNTIME_DIR/dprobes,
    ├── manager.sock        mode 0600  else /tmp/dprobes-UID, else the directory run in the state directory
    ├── manager.lock        held (flock) as long as the manager lives; contains its process id
    └── manager.log         its standard error
    state directory         mode 0700; DPROBES_STATE_DIR, else /var/lib/dprobes for root, else $XDG_STATE_HOME/dprobes,
    └── trace.dpt           else ~/.local/state/dprobes
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import ManagerError, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ALREADY",
    "READY",
    "RUNTIME",
    "STATE",
    "ManagerPaths",
    "check_private",
    "manager_paths",
    "private_directory",
    "socket_address",
]

ALREADY = 3
"""The exit status of a manager that ends because the user's manager is already running."""

READY = b"r"
"""
The byte that a manager writes to the starting client's pipe when it accepts connections.

Otherwise it writes an error.
"""

RUNTIME, STATE = "DPROBES_RUNTIME_DIR", "DPROBES_STATE_DIR"
"""The environment variables that override the directories."""


@dataclass(frozen=True, slots=True)
class ManagerPaths:
    """The directories of a manager: ``runtime`` with its socket and lock, ``state`` with its trace file."""

    runtime: Path
    state: Path

    @property
    def socket(self) -> Path:
        """The socket that clients connect to."""
        return self.runtime / "manager.sock"

    @property
    def lock(self) -> Path:
        """The file that is locked by the running manager."""
        return self.runtime / "manager.lock"

    @property
    def log(self) -> Path:
        """The standard error of a manager that was started by a client."""
        return self.runtime / "manager.log"

    @property
    def trace(self) -> Path:
        """The manager's trace file."""
        return self.state / "trace.dpt"


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """
    Provide an address for a socket whose path may be longer than the 107 bytes of an address (unix(7)).

    Raise ``OSError`` if the directory does not exist.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def manager_paths() -> ManagerPaths:
    """Return the directories of this user's manager, without creating them."""
    user = os.geteuid()
    environment = os.environ
    if (state := environment.get(STATE)) is None:
        home = environment.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
        state = "/var/lib/dprobes" if user == 0 else f"{home}/dprobes"
    if (runtime := environment.get(RUNTIME)) is None:
        parent = "/run" if user == 0 else environment.get("XDG_RUNTIME_DIR")
        runtime = f"{parent}/dprobes" if parent else _shared_directory(user, state)
    return ManagerPaths(Path(runtime), Path(state))


def _shared_directory(user: int, state: str) -> str:
    """
    Return the default run-time directory of a user without a configured one.

    Another user may have created the directory in /tmp first. Then it is in the state directory, and stays there,
    because an existing manager must be found when the other directory is gone.
    """
    common, own = Path(f"/tmp/dprobes-{user}"), Path(state, "run")  # noqa: S108 - checked to be ours
    if (own / "manager.lock").exists():
        return str(own)
    try:
        status = common.lstat()
    except OSError:
        return str(common)
    return str(common if stat.S_ISDIR(status.st_mode) and status.st_uid == user else own)


def private_directory(path: Path, variable: str) -> None:
    """
    Create a directory that only this user can enter; raise ``ManagerError`` if another user owns or may write it.

    ``variable`` is the environment variable that overrides the directory, for the hint.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ManagerError(f"'{path}' cannot be made: {reason_of(error)}", hint=_hint(variable)) from error
    check_private(path, variable)


def check_private(path: Path, variable: str) -> None:
    """
    Raise ``ManagerError`` if a directory is another user's, or writable by others. A missing one is accepted.

    In such a directory, any user may have created a socket. ``variable`` is the environment variable that sets it.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ManagerError(f"'{path}': {reason_of(error)}", hint=_hint(variable)) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ManagerError(f"'{path}' is not a directory", hint=_hint(variable))
    if status.st_uid != os.geteuid():
        raise ManagerError(
            f"'{path}' belongs to user {status.st_uid}, not to this one ({os.geteuid()})", hint=_hint(variable)
        )
    if (mode := stat.S_IMODE(status.st_mode)) & 0o022:
        raise ManagerError(f"'{path}' can be written by others (mode {mode:04o})", hint=_hint(variable))


def _hint(variable: str) -> str:
    return f"set {variable} to a directory of your own"
