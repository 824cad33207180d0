"""
Scope of a run: the conditions that handlers check before a hit counts, and the processes of a tree.

Process ids in maps are ids in the initial PID namespace. So the process id of a tree must be one, too.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from typing import TYPE_CHECKING, Protocol

from dprobes.bpf.lower.lowering_request import Filter
from dprobes.bpf.map_layouts import AWAITING, SCOPE_VALUE, awaiting_key
from dprobes.engines.ebpf.kernel.bpf_objects import explained
from dprobes.errors import EngineError, NotSupportedError, TargetError
from dprobes.platform.linux.procfs import (
    children_of,
    living_thread,
    process_field,
    system_call_of,
    thread_state,
    threads_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.diagnostics import Diagnostics
    from dprobes.engines.command_launcher import Command
    from dprobes.engines.ebpf.attach.map_objects import SharedMaps
    from dprobes.engines.ebpf.kernel.bpf_objects import Descriptors
    from dprobes.engines.ebpf.kernel.kernel_features import KernelTypes
    from dprobes.engines.engine_interface import Scope
    from dprobes.rpn.rpn_program import Program

__all__ = [
    "KEY",
    "ProcessTree",
    "descendants",
    "filter_of",
    "is_in_scope",
    "is_initial_namespace",
    "pid_namespace_of",
    "plant",
    "processes_of",
    "put",
    "refuse_stops",
]


class ScopeMap(Protocol):
    """Map of the processes in scope, by their ids."""

    def __contains__(self, key: bytes) -> bool: ...

    def __getitem__(self, key: bytes) -> bytes: ...

    def __setitem__(self, key: bytes, value: bytes) -> None: ...

    def discard(self, key: bytes) -> bool:
        """Delete the key of a process; return True if the map had it."""


KEY = struct.Struct("=I")
_ENDED = ("Z", "X")


def plant(scope: ScopeMap, set_alive: Callable[[int], None], pid: int, *, follow: bool) -> int:
    """
    Add a process to an empty scope, and with ``follow`` its descendants; raise OSError with the kernel's error.

    ``set_alive`` stores the number of living processes, before the processes are added. Return the correction of that
    number, which is negative if processes have ended meanwhile.
    """
    wanted = [pid, *(descendants(pid) if follow else ())]
    # No program updates the number while the map is empty.
    set_alive(len(wanted))
    extra = sum(put(scope, each) for each in wanted)
    # Processes that were started meanwhile, by processes that were not in scope yet.
    for each in descendants(pid) if follow else ():
        if KEY.pack(each) not in scope and thread_state(each) not in _ENDED:
            extra += 1 + put(scope, each)
    return extra


def put(scope: ScopeMap, pid: int, number: int | None = None) -> int:
    """
    Add the process ``pid`` to the scope. Its key is ``number``, or by default its id.

    Return the correction of the number of living processes: -1 if the process has ended, otherwise 0.
    """
    key = KEY.pack(pid if number is None else number)
    scope[key] = bytes(SCOPE_VALUE.size)
    # No program has counted the end of a process that ended before it had a key.
    return 0 if _has_living_thread(pid) else withdraw(scope, key)


def withdraw(scope: ScopeMap, key: bytes) -> int:
    """
    Delete the key of a process whose end no BPF program has counted.

    Return the correction of the number of living processes: -1 if the key existed, otherwise 0.
    """
    try:
        _, _, has_ended = SCOPE_VALUE.unpack(scope[key])
    except KeyError:
        return 0
    return -1 if not has_ended and scope.discard(key) else 0


def _has_living_thread(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(thread_state(tid) not in _ENDED for tid in threads_of(pid))
    return False


def descendants(pid: int) -> list[int]:
    """Return the ids of the descendants of a process."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            children = [child for tid in threads_of(parent) for child in children_of(parent, tid)]
            found += children
            waiting += children
    return found


def processes_of(scope: Scope) -> list[int]:
    """Return the ids of a scope's process and, with ``follow``, its descendants. Other kinds of scopes have none."""
    return [] if scope.pid is None else [scope.pid, *(descendants(scope.pid) if scope.follow else ())]


_LEAVING = 2.0
"""
Maximum number of seconds from a process's SIGCHLD until it has left its CPU and released its resources.

Usually it takes tens of milliseconds.
"""

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode number of the initial PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""


def is_initial_namespace() -> bool:
    """Return whether this process is in the initial PID namespace, whose process ids BPF programs see."""
    return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE


def filter_of(scope: Scope) -> Filter:
    """Return the conditions on the process that handlers check for a scope. They always exclude this process."""
    if scope.is_tree:
        return Filter(processes=True)
    excluded = os.getpid()
    if not is_initial_namespace():
        from dprobes.engines.ebpf.attach.process_programs import own_process

        with explained("the program that asks for our process id"):
            excluded = own_process()
    cgroup = None if scope.cgroup is None else _cgroup_of(scope.cgroup)
    return Filter(cgroup=cgroup, uid=scope.uid, excluded=excluded)


def refuse_stops(program: Program, diagnostics: Diagnostics) -> None:
    """Add an error for each exit that stops a process, if this is not the initial PID namespace."""
    if is_initial_namespace():
        return
    for code in program.bodies():
        for instruction in code.instructions:
            if instruction.row.syntax == "exit <code>" and instruction.operand in (1, 3):
                diagnostics.error(
                    instruction.span,
                    f"the ebpf engine cannot carry out '{instruction}' from within a PID namespace",
                    hint="use --engine ptrace with -c COMMAND or -p PID",
                )


