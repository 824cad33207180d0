"""
Starts of ``python -m dprobes`` that fork a process which has imported the package, instead of a new interpreter.

Imports are most of the CPU time of a short run. Guests start ``dprobes`` in the same way. ``ForkedPopen`` takes the
place of ``subprocess.Popen``; whatever it cannot do as an exec does, it leaves to an exec. The process that forks, the
*server*, is this file as a program. It is the parent of what it forks, and reports how each ended through a pipe.

A forked ``dprobes`` starts its own helpers, such as the tracer, with ``HelperPopen``: they are forked from it.
``DPROBES_TEST_START=exec`` starts interpreters always.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ForkedPopen", "HelperPopen", "Server", "run_to_exit"]

_PREFIX = (sys.executable, "-m", "dprobes")
_HELPER_PREFIX = (sys.executable, "-P", "-m")
_LEFT_OUT = ("dprobes.__main__", "dprobes.cli.languageserver", "dprobes.manager.__main__")
"""Modules that the server does not import: programs, and modules that need large packages of others."""

_FLUSH_FAILED = 120
"""Exit status of an interpreter that could not write the rest of its output."""

_HEADER = struct.Struct("=I")
_PID = struct.Struct("=i")
_STATUS = struct.Struct("=i")

_INTERPRETERS = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
"""Prefixes of the variables that the interpreter or the dynamic linker reads at its start."""

_REFUSED = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "restore_signals": True,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
"""Parameters of ``subprocess.Popen`` with the only values that the server supports."""

# include/uapi/linux/prctl.h
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_MM_MAP = struct.Struct("=11QQIi")
"""struct prctl_mm_map: code, data, brk, stack, arguments, environment; auxv and its size; a descriptor of the file."""
_MM_FIELDS = (26, 27, 45, 46, 47, None, 28, 48, 49, 50, 51)
"""Numbers of the fields of proc_pid_stat(5) with the first members of ``_MM_MAP``; the end of brk is not among them."""
_ARG_START, _ARG_END = 7, 8


def _read(descriptor: int, size: int) -> bytes:
    """Read ``size`` bytes from a descriptor; return fewer at the end of the file."""
    data = b""
    while len(data) < size and (part := os.read(descriptor, size - len(data))):
        data += part
    return data


class _CommandLine:
    """The memory with this process's /proc/PID/cmdline: the kernel reads it there as long as the process exists."""

    def __init__(self, words: Sequence[str]) -> None:
        """Show ``words``; raise OSError if the kernel cannot be told where the command line is."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sbrk.restype = ctypes.c_void_p
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        self._memory = ctypes.create_string_buffer(text, len(text))
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third field on
        bounds = [libc.sbrk(0) if field is None else int(stat[field - 3]) for field in _MM_FIELDS]
        bounds[_ARG_START] = ctypes.addressof(self._memory)
        bounds[_ARG_END] = bounds[_ARG_START] + len(text)
        map_ = _MM_MAP.pack(*bounds, 0, 0, -1)
        if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, map_, ctypes.c_ulong(len(map_)), 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM)")


def _inherited() -> tuple[object, ...]:
    """Return the attributes that a new process inherits besides its environment, directory and descriptors."""
    ignored = frozenset(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return ignored, frozenset(mask), frozenset(os.sched_getaffinity(0)), os.getresuid(), os.getgroups(), os.getpgid(0)


class Server:
    """
    A running fork server; it ends with the process that has started it.

    It is not a child of that process, because tests count children.
    """

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._inherited = _inherited()
        self._environment = dict(os.environ)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            subprocess.run(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, check=True)

    def close(self) -> None:
        """Close the connection, and wait until the server has exited."""
        with self._line:
            self._line.shutdown(socket.SHUT_WR)
            self._line.recv(1)

    def can_start(self, args: object, environment: Mapping[str, str] | None, directory: str | None) -> bool:
        """Return whether a process that the server forks is equivalent to a new interpreter with these arguments."""
        if not isinstance(args, (list, tuple)) or tuple(args[: len(_PREFIX)]) != _PREFIX:
            return False
        if not all(isinstance(word, str) or hasattr(word, "__fspath__") for word in args):
            return False
        environment = os.environ if environment is None else environment
        return (
            all(isinstance(text, str) for item in environment.items() for text in item)
            and self._read_at_start(environment) == self._read_at_start(self._environment)
            and _inherited() == self._inherited
            and (directory is None or Path(directory).is_dir())
        )

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None,
        directory: str | None,
        descriptors: Sequence[int],
        *,
        has_session: bool,
    ) -> tuple[int, int]:
        """
        Fork a process that executes ``words``; return its process id and a descriptor with its wait status at its end.

        ``descriptors`` become its standard files; ``has_session`` makes it the leader of a new session.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        environment = dict(os.environ if environment is None else environment)
        body = pickle.dumps((list(words), environment, directory or str(Path.cwd()), has_session))
        try:
            with self._lock:
                socket.send_fds(self._line, [_HEADER.pack(len(body))], [*descriptors, theirs])
                self._line.sendall(body)
                (pid,) = _PID.unpack(_read(self._line.fileno(), _PID.size))
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return pid, ours

    @staticmethod
    def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if name.startswith(_INTERPRETERS)}


