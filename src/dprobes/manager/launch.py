"""Starting a manager: a process of its own that outlives the command that needed it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from dprobes.errors import ManagerError, reason_of
from dprobes.manager.paths import ALREADY, READY
from dprobes.manager.protocol import error_of

if TYPE_CHECKING:
    from dprobes.manager.paths import ManagerPaths

__all__ = ["launch_manager"]

_LOG_MAX = 1 << 20
"""Bytes of what managers have said, after which a new one begins anew."""


def launch_manager(paths: ManagerPaths) -> None:
    """Start a manager, and wait until it is ready, or another one is; raise the error with which it has ended."""
    ready, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        with paths.log.open("ab") as log:
            if log.tell() > _LOG_MAX:
                log.truncate(0)
            # A session of its own: it lives on when this terminal is closed.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dprobes.manager", str(theirs)],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
    except OSError as error:
        os.close(ready)
        raise ManagerError(f"the probe manager cannot be started: {reason_of(error)}") from error
    finally:
        os.close(theirs)
    with os.fdopen(ready, "rb") as pipe:
        said = pipe.read(len(READY))
        said += b"" if said == READY else pipe.read()
    if said != READY and (status := process.wait()) != ALREADY:
        if said:
            raise error_of(json.loads(said))
        raise ManagerError(
            f"the probe manager ended at once, with status {status}: {_last_line(paths)}",
            hint=f"'{paths.log}' may say more",
        )
    process.returncode = process.returncode or 0  # it is not ours to wait for


def _last_line(paths: ManagerPaths) -> str:
    with contextlib.suppress(OSError):
        lines = paths.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1].removeprefix("dprobes manager: ")
    return "it said nothing"
