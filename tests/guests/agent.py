"""
The first process of a guest: it starts processes, and writes and reads files, as the tests request.

Processes are forked from it: those that run Python have the package, and other slow imports, already imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import os
import pickle
import pkgutil
import pwd
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guests.protocol import AGENT_PORT, HEADER, Call, Command, Event, Task, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

_MOUNTS = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
    ("devpts", "/dev/pts"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("securityfs", "/sys/kernel/security"),
    ("tracefs", "/sys/kernel/tracing"),
    ("debugfs", "/sys/kernel/debug"),
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/usr/sbin",
    "HOME": "/root",
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_IMPORTED = (
    *(
        "pytest",
        "dprobes.__main__",
        "dprobes.cli.verbs.run",
        "dprobes.engines.engine_choice",
        "dprobes.engines.command_launcher",
    ),
    *("dprobes.arch", "dprobes.bpf", "dprobes.engines.ebpf", "dprobes.platform.linux", "dprobes.formatters"),
    *("dprobes.preprocessor", "dprobes.record", "dprobes.resolve", "dprobes.rpn", "dprobes.sinks.local"),
    *("dprobes.target.code", "dprobes.target.elf", "dprobes.target.kernel", "iced_x86"),
    *("dprobes.target.readable_names", "dprobes.target.code_names", "dprobes.target.module_symbols"),
)
"""The modules that most tests need; all modules of a package are imported."""

_SEEN = (
    *("/proc/mounts", "/sys/kernel/debug/kprobes/list"),
    *(f"/sys/kernel/tracing/{name}" for name in ("kprobe_events", "uprobe_events", "enabled_functions")),
)
"""The files that show changes that a process makes to the kernel for all processes."""
_WRITTEN = ("/tmp", "/run", "/root")
"""The directories in which tests write files, which ``reset`` removes."""

_CHUNK = 1 << 16
_RESULT = 3
"""The descriptor to which the result of a called function is written."""

# include/uapi/linux/sockios.h and if.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFREQ = struct.Struct("16sH22x")
_IFF_UP = 1
_SYS_INIT_MODULE = 175
_MS_BIND = 4096


def main(modules: Sequence[str]) -> None:
    """Prepare the guest, load ``modules`` (paths of kernel modules), and serve the test; this never returns."""
    _mount()
    for path in modules:
        _load_module(Path(path).read_bytes(), "")
    _set_up_loopback()
    Path("/proc/sys/kernel/kptr_restrict").write_text("0")
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # a tree that has moved it works all the same
            _import_all(name)
    _keep_lists()
    gc.freeze()  # else the first collection of each process copies all of this
    while not Path(AGENT_PORT).exists():
        time.sleep(0.01)
    Agent().serve()()


def _import_all(name: str) -> None:
    module = importlib.import_module(name)
    if name.startswith("dprobes."):
        for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(found.name)


def _keep_lists() -> None:
    """Let dprobes cache the lists of the kernel, which each run would otherwise read."""
    from dprobes.target.kernel.running_kernel import RunningKernel

    os.environ["HOME"] = _ENVIRONMENT["HOME"]
    kernel = RunningKernel()
    assert kernel.symbols.find("_text", "")
    kernel.is_traceable(0)


def _mount() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b"devtmpfs", b"/dev", b"devtmpfs", 0, None)
    tree = Path(__file__).parents[2]
    for kind, where in _MOUNTS:
        Path(where).mkdir(parents=True, exist_ok=True)
        hides_tree = kind == "tmpfs" and tree.is_relative_to(where)
        if hides_tree:
            tree.rename("/tree")
        libc.mount(kind.encode(), where.encode(), kind.encode(), 0, None)
        if hides_tree:
            tree.mkdir(parents=True)
            libc.mount(b"/tree", bytes(tree), None, _MS_BIND, None)
    Path("/tmp").chmod(0o1777)
    Path("/root").mkdir(exist_ok=True)


def _load_module(data: bytes, parameters: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_INIT_MODULE, data, len(data), parameters.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _set_up_loopback() -> None:
    with socket.socket() as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        _, flags = _IFREQ.unpack(request)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


@dataclass
class _Child:
    number: int
    pid: int
    input: int | None


class Agent:
    """A server of the test's requests, which also forwards the output of processes, until the connection ends."""

    def __init__(self) -> None:
        self._line = os.open(AGENT_PORT, os.O_RDWR | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._outputs: dict[int, tuple[int, Event]] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "write": self._write,
            "signal": self._signal,
            "put": self._put,
            "get": _get,
            "load_module": _load_module,
            "set_clock": partial(time.clock_settime_ns, time.CLOCK_REALTIME),
            "reset": self._reset,
        }
        self._files = _files()
        self._footprint = _footprint()
        self._put_paths: set[str] = set()

    def serve(self) -> Callable[[], None]:
        """Serve requests; return in each forked process the function that it has to execute."""
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._line, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        self._send(0, Event.RETURNED, os.uname().release)
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._line:
                    if (body := self._serve_request()) is not None:
                        return body
                elif key.fd == woken:
                    os.read(woken, _CHUNK)
                    self._reap()
                elif key.fd in self._outputs:
                    self._hand_on(key.fd)

    def _serve_request(self) -> Callable[[], None] | None:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        number, operation, arguments = pickle.loads(self._read(size))
        try:
            if operation == "start":
                return self._start(number, *arguments)
            value = self._operations[operation](*arguments)
        except (OSError, KeyError) as error:
            self._send(number, Event.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._send(number, Event.RETURNED, value)
        return None

    def _start(self, number: int, task: Task) -> Callable[[], None] | None:
        """
        Fork a process for ``task``, whose output is sent under the request ``number``.

        In the new process, return the function that it has to execute; in the agent, None.
        """
        if task.input is None:
            input_end, our_input = os.pipe2(os.O_CLOEXEC)
        else:
            input_end, our_input = os.memfd_create("input"), None
            os.write(input_end, task.input)
            os.lseek(input_end, 0, os.SEEK_SET)
        pipes = {event: os.pipe2(os.O_CLOEXEC) for event in (Event.STDOUT, Event.STDERR, Event.RESULT)}
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ends = [input_end, *(end for _, end in pipes.values())]
            # All are above the numbers that they are copied to: the console and the line have these.
            for target, end in enumerate(ends):
                os.dup2(end, target)
            self._selector.close()
            os.closerange(_RESULT + 1, 4096)
            os.setsid()
            return partial(_do, task)
        os.close(input_end)
        for event, (ours, its) in pipes.items():
            os.close(its)
            os.set_blocking(ours, False)
            self._outputs[ours] = number, event
            self._selector.register(ours, selectors.EVENT_READ)
        self._children[pid] = _Child(number, pid, our_input)
        self._send(number, Event.RETURNED, pid)
        return None

    def _write(self, pid: int, data: bytes) -> None:
        """Write to a process's standard input; an empty ``data`` closes it."""
        child = self._children[pid]
        assert child.input is not None
        if data:
            os.write(child.input, data)
        else:
            os.close(child.input)
            child.input = None

    def _put(self, path: str, data: bytes, mode: int | None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        if mode is not None:
            target.chmod(mode)
        self._put_paths.add(path)

    def _reset(self) -> bool:
        """Remove new files; return False if the guest differs from its state after the boot in another way."""
        if _footprint() != self._footprint or not all(path.startswith(_WRITTEN) for path in self._put_paths):
            return False
        for path in sorted(_files() - self._files):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._put_paths.clear()
        return True

    def _signal(self, pid: int, number: int, to_group: bool) -> None:
        if to_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
                return
            # The process has just been forked: it has no group yet, and is alone.
        os.kill(pid, number)

    def _reap(self) -> None:
        """Wait for ended children and orphans, and send the exit status of each process that the test has started."""
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (child := self._children.pop(pid, None)) is None:
                continue
            for descriptor, (number, _) in list(self._outputs.items()):
                if number == child.number:
                    self._hand_on(descriptor)
            if child.input is not None:
                os.close(child.input)
            self._send(child.number, Event.EXITED, os.waitstatus_to_exitcode(state))

    def _hand_on(self, descriptor: int) -> None:
        """
        Send the pending output of a pipe to the test, and close the pipe at its end.

        A process that has inherited the pipe may write to it after the end of the started process.
        """
        number, event = self._outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                break
            self._send(number, event, data)
        del self._outputs[descriptor]
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            part = os.read(self._line, size - len(data))
            if not part:
                # Nobody is there any more.
                os.sync()
                os._exit(0)  # which the kernel panics about, and QEMU ends
            data += part
        return data

    def _send(self, number: int, event: Event, value: object) -> None:
        data = memoryview(pack((number, event, value)))
        while data:
            data = data[os.write(self._line, data) :]


def _footprint() -> dict[str, object]:
    """Return the state that tests must not change: processes, modules, network interfaces, mounts and probes."""
    found: dict[str, object] = {path: Path(path).read_bytes() for path in _SEEN if Path(path).exists()}
    found["processes"] = {path.name for path in Path("/proc").iterdir() if path.name.isdecimal() and _is_program(path)}
    found["modules"] = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    found["interfaces"] = set(Path("/sys/class/net").iterdir())
    return found


def _is_program(process: Path) -> bool:
    """Return whether the process with this directory in /proc executes a file, as no kernel thread does."""
    try:
        return bool((process / "exe").readlink())
    except OSError:
        return False


def _files() -> set[Path]:
    return {path for directory in _WRITTEN for path in Path(directory).rglob("*")}


def _get(path: str) -> bytes:
    return Path(path).read_bytes()


def _do(task: Task) -> None:
    """Execute a task in a new process, whose descriptors are set."""
    os.environ.clear()
    os.environ.update(_ENVIRONMENT | {"PYTHONPATH": ":".join(sys.path[:3])} | task.environment)
    os.chdir(task.directory)
    if task.user:
        entry = pwd.getpwuid(task.user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(task.user)
    if isinstance(task.what, Command):
        os.close(_RESULT)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvp(task.what.argv[0], task.what.argv)
        except OSError as error:
            os.write(2, f"{task.what.argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if isinstance(task.what, Call):
        _call(task.what)
    else:
        os.close(_RESULT)
        sys.argv = ["dprobes", *task.what]
        from dprobes.__main__ import main as run

        run()


def _call(call: Call) -> None:
    """Call a function, and write its result, or its traceback with local variables, to the descriptor for results."""
    try:
        result = True, getattr(_module(call), call.name)(*call.arguments)
    except BaseException as error:  # noqa: BLE001 - the test is told
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        del told.stack[0]  # this function
        result = False, "".join(told.format())
    with open(_RESULT, "wb") as output:
        pickle.dump(result, output)
    sys.exit(0 if result[0] else 1)


def _module(call: Call) -> ModuleType:
    if call.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    return sys.modules[call.module]
