"""Reasons why a process cannot be traced. The kernel returns only EPERM, but the user needs the cause."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import EngineError, PrivilegeError
from dprobes.platform.linux.procfs import process_field, thread_state, threads_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dprobes.resolve.probepoints import Probepoint

__all__ = [
    "RESTORER",
    "TRACER",
    "YAMA_REMEDY",
    "attach_error",
    "check_process",
    "check_traceable",
    "is_dprobes",
    "jump_text",
    "nothing_to_insert",
    "probed_by",
    "tracer_text",
    "uprobe_holders",
    "yama_scope",
]

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


TRACER = "dprobes.engines.ptrace.tracer.tracer_process"
"""Python module that tracers of the ptrace engine run. The last word of their command line is a probed module."""

RESTORER = "dprobes.engines.ptrace.client.restorer_process"
"""Python module that restorers run: processes that restore code after a tracer was killed, and trace to do so."""

_RESTORER_PATIENCE = 10.0
"""Maximum number of seconds to wait for a restorer to detach from a process."""
_INTERVAL = 0.01

YAMA_REMEDY = "start the program with -c, run dprobes as root, or set kernel.yama.ptrace_scope to 0"


def yama_scope() -> int | None:
    """Return Yama's ptrace_scope (0 to 3), or None if the kernel has no Yama."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return None


def check_process(pid: int, *, allow_self: bool = False) -> None:
    """
    Raise ``EngineError`` for a process id that no engine can probe.

    This process is one of them, unless ``allow_self``. An engine calls this before other checks.
    """
    if pid <= 0 or not Path(f"/proc/{pid}").exists():
        raise EngineError(f"there is no process {pid}")
    if pid == os.getpid():
        raise EngineError(f"EXCLUDED: process {pid} is dprobes itself")
    if not allow_self and is_dprobes(pid):
        raise EngineError(
            f"EXCLUDED: process {pid} ({process_field(pid, 'Name')}) belongs to a dprobes",
            hint="--allow-self lets one dprobes probe another one",
        )
    if (error := _no_program(pid) or _other_users(pid)) is not None:
        raise error
    try:
        with open(f"/proc/{pid}/maps", "rb"):
            pass
    except PermissionError:
        raise _closed_error(pid) from None
    except OSError:
        pass  # it has ended; attaching will report that


def check_traceable(pid: int, tracers: frozenset[int] = frozenset()) -> None:
    """
    Raise ``EngineError`` for a process that has a tracer other than ``tracers``.

    If the tracer is a restorer of this user, wait up to 10 s for it to detach.
    """
    until = time.monotonic() + _RESTORER_PATIENCE
    while (error := _traced(pid, tracers)) is not None:
        if not _is_being_restored(pid) or time.monotonic() > until:
            raise error
        time.sleep(_INTERVAL)


def attach_error(pid: int, reason: str, number: int, shares_with: int = 0) -> EngineError:
    """
    Return the error for a process for which PTRACE_SEIZE failed; ``number`` is the errno, ``reason`` its message.

    If ``shares_with`` is not 0, it is the id of a probed process with which the process shares memory.
    """
    if shares_with:
        why = attach_error(pid, reason, number)
        shared = f"process {shares_with} shares its memory with process {pid}, which would hit its breakpoints"
        return type(why)(f"{shared}: {why.message}", hint=why.hint)
    if number == errno.ESRCH or not Path(f"/proc/{pid}").exists():
        return EngineError(f"there is no process {pid}")
    name = process_field(pid, "Name")
    if number != errno.EPERM:
        return EngineError(f"process {pid} ({name}) cannot be traced: {reason}")
    if (error := _plain_reason(pid)) is not None:
        return error
    scope = yama_scope()
    if scope and os.geteuid() != 0:
        return PrivilegeError(
            f"process {pid} ({name}) cannot be traced: kernel.yama.ptrace_scope is {scope}",
            hint=YAMA_REMEDY,
        )
    return _closed_error(pid)


def _closed_error(pid: int) -> PrivilegeError:
    return PrivilegeError(
        f"process {pid} ({process_field(pid, 'Name')}) does not allow tracing",
        hint="it has made itself not dumpable, or runs with more privileges than you: run dprobes as root",
    )


def is_dprobes(pid: int) -> bool:
    """
    Return True if a process of this user is a Python with the command line of a client, or of a process that it starts.

    The command line alone is not enough: ``make dprobes`` and ``vim dprobes`` are other programs.
    """
    process = Path(f"/proc/{pid}")
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        executable = os.path.basename(os.readlink(process / "exe"))
    except OSError:
        return False
    if not executable.startswith("python") or process_field(pid, "Uid").split()[1:2] != [str(os.geteuid())]:
        return False
    # "/usr/bin/dprobes run", "python /usr/bin/dprobes run", "python -m dprobes run", "python -P -m dprobes.engines..."
    scripts = [os.path.basename(word) for word in words[:2]]
    modules = [module for option, module in itertools.pairwise(words[:4]) if option == b"-m"]
    return b"dprobes" in scripts or any(module.partition(b".")[0] == b"dprobes" for module in modules)


