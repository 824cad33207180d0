"""
The process of the manager: ``python -m dprobes.manager``.

Started by a client (``client``), which waits at a pipe for it, or by systemd, which gives it the listening socket
(``place``). SIGTERM and SIGINT end it, and every probepoint with it. Should it be killed, the kernel takes the eBPF
programs away, and tracers see the end of their pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError, ManagerError, reason_of
from dprobes.manager.allocator import give_large_blocks_back
from dprobes.manager.lock import Place
from dprobes.manager.manager import Manager
from dprobes.manager.paths import ALREADY, READY, RUNTIME, STATE, manager_paths, private_directory
from dprobes.manager.protocol import message_of
from dprobes.manager.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.manager.paths import ManagerPaths

__all__ = ["main"]

_IDLE_LIMIT = 900.0
"""Seconds after which a manager that has nothing to do ends."""


def main(arguments: Sequence[str]) -> int:
    """Run the manager; ``arguments`` may name the descriptor of the pipe at which a client waits."""
    ready = int(arguments[0]) if arguments else None
    paths = manager_paths()
    try:
        return _run(paths, ready)
    except DprobesError as error:
        return _fail(error, ready)
    except OSError as error:
        where = f"'{os.fsdecode(error.filename)}': " if error.filename else ""
        return _fail(ManagerError(f"{where}{reason_of(error)}"), ready)


def _run(paths: ManagerPaths, ready: int | None) -> int:
    private_directory(paths.runtime, RUNTIME)
    private_directory(paths.state, STATE)
    _allow_descriptors()
    give_large_blocks_back()
    place = Place.take(paths)
    if place is None:
        return ALREADY
    with Manager(paths.trace) as manager:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, manager.end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        place.listen()
        if ready is not None:
            _tell(ready, READY)
        Server(manager, place, _IDLE_LIMIT).serve()
        place.leave()
    return 0


def _fail(error: DprobesError, ready: int | None) -> int:
    with contextlib.suppress(OSError):  # there may be no room for a log
        print(f"dprobes manager: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
    if ready is not None:
        _tell(ready, json.dumps(message_of(error)).encode())
    return 1


def _tell(pipe: int, what: bytes) -> None:
    with contextlib.suppress(OSError):  # the client has gone, or was told before
        os.write(pipe, what)
        os.close(pipe)


def _allow_descriptors() -> None:
    """Have as many descriptors as this user may: thousands of probepoints need some thousands."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