class ForkedPopen(subprocess.Popen[Any]):
    """``subprocess.Popen`` that uses a fork server where that is equivalent; without ``server``, it is unchanged."""

    server: Server | None = None
    _status_end: int | None = None

    def _execute_child(self, *arguments: Any) -> None:
        values = _PARAMETERS.bind(self, *arguments).arguments
        environment = values["env"]
        directory = None if values["cwd"] is None else os.fsdecode(values["cwd"])
        server = ForkedPopen.server
        if (
            server is None
            or any(values[name] != usual for name, usual in _REFUSED.items())
            or not server.can_start(values["args"], environment, directory)
        ):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = values["p2cread"], values["c2pwrite"], values["errwrite"]
        try:
            self.pid, self._status_end = server.start(
                [os.fspath(word) for word in values["args"][len(_PREFIX) :]],
                environment,
                directory,
                [number if end == -1 else end for number, end in enumerate(ends)],
                has_session=values["start_new_session"],
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*(values[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _wait_for(self, pid: int, flags: int) -> tuple[int, int]:
        """Return the process id and the status as ``os.waitpid`` does, for a process of the server or a child."""
        if self._status_end is None:
            return os.waitpid(pid, flags)
        os.set_blocking(self._status_end, not flags & os.WNOHANG)
        try:
            data = _read(self._status_end, _STATUS.size)
        except BlockingIOError:
            return 0, 0
        os.close(self._status_end)
        (status,) = _STATUS.unpack(data)
        return pid, status

    def _internal_poll(self, *arguments: Any, **keywords: Any) -> int | None:
        if self._status_end is None:
            status: int | None = super()._internal_poll(*arguments, **keywords)  # type: ignore[misc]
            return status
        # The parameters by which the base class finds waitpid differ between versions of Python.
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, ended = self._wait_for(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(ended)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._status_end is not None:
            return self._wait_for(self.pid, flags)
        found: tuple[int, int] = super()._try_wait(flags)  # type: ignore[misc]
        return found


_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class _Forks:
    """The processes that the server has forked, and the descriptors to which it writes their status."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._status_ends: dict[int, int] = {}
        self._zombies: dict[int, int] = {}  # process IDs by the ends where they have been reported
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._shown: _CommandLine | None = None

    def serve(self) -> list[str] | None:
        """
        Fork a process for each request; return its command line in that process.

        Return None in the server at the end of the connection.
        """
        import select

        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            for end in self._zombies.keys() & set(ready):
                poll.unregister(end)
                self._reap(end)
            if self._woken in ready:
                os.read(self._woken, 4096)
                for end in self._report():
                    poll.register(end, 0)  # the reader's close is an error, which is always polled for
            if self._line.fileno() in ready:
                header, descriptors, _, _ = socket.recv_fds(self._line, _HEADER.size, 4)
                if not header:
                    return None
                (size,) = _HEADER.unpack(header)
                words, environment, directory, has_session = pickle.loads(_read(self._line.fileno(), size))
                *files, status_end = descriptors
                if (pid := os.fork()) == 0:
                    try:
                        self._become(files, environment, directory, has_session=has_session)
                        if HelperPopen.is_possible:
                            self._shown = _CommandLine([*_PREFIX, *words])
                    finally:
                        self._line.sendall(_PID.pack(os.getpid()))  # as an exec: the process is complete from here on
                        self._line.close()
                    return list(words)
                for each in files:
                    os.close(each)
                self._status_ends[pid] = status_end

    def _report(self) -> list[int]:
        """
        Write the status of each process that has ended, and return the descriptors.

        The processes remain zombies until the status is read, as a child would until it is waited for.
        """
        reported = []
        for pid in [*self._status_ends]:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                end = self._status_ends.pop(pid)
                flag = 0x80 if found.si_code == os.CLD_DUMPED else 0  # as wait(2) encodes a core dump
                status = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status | flag
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                    os.write(end, _STATUS.pack(status))
                self._zombies[end] = pid
                reported.append(end)
        return reported

    def _reap(self, end: int) -> None:
        os.close(end)
        os.waitpid(self._zombies.pop(end), 0)

    def _become(
        self, files: Sequence[int], environment: Mapping[str, str], directory: str, *, has_session: bool
    ) -> None:
        """Set up a forked process as a newly executed interpreter: files, environment, directory and session."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)  # all files are above 2
        line = self._line.fileno()
        os.closerange(3, line)
        os.closerange(line + 1, os.sysconf("SC_OPEN_MAX"))
        if has_session:
            os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[0] = directory
        _open_standard_files()


def _open_standard_files() -> None:
    """Set ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` to new files for the descriptors 0, 1 and 2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        own = getattr(sys, f"__{name}__")
        file = open(number, own.mode, encoding=own.encoding, errors=own.errors, closefd=False)  # noqa: SIM115
        if number:
            is_unbuffered = "PYTHONUNBUFFERED" in os.environ
            file.reconfigure(line_buffering=number == 2 or os.isatty(number), write_through=is_unbuffered)
        setattr(sys, name, file)


class HelperPopen(subprocess.Popen[Any]):
    """
    ``subprocess.Popen`` of a forked ``dprobes``, which forks the processes that execute a module of the package.

    A process with several threads executes an interpreter, as do all if ``is_possible`` is False.
    """

    is_possible = False

    def _execute_child(self, *arguments: Any) -> None:
        values = _PARAMETERS.bind(self, *arguments).arguments
        words, ends = values["args"], [values[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        if (
            not HelperPopen.is_possible
            or tuple(words[: len(_HELPER_PREFIX)]) != _HELPER_PREFIX
            or any(values[name] != usual for name, usual in _REFUSED.items() if name != "pass_fds")
            or any(0 <= end <= 2 for end in ends)
            or len(list(Path("/proc/self/task").iterdir())) > 1
        ):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ready, is_ready = os.pipe2(os.O_CLOEXEC)
        try:
            if (pid := os.fork()) == 0:
                run_to_exit(lambda: _run_helper(values, ends, is_ready))
        finally:
            os.close(is_ready)
        self.pid = pid
        self._child_created = True
        with os.fdopen(ready, "rb", 0) as pipe:
            pipe.read(1)  # as after an exec, the process has only its own descriptors from here on
        self._close_pipe_fds(*(values[name] for name in _PIPES))  # type: ignore[attr-defined]


def _run_helper(values: Mapping[str, Any], ends: Sequence[int], is_ready: int) -> NoReturn:
    """Execute, in a forked process, the module that ``values`` name as a new interpreter would."""
    _former = sys.stdin, sys.stdout, sys.stderr  # they are not freed: that would close descriptors with their numbers
    words, passed = list(values["args"]), values["pass_fds"]
    if values["start_new_session"]:
        os.setsid()
    for number, end in enumerate(ends):
        if end != -1:
            os.dup2(end, number)
    bounds = sorted({2, *passed, is_ready})
    for below, above in zip(bounds, [*bounds[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(below + 1, above)
    for descriptor in passed:
        os.set_inheritable(descriptor, True)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (environment := values["env"]) is not None:
        os.environ.clear()
        os.environ.update(environment)
    if (directory := values["cwd"]) is not None:
        os.chdir(directory)
    del sys.path[0]  # the directory of "python -m" without -P
    sys.argv[:] = words[len(_HELPER_PREFIX) :]
    sys.orig_argv[:] = words
    _open_standard_files()
    atexit._clear()
    gc.freeze()  # objects of the forking process are not freed, which could close descriptors that have its numbers
    gc.enable()
    _shown = _CommandLine(words)
    Path("/proc/self/comm").write_text(Path(words[0]).name)
    os.close(is_ready)
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    run_to_exit(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


def run_to_exit(program: Callable[[], object]) -> NoReturn:
    """
    Call ``program`` in a forked process, and exit as an interpreter does after it, but without freeing its objects.

    Freeing them copies every page of memory that the process shares with the process that has forked it, which takes
    longer than most runs.
    """
    status: object = None
    try:
        program()
    except SystemExit as request:
        status = request.code
    except BaseException as error:  # noqa: BLE001 - reported, as by the interpreter
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        status = 1
    try:
        if not (status is None or isinstance(status, int)):
            print(status, file=sys.stderr)
            status = 1
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = _FLUSH_FAILED
    finally:
        os._exit((status or 0) & 0xFF if isinstance(status, int | None) else 1)


def _import_package() -> None:
    """Import all modules of the package that a run may need, before forking."""
    import dprobes

    for module in pkgutil.walk_packages(dprobes.__path__, "dprobes."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)


def _main() -> None:
    if os.fork():
        os._exit(0)
    line = socket.socket(fileno=int(sys.argv[1]))
    _import_package()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError):
        _shown = _CommandLine(sys.orig_argv)
        HelperPopen.is_possible = True
    forks = _Forks(line)
    words = forks.serve()
    if words is not None:
        import dprobes.__main__ as command

        assert command.__file__ is not None
        sys.argv[:] = [command.__file__, *words]
        subprocess.Popen = HelperPopen  # type: ignore[misc]
        run_to_exit(command.main)


if __name__ == "__main__":
    _main()
