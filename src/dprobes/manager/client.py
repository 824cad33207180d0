"""
Client of the manager: connecting, starting a manager if none is running, and requests.

``ManagerClient`` is part of the Python API; the verbs of the command line use no other interface. ``ask`` is the
protocol itself; the other methods accept and return typed data.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dprobes.engines.engine_interface import Notice, Scope
from dprobes.errors import ManagerError, reason_of
from dprobes.manager.manager_files import (
    ALREADY,
    READY,
    RUNTIME,
    STATE,
    check_private,
    manager_paths,
    private_directory,
    socket_address,
)
from dprobes.manager.manager_messages import (
    AddTargetArguments,
    GetvarsArguments,
    InsertArguments,
    InsertedPrograms,
    Insertion,
    Killed,
    ManagedProgram,
    ManagedVariables,
    ManagerStatus,
    QueryArguments,
    Removal,
    RemoveArguments,
    RemoveTargetArguments,
    ScopeArguments,
    StopArguments,
    Stopped,
)
from dprobes.manager.wire_protocol import VERSION, Connection, decode, encode, error_of
from dprobes.platform.linux.procfs import thread_state
from dprobes.record.log_record import Item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.manager.manager_files import ManagerPaths
    from dprobes.sinks.sink_thread import TargetStatus

__all__ = ["ManagerClient", "launch_manager"]

# Start of a manager: a process of its own that outlives the command that needed it.


_LOG_MAX = 1 << 20
"""Size in bytes above which a starting manager truncates its log."""


def launch_manager(paths: ManagerPaths) -> None:
    """
    Start a manager, and wait until it or another one accepts connections.

    Raise the error with which it has exited.
    """
    import subprocess  # not needed by queries of a running manager

    ready, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        with paths.log.open("ab") as log:
            if log.tell() > _LOG_MAX:
                log.truncate(0)
            # A session of its own lets it survive the end of this terminal.
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
            hint=f"'{paths.log}' may show the reason",
        )
    process.returncode = process.returncode or 0  # prevents the warning about a running child


def _last_line(paths: ManagerPaths) -> str:
    with contextlib.suppress(OSError):
        lines = paths.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            return lines[-1].removeprefix("dprobes manager: ")
    return "it said nothing"


_START_PATIENCE = 30.0
"""Seconds to wait for a manager to start, or for another one to exit."""

_INTERVAL = 0.02

_STOPPED_LOOK = 2.0
"""Seconds of silence after which the client checks whether the manager is stopped."""

_SILENCE = 10.0
"""Seconds of silence after which the client reports that it is waiting."""

_NOBODY = (FileNotFoundError, ConnectionRefusedError)


class ManagerClient:
    """
    Connection to this user's manager. It is a context manager.

    With ``starts``, a manager is started if none is running. ``notify`` is called with each notice in an answer.
    ``patience`` is the number of seconds of silence after which the manager is considered hung. None means no limit,
    but a stopped manager is noticed. Every method raises the error that the manager reports, or ``ManagerError`` if it
    cannot be reached.
    """

    def __init__(
        self,
        *,
        starts: bool = False,
        notify: Callable[[Notice], None] | None = None,
        patience: float | None = None,
        paths: ManagerPaths | None = None,
    ) -> None:
        self._patience = patience
        self._paths = paths or manager_paths()
        self._starts = starts
        self._notify = notify
        self._connection: Connection | None = None
        self._interval = _STOPPED_LOOK if patience is None else patience
        self._silent = 0.0
        """Seconds since data was last received."""

    def __enter__(self) -> Self:
        end = self._connect() or (self._start() if self._starts else None)
        if end is None:
            if (pid := self._living()) is not None:
                raise ManagerError(f"the probe manager, process {pid}, is starting or ending")
            raise ManagerError("no probe manager runs, so nothing is inserted", hint="'dprobes insert FILE' starts one")
        self._connection = Connection(end, self._on_silence)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._connection is not None:
            self._connection.__exit__()
            self._connection = None

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """
        Send a request for a verb; return its result (docs/reference/manager.md).

        Raise the error that the manager sends, or ``ManagerError`` if the manager does not answer.
        """
        assert self._connection is not None, "the client has not been entered"
        try:
            self._silent = 0.0
            if self._patience is None:
                self._check_not_stopped()  # a stopped manager would carry out the request at any later time
            with contextlib.suppress(BrokenPipeError):  # a manager that closed the connection has sent the reason
                self._connection.send({"dprobes": VERSION, "verb": verb, "arguments": _given(arguments)})
            while (message := self._connection.receive()) is not None:
                if "notice" in message:
                    if self._notify is not None:
                        self._notify(decode(Notice, message["notice"]))
                elif "error" in message:
                    raise error_of(message)
                else:
                    result: dict[str, Any] = message["result"]
                    return result
        except OSError as error:
            raise ManagerError(f"the probe manager does not answer: {reason_of(error)}") from error
        raise ManagerError("the probe manager has ended; all its probepoints have been removed")

    def _ask(self, verb: str, arguments: Any) -> dict[str, Any]:
        return self.ask(verb, **encode(arguments))

    def _on_silence(self) -> None:
        """Raise ``ManagerError`` if the manager is stopped, and TimeoutError if it has been silent for too long."""
        self._silent += self._interval
        if self._patience is not None:
            raise TimeoutError("timed out")
        self._check_not_stopped()
        if self._silent - self._interval < _SILENCE <= self._silent and self._notify is not None:
            text = f"the probe manager has not answered for {self._silent:.0f} seconds; Ctrl-C stops waiting"
            self._notify(Notice(text))

    def _check_not_stopped(self) -> None:
        pid = self._locked_by()
        if pid is not None and thread_state(pid) in ("T", "t"):
            raise ManagerError(
                f"the probe manager, process {pid}, does not answer: it is stopped",
                hint=f"'kill -CONT {pid}' continues it; 'dprobes stop' ends it",
            )

    def insert(
        self,
        ppdf: bytes,
        *,
        name: str | None = None,
        merges: bool = False,
        replaces: bool = False,
        scope: Scope | None = None,
        engine: str = "auto",
        groups: Iterable[str] = (),
        types: Iterable[str] = (),
        filters: Iterable[str] = (),
        items: Item = Item.MAJOR | Item.MINOR,
        targets: Iterable[str] = (),
        log_format: str = "text",
        core_directory: str | Path = ".",
        allow_write: bool = False,
        exact: bool = False,
        pid_namespace: bool = False,
        ring_size: int | None = None,
        overhead: float | None = None,
        verify_opcodes: bool = True,
        verify_build_id: bool = True,
        own_symbols: bool = False,
    ) -> Insertion:
        """
        Insert a compiled program (``CompiledProgram.to_bytes``), by default into all processes.

        * ``name`` is its name if it differs from the module's (``--as``). ``merges`` and ``replaces`` select what
          happens to an existing program with that name.
        * ``groups`` and ``types`` select definitions. Handlers are executed for the hits that match all ``filters``,
          which are conditions of ``dprobes run --filter``.
        * ``items`` has the header items of its records. ``targets`` has log targets for them, in addition to the
          manager's trace file.
        * ``verify_opcodes`` and ``verify_build_id`` compare the module with the one for which the program was built.
          ``own_symbols`` allows modules for which the program was not built.

        Other arguments are as for ``attach``.
        """
        where = Scope() if scope is None else scope
        if where.command:
            raise ManagerError(
                "the probe manager starts no commands",
                hint="'dprobes insert -c COMMAND' and 'dprobes.launch' do",
            )
        arguments = InsertArguments(
            ppdf,
            name,
            merge=merges,
            replace=replaces,
            scope=ScopeArguments(where.pid, where.cgroup, where.uid, where.follow, where.program),
            engine=engine,
            groups=tuple(groups),
            types=tuple(types),
            filters=tuple(filters),
            items=int(items),
            targets=tuple(targets),
            format=log_format,
            core_directory=os.path.abspath(core_directory),  # noqa: PTH100 - text
            directory=str(Path.cwd()),
            allow_write=allow_write,
            exact=exact,
            pid_namespace=pid_namespace,
            ring_size=ring_size,
            overhead=None if overhead is None else f"{overhead:g}%" if overhead else "off",
            verify_opcodes=verify_opcodes,
            verify_build_id=verify_build_id,
            own_symbols=own_symbols,
        )
        return decode(Insertion, self._ask("insert", arguments))

    def status(self) -> ManagerStatus:
        """Return the status of the manager: version, process id, start time, trace file, counts."""
        return decode(ManagerStatus, self.ask("status"))

    def programs(self, name: str | None = None, *, extended: bool = False) -> list[ManagedProgram]:
        """
        Return the inserted programs, or those called ``name``, with their probepoints and counts.

        With ``extended`` the results include the compiled program.
        """
        return list(decode(InsertedPrograms, self._ask("query", QueryArguments(name, extended))).programs)

    def remove(self, name: str | None = None) -> list[ManagedProgram]:
        """Remove the programs called ``name``, or all, and return their final counts."""
        return list(decode(Removal, self._ask("remove", RemoveArguments(name, name is None))).removed or ())

    def remove_probepoints(self, major: int, minor: int, name: str | None = None) -> int:
        """
        Remove the probepoints with these codes, of the programs called ``name`` or of all programs.

        Return their number.
        """
        arguments = RemoveArguments(name, probe=(major, minor))
        return decode(Removal, self._ask("remove", arguments)).probepoints or 0

    def variables(
        self,
        name: str | None = None,
        *,
        wants_locals: bool = True,
        wants_globals: bool = True,
        index: tuple[int, int] | None = None,
        resets: bool = False,
        clears: Sequence[str] = (),
    ) -> ManagedVariables:
        """
        Return local, per-CPU and global variables.

        ``name`` selects the programs whose local and per-CPU variables are returned. ``index`` is the first and the
        last index (both included), or None for all. With ``resets``, these variables are set to zero. Keyed tables
        whose names match one of the patterns ``clears`` are cleared.
        """
        arguments = GetvarsArguments(name, wants_locals, wants_globals, index, resets, tuple(clears))
        return decode(ManagedVariables, self._ask("getvars", arguments))

    def global_variables(self) -> list[int]:
        """Return the global variables that programs declare, or had declared; each has 64 bits."""
        return list(self.variables(wants_locals=False).globals or ())

    def targets(self) -> list[TargetStatus]:
        """Return the log targets other than the manager's trace file."""
        return _targets(self.ask("targets"))

    def add_target(self, target: str, name: str | None = None, log_format: str = "text") -> list[TargetStatus]:
        """
        Add a log target, for the program called ``name`` or all; the path of a file is absolute.

        Return all targets.
        """
        return _targets(self._ask("add-target", AddTargetArguments(target, name, log_format)))

    def remove_target(self, target: str, name: str | None = None) -> list[TargetStatus]:
        """Remove a log target for the program called ``name``, or all targets of that name; return the last status."""
        return _targets(self._ask("remove-target", RemoveTargetArguments(target, name)))

    def stop(self, *, ends: bool = False) -> Stopped:
        """
        Remove all programs at once, without waiting for other requests. With ``ends``, the manager exits, too.

        Return the number of programs, and the names of those that have not ended yet.
        """
        return decode(Stopped, self._ask("stop", StopArguments(ends)))

    def kill(self, patience: float = 0.0) -> Killed | None:
        """
        End the manager, and thus remove all programs; return the outcome, None if there is no manager.

        A manager that does not answer may be busy, or stopped. It therefore gets SIGTERM first, and SIGKILL if it still
        exists after ``patience`` seconds.
        """
        pid = self._living()
        if pid is None:
            return None
        numbers = (signal.SIGTERM, signal.SIGCONT) if patience else ()
        until = time.monotonic() + patience
        with contextlib.suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
            while time.monotonic() < until:
                if self._living() != pid:
                    return Killed(pid, by_force=False)
                time.sleep(_INTERVAL)
            os.kill(pid, signal.SIGKILL)
        return Killed(pid, by_force=True)

    def _living(self) -> int | None:
        """
        Return the id of the process that holds the lock, or None if no process holds it.

        Lock files in another user's directory are not trusted.
        """
        check_private(self._paths.runtime, RUNTIME)
        return self._locked_by()

    def _locked_by(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            pid = int(self._paths.lock.read_text(encoding="ascii"))
            if pid > 1 and _holds_lock(self._paths):
                return pid
        return None

    # Connecting

    def _connect(self) -> socket.socket | None:
        """Return a connected socket, or None if there is no manager."""
        if os.geteuid() != 0:  # root may manage the manager of another user
            check_private(self._paths.runtime, RUNTIME)
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Unlike a timeout of Python's, this waits for room in the listener's queue.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", math.ceil(self._interval), 0))
        try:
            with socket_address(self._paths.socket) as address:
                self._connect_end(end, address)
            end.settimeout(self._interval)
        except _NOBODY:
            end.close()
            return None
        except ManagerError:
            end.close()
            raise
        except OSError as error:
            end.close()
            raise ManagerError(
                f"the probe manager cannot be reached: '{self._paths.socket}': {reason_of(error)}"
            ) from error
        return end

    def _connect_end(self, end: socket.socket, address: str) -> None:
        """Connect a socket to the manager, and wait while the queue of the listening socket is full."""
        while True:
            try:
                end.connect(address)
            except BlockingIOError:
                self._on_silence()
            else:
                return

    def _start(self) -> socket.socket:
        """Start a manager, or wait for one that another client is starting."""
        private_directory(self._paths.runtime, RUNTIME)
        private_directory(self._paths.state, STATE)
        until = time.monotonic() + _START_PATIENCE
        while time.monotonic() < until:
            launch_manager(self._paths)
            if (end := self._connect()) is not None:
                return end
            time.sleep(_INTERVAL)
        raise ManagerError("another probe manager is starting or ending, and takes too long")


def _targets(answer: dict[str, Any]) -> list[TargetStatus]:
    from dprobes.sinks.sink_thread import TargetStatus

    return [decode(TargetStatus, each) for each in answer["targets"]]


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _holds_lock(paths: ManagerPaths) -> bool:
    import fcntl

    with paths.lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