def _plain_reason(pid: int) -> EngineError | None:
    """Return the error for a reason that /proc/PID/status shows, or None if it shows none."""
    return _traced(pid) or _no_program(pid) or _other_users(pid)


def _traced(pid: int, tracers: frozenset[int] = frozenset()) -> EngineError | None:
    for tid in _threads(pid):
        tracer = int(process_field(tid, "TracerPid") or 0)
        if tracer in tracers:
            continue
        if (module := probed_by(tracer)) is not None:
            name, owner = process_field(pid, "Name"), process_field(tracer, "PPid")
            return EngineError(
                f"process {pid} ({name}) is already traced by the dprobes of process {owner}, "
                f"which began with a program for '{module}'",
                hint="a process has one tracer: insert all programs with 'dprobes insert', which lets them share it, "
                "or use --engine ebpf",
            )
        if tracer:
            by = process_field(tracer, "Name")
            return EngineError(
                f"process {pid} ({process_field(pid, 'Name')}) is traced by process {tracer} ({by}) already",
                hint="end that first: a process has one tracer",
            )
    return None


def _is_being_restored(pid: int) -> bool:
    """Return True if a restorer of this user traces a process; restorers of other users are not trusted."""
    for tracer in {int(process_field(tid, "TracerPid") or 0) for tid in _threads(pid)} - {0}:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{tracer}/cmdline")
            if RESTORER.encode() in command.read_bytes().split(b"\0") and command.stat().st_uid == os.geteuid():
                return True
    return False


def probed_by(tracer: int) -> str | None:
    """Return the name of the probed module for which a tracer of dprobes was started, or None for other processes."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{tracer}/cmdline").read_bytes().split(b"\0")
        if TRACER.encode() in words[:-1]:
            return os.fsdecode(words[-2])
    return None


def _no_program(pid: int) -> EngineError | None:
    name = process_field(pid, "Name")
    if thread_state(pid) == "Z" and len(_threads(pid)) <= 1:
        return EngineError(f"process {pid} ({name}) has ended and waits for its parent (zombie)")
    if process_field(pid, "Kthread") == "1":
        return EngineError(f"process {pid} ({name}) is a thread of the kernel")
    return None


def _other_users(pid: int) -> EngineError | None:
    owners = {int(uid) for uid in process_field(pid, "Uid").split()}
    if os.geteuid() != 0 and owners != {os.geteuid()}:
        return PrivilegeError(
            f"process {pid} ({process_field(pid, 'Name')}) belongs to user {min(owners, default=0)}, "
            f"not to user {os.geteuid()}",
            hint="run dprobes as that user or as root",
        )
    return None


def _threads(pid: int) -> set[int]:
    try:
        return threads_of(pid)
    except OSError:
        return set()


# The owner of a breakpoint at an address that a program probes, too: another dprobes, as far as /proc shows it.
#
# /proc/PID/status shows the tracer of a process. No file shows the owner of a uprobe: only processes of dprobes that
# hold links to uprobes are known.


_UPROBE_LINKS = (b"link_type:\tuprobe_multi\n", b"link_type:\tperf\n")


def tracer_text(tracer: int) -> str:
    """Return the message for a breakpoint that the process ``tracer`` has placed in a process that it traces."""
    if (module := probed_by(tracer)) is not None:
        owner = process_field(tracer, "PPid")
        return f"a breakpoint of the dprobes of process {owner}, which began with a program for '{module}', is there"
    return f"a breakpoint of process {tracer} ({process_field(tracer, 'Name')}) is there"


def jump_text(tracer: int) -> str | None:
    """Return the message for a jump that the process ``tracer`` has placed; None if it is not a tracer of dprobes."""
    module = probed_by(tracer) if tracer else None
    if module is None:
        return None
    owner = process_field(tracer, "PPid")
    return f"a jump of the dprobes of process {owner}, which began with a program for '{module}', needs its bytes"


def uprobe_holders() -> list[int]:
    """Return the sorted ids of other dprobes processes with links to uprobes, as far as this user may inspect them."""
    own = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return sorted(pid for pid in pids if pid != own and is_dprobes(pid) and _holds_uprobes(pid))


def _holds_uprobes(pid: int) -> bool:
    try:
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            if any(link in path.read_bytes() for link in _UPROBE_LINKS):
                return True
    except OSError:
        pass  # it has ended, or is another user's
    return False


# Refusal of a replacement: the old program remains if no probepoint of the new one could be inserted.


def nothing_to_insert(probes: Iterable[Probepoint], reasons: Iterable[str] = ()) -> EngineError:
    """
    Return the error for a replacement program of which no probepoint can be inserted.

    ``reasons`` are reasons in addition to the states of ``probes``.
    """
    told = [f"{probe.state.value} at {probe.where}" for probe in probes if probe.state.is_obstacle]
    first = [*told, *reasons][:1]
    return EngineError(
        f"no probepoint of the new program can be inserted; the old program continues{': ' if first else ''}"
        + "".join(first),
        hint="remove the inserted program if it is no longer needed",
    )