def is_in_scope(scope: Scope, pid: int, maps: SharedMaps) -> bool:
    """Return True if an existing process is in scope. This process itself never is."""
    if scope.is_tree:
        return KEY.pack(pid) in maps.scope
    if pid == os.getpid():
        return False
    if scope.uid is not None:
        return process_field(pid, "Uid").split()[:1] == [str(scope.uid)]
    return scope.cgroup is None or _is_in_cgroup(pid, scope.cgroup)


def _is_in_cgroup(pid: int, path: str) -> bool:
    """Return whether a process is in the cgroup whose directory is ``path``, or in a descendant of that cgroup."""
    wanted = os.stat(path)
    root = os.path.realpath(path)
    while os.stat(parent := os.path.dirname(root)).st_dev == wanted.st_dev:
        root = parent
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        for line in file:
            hierarchy, _, own = line.rstrip("\n").split(":", 2)
            if hierarchy == "0":
                place = root + own
                while len(place) >= len(root):
                    if os.stat(place).st_ino == wanted.st_ino:
                        return True
                    place = os.path.dirname(place)
    return False


def _cgroup_of(path: str) -> tuple[int, int]:
    """
    Return the id of a cgroup, given its directory, and its level. The root of the hierarchy has the level 0.

    Raise a ``DprobesError`` if the directory is in no cgroup2 file system, or outside the cgroup namespace.
    """
    # Since Linux kernel commit 40430452fd5d ("kernfs: use 64bit inos if ino_t is 64bit") (in v5.5) the id is the inode.
    identity = os.stat(path).st_ino
    mounted = ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields, _, kind = line.partition(" - ")
            _, _, _, root, place, *_ = fields.split()
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            if kind.startswith("cgroup2 ") and inside and len(place) > len(mounted):
                mounted, above = place, root
    if not mounted:
        raise EngineError(f"'{path}' is in no mounted cgroup file system of version 2")
    if ".." in above:
        raise NotSupportedError(f"'{path}' lies outside of the cgroup namespace of dprobes")
    parts = (above + "/" + path[len(mounted) :]).split("/")
    return identity, sum(bool(part) for part in parts)


class ProcessTree:
    """
    Processes of a process tree, in SCOPE, with their descendants if these are followed.

    SCOPE is empty until ``plant``. A ``command``, or another process that is about to call execve, comes into scope
    when it calls execve. Until then it only counts as alive.
    """

    def __init__(self, maps: SharedMaps, types: KernelTypes, scope: Scope, command: Command | None) -> None:
        from dprobes.engines.ebpf.attach.process_programs import follow_processes

        self._maps = maps
        self._follow = scope.follow
        self._pid = command.pid if command is not None else scope.pid
        self._awaits_exec = command is not None or scope.program is not None
        self._extra = 0
        self._leaving: float | None = None
        with explained("the program that follows a process tree"):
            self._links: Descriptors = follow_processes(
                maps.descriptors, types, children=scope.follow, awaits_exec=self._awaits_exec
            )

    def plant(self) -> None:
        """
        Add the process, and its present descendants if they are followed.

        Raise a ``DprobesError`` if it has ended.
        """
        pid = self._pid
        if pid is None:
            return
        if self._awaits_exec:
            self._maps.set_alive(1)
            with explained("a larger set of processes"):
                self._extra += put(self._maps.scope, pid, awaiting_key(pid))
            return
        with explained("a larger set of processes"):
            self._extra = plant(self._maps.scope, self._maps.set_alive, pid, follow=self._follow)

    def pids(self) -> list[int]:
        """Return the ids of the processes in scope."""
        return sorted(pid for pid, _ in self._members())

    def _members(self) -> Iterator[tuple[int, int]]:
        """Iterate over the processes in scope, with the number of threads of each that have ended."""
        for key in set(self._maps.scope):
            with contextlib.suppress(KeyError):
                (pid,), (_, ending, _) = KEY.unpack(key), SCOPE_VALUE.unpack(self._maps.scope[key])
                if not pid & AWAITING:
                    yield pid, ending

    @property
    def has_left(self) -> bool:
        """
        True if no ended process of the tree executes kernel code any more. All processes must have ended.

        This is exact for ``_LEAVING`` seconds from the first call on. After that, only processes that still release
        resources count, for example by closing files.
        """
        if self._leaving is None:
            self._leaving = time.monotonic() + _LEAVING
        is_late = time.monotonic() > self._leaving
        return all(self._has_left(pid, ending, is_late=is_late) for pid, ending in self._members())

    @staticmethod
    def _has_left(pid: int, ending: int, *, is_late: bool) -> bool:
        match thread_state(pid):
            case "Z":
                # A process is in scope until it was waited for; it has no stack any more once it has left its CPU.
                return is_late or (ending <= 1 and system_call_of(pid) is not None)
            case "X":
                return is_late
        return False

    def release(self, pid: int) -> None:
        """Remove a process from the scope. Its later children are not in scope either."""
        self._extra += withdraw(self._maps.scope, KEY.pack(pid))

    @property
    def alive(self) -> int:
        """Number of processes in scope that have not ended."""
        return self._maps.alive + self._extra

    def close(self) -> None:
        """Detach the BPF programs that update SCOPE."""
        self._links.close()


def pid_namespace_of(scope: Scope) -> tuple[int, int]:
    """
    Return the device and inode number of the PID namespace for process ids in records.

    It is the namespace of the scope's process, or else of this process. Raise ``TargetError`` if the scope's process
    has ended.
    """
    pid = scope.pid
    try:
        status = os.stat(f"/proc/{'self' if pid is None else living_thread(pid)}/ns/pid")
    except OSError as error:
        raise TargetError(f"process {pid} has ended") from error
    return status.st_dev, status.st_ino
