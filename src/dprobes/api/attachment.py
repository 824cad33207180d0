"""The three ways to a session: for a process, a command, or all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.api.session import ALL_ITEMS, ProbeSession
from dprobes.engines.ebpf.options import RING_SIZE
from dprobes.engines.interface import Scope, ScopeKind
from dprobes.engines.options import EngineOptions
from dprobes.engines.overhead import check_overhead
from dprobes.engines.registry import engine_that_probes, named_engine
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.record.layout import Item

__all__ = ["attach", "everywhere", "launch"]

_BUFFER = 64 << 20
"""Bytes of records that are kept until somebody reads them."""


def _options(
    directory: str | Path,
    allow_write: bool,
    exact: bool,
    pid_namespace: bool,
    ring_size: int,
    overhead: float | None,
    *,
    replaceable: bool = True,
) -> EngineOptions:
    return EngineOptions(
        allow_write,
        core_directory=str(directory),
        overhead=None if overhead is None else check_overhead(overhead),
        replaceable=replaceable,
        own={"exact": exact, "pid_namespace": pid_namespace, "ring_size": ring_size},
    )


def attach(
    pid: int | None = None,
    *,
    follow: bool = True,
    engine: str = "auto",
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for a running process, and with ``follow`` for all that it starts.

    Raise ``EngineError`` if there is no such process, or none that can be probed.

    ``engine`` is one that ``dprobes run --engine`` knows; "auto" is the cheapest that can do what a program needs. With
    one that has an endpoint (``gdb=HOST:PORT``) there is no ``pid``: the session is for what is behind that.
    ``items`` are the header items of records: fewer make them smaller. ``allow_write`` allows programs to change or
    stop the target. ``exact``, ``pid_namespace``, ``core_directory``, ``ring_size`` (in bytes) and ``overhead`` (in
    percent, 0 for no limit) are those of ``dprobes run``. ``buffer`` is how many bytes of records are kept that nobody
    has read.
    """
    options = _options(core_directory, allow_write, exact, pid_namespace, ring_size, overhead)
    if pid is None and named_engine(engine)[1] is None:
        raise EngineError(
            "attach needs the number of a process",
            hint="or name what it is to be behind, as engine='gdb=HOST:PORT'",
        )
    scope = Scope(pid=pid, follow=follow)
    return ProbeSession(scope, options, engine=engine, items=items, buffer=buffer)


def launch(
    command: Sequence[str],
    *,
    follow: bool = True,
    engine: str = "auto",
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for a command, a list of words.

    It begins when its records are read for the first time, or waited for, or with ``ProbeSession.go``: all programs
    that are inserted before probe it from its first instruction on. Leaving the session does not end it, but if it has
    not begun, it never will. ``ProbeSession.wait`` returns its exit status. Raise ``TargetError`` if there is no such
    command. With an ``engine`` that has an endpoint (``gdb=HOST:PORT``) the command is one that has a stub there; it is
    started when a program is inserted. The other arguments are those of ``attach``.
    """
    starts_stub = named_engine(engine)[1] is not None
    options = _options(
        core_directory, allow_write, exact, pid_namespace, ring_size, overhead, replaceable=not starts_stub
    )
    scope = Scope(command=tuple(command), follow=follow)
    return ProbeSession(scope, options, engine=engine, items=items, buffer=buffer)


def everywhere(
    *,
    cgroup: str | Path | None = None,
    uid: int | None = None,
    items: Item = ALL_ITEMS,
    allow_write: bool = False,
    exact: bool = False,
    pid_namespace: bool = False,
    core_directory: str | Path = ".",
    buffer: int = _BUFFER,
    ring_size: int = RING_SIZE,
    overhead: float | None = None,
) -> ProbeSession:
    """
    Return a session for all processes, those that are started later included; it needs the ebpf engine, and so root.

    ``cgroup`` is a directory below /sys/fs/cgroup whose processes only are meant, ``uid`` a user. The other arguments
    are those of ``attach``.
    """
    options = _options(core_directory, allow_write, exact, pid_namespace, ring_size, overhead)
    scope = Scope(cgroup=None if cgroup is None else str(cgroup), uid=uid)
    return ProbeSession(scope, options, engine=engine_that_probes(ScopeKind.EVERYWHERE), items=items, buffer=buffer)
