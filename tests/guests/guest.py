"""
A guest as tests see it: another kernel, in which processes run as root.

    def test_the_kernel_counts_forks(guest: Guest) -> None:
        assert guest.run("grep processes /proc/stat").stdout.startswith("processes ")

What a call names is in the guest: paths, process ids, programs. Everything is 10 to 13 times slower in there.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from guests.emulator import BOOT_TIMEOUT, PATIENCE, GuestError, Snapshot, turn
from guests.initramfs import PYTHON
from guests.protocol import HEADER, Call, Command, Event, Task, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from guests.emulator import Emulator, Machine
    from guests.images import Image

__all__ = ["Guest", "GuestError", "Process", "SharedGuest", "boot", "resumed"]

TIMEOUT = 60 * PATIENCE

# Documentation/admin-guide/tainted-kernels.rst: the kernel has issued a warning.
_TAINT_WARN = 1 << 9

_CHUNK = 1 << 20
_SHOWN = 4000  # characters of the kernel's log in messages

_Result = TypeVar("_Result")


def boot(machine: Machine) -> Snapshot:
    """Boot a machine and take a snapshot; raise ``UnavailableError`` if guests are not possible on this machine."""
    snapshot = Snapshot(machine)
    try:
        with turn():
            for last in (False, True):
                with contextlib.closing(snapshot.boot()) as emulator:
                    try:
                        Guest(emulator).await_boot()
                    except GuestError:
                        # An emulated machine on a busy one may be too slow for the kernel's own checks.
                        if last:
                            raise
                        continue
                    snapshot.take(emulator)
                    return snapshot
    except BaseException:
        snapshot.close()
        raise
    raise AssertionError


@contextlib.contextmanager
def resumed(snapshot: Snapshot) -> Iterator[Guest]:
    """Resume a snapshot as a guest for the context, and end the guest at its end."""
    with turn(), contextlib.closing(snapshot.restore()) as emulator:
        guest = Guest(emulator)
        guest.request("set_clock", time.time_ns())
        yield guest


class SharedGuest:
    """
    A guest that several tests use one after the other, as long as each restores its state after the boot.

    QEMU translates the code of the kernel and of Python again in each machine, which takes longer than most tests.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._guest: Guest | None = None

    def runs(self, machine: Machine) -> bool:
        """Return whether the running guest has this configuration."""
        return self._guest is not None and self._guest.machine == machine

    def of(self, machine: Machine, snapshot_of: Callable[[Machine], Snapshot]) -> Guest:
        """
        Return the running guest if it has this configuration; otherwise end it, and resume another one.

        ``snapshot_of`` returns the snapshot to resume.
        """
        if self._guest is None or not self.runs(machine):
            self.close()
            self._guest = self._stack.enter_context(resumed(snapshot_of(machine)))
        return self._guest

    def give_back(self, *, is_sound: bool) -> None:
        """
        Keep the guest for the next test; end it if the last test failed, or has left more than files.

        ``is_sound`` is False after a failed test.
        """
        if self._guest is not None and not (is_sound and self._guest.is_alive and self._guest.request("reset")):
            self.close()

    def close(self) -> None:
        """End the guest, if there is one."""
        self._guest = None
        self._stack.close()


class Process:
    """A process in a guest, with its output so far."""

    def __init__(self, guest: Guest, name: str) -> None:
        self._guest = guest
        self.name = name
        self.pid = 0
        self.status: int | None = None
        """The exit status, or the signal's number below zero, once the process has ended."""
        self.written = {Event.STDOUT: bytearray(), Event.STDERR: bytearray(), Event.RESULT: bytearray()}

    @property
    def stdout(self) -> str:
        """The standard output so far."""
        return self.written[Event.STDOUT].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return self.written[Event.STDERR].decode(errors="replace")

    def write(self, data: bytes | str) -> None:
        """Write to the standard input of a process that was started with ``input=None``."""
        if data:
            self._guest.request("write", self.pid, data.encode() if isinstance(data, str) else data)

    def close_input(self) -> None:
        """Close the process's standard input: it reads an end of file."""
        self._guest.request("write", self.pid, b"")

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send the signal ``number`` to the process, or to its process group; each process has a group of its own."""
        self._guest.request("signal", self.pid, number, to_group)

    def kill(self) -> None:
        """Send SIGKILL to the process group: the process and its children in this group."""
        if self.status is None:
            self.signal(signal.SIGKILL, to_group=True)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait until the process has exited, and return its status; after ``timeout`` seconds kill it and fail."""
        try:
            self._guest.wait_until(lambda: self.status is not None, f"the end of {self.name}", timeout)
        except GuestError as error:
            if self._guest.is_alive:
                self.kill()
            raise GuestError(f"{error}\n{self._said()}") from None
        assert self.status is not None
        return self.status

    def await_output(self, text: str, timeout: float = TIMEOUT) -> str:
        """Wait until ``text`` is in standard output or standard error; return both, concatenated."""

        def there() -> bool:
            return text in self.stdout or text in self.stderr or self.status is not None

        self._guest.wait_until(there, f"'{text}' from {self.name}", timeout)
        if text not in self.stdout and text not in self.stderr:
            raise GuestError(f"{self.name} has ended without '{text}'\n{self._said()}")
        return self.stdout + self.stderr

    def completed(self, timeout: float = TIMEOUT, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """
        Wait until the process has exited, and return status and output.

        Raise ``GuestError`` with the output if the status is not 0, unless ``check`` is False.
        """
        status = self.wait(timeout)
        if check and status != 0:
            raise GuestError(f"{self._guest}: {self.name} ended with {status}\n{self._said()}")
        return subprocess.CompletedProcess([self.name], status, self.stdout, self.stderr)

    def _said(self) -> str:
        return f"{self.stdout}{self.stderr}"


class Guest:
    """A running guest; created by ``resumed``."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._line = emulator.line
        self._line.setblocking(False)
        self._incoming = bytearray()
        self._answers: dict[int, tuple[Event, Any]] = {}
        self._processes: dict[int, Process] = {}
        self._count = 0
        self.is_alive = True

    def __str__(self) -> str:
        return str(self.machine)

    @property
    def machine(self) -> Machine:
        return self._emulator.machine

    @property
    def image(self) -> Image:
        """The package of the guest's kernel, on this machine."""
        return self.machine.image

    @property
    def console(self) -> str:
        """The kernel's console output since the guest was resumed: at least its errors."""
        return self._emulator.console

    @property
    def kernel_log(self) -> str:
        """The output of dmesg(1)."""
        return self.run("dmesg").stdout

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = TIMEOUT,
        check: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """
        Run a program, or a shell command if it is a string, and wait for its exit; ``options`` are those of ``start``.

        Raise ``GuestError`` if its status is not 0, unless ``check`` is False.
        """
        return self.start(command, **{"input": b"", **options}).completed(timeout, check=check)

    def start(
        self,
        command: str | Sequence[str],
        *,
        input: bytes | str | None = None,  # noqa: A002 - as in subprocess.run
        environment: dict[str, str] | None = None,
        directory: str = "/root",
        user: int = 0,
    ) -> Process:
        """
        Start a program, or a shell command if it is a string.

        ``input`` is its standard input, None a pipe. ``environment`` has further variables; ``user`` is its user id.
        """
        argv = ("sh", "-c", command) if isinstance(command, str) else tuple(command)
        name = command if isinstance(command, str) else " ".join(argv)
        data = input.encode() if isinstance(input, str) else input
        return self._start(name, Task(Command(argv), data, environment or {}, directory, user))

    def python(self, source: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a Python source in a new interpreter; ``options`` are those of ``run``."""
        return self.run([str(PYTHON), "-"], input=source, **options)

    def dprobes(
        self, *arguments: str, timeout: float = TIMEOUT, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -m dprobes`` of the tree under test; ``options`` are those of ``start_dprobes``."""
        return self.start_dprobes(*arguments, **{"input": b"", **options}).completed(timeout, check=check)

    def start_dprobes(self, *arguments: str, **options: Any) -> Process:
        """
        Start ``python -m dprobes``; ``options`` are those of ``start``.

        The process is forked from one that has imported the package, which saves seconds.
        """
        task = Task(arguments, options.pop("input", None), options.pop("environment", None) or {}, **options)
        return self._start(" ".join(("dprobes", *arguments)), task)

    def call(self, function: Callable[..., _Result], *arguments: Any, timeout: float = TIMEOUT) -> _Result:
        """
        Call a function at the top level of a module in a new process of the guest, and return its result.

        The guest imports this module, which should need few others. Arguments and result are pickled. An exception
        becomes a ``GuestError`` with traceback and local variables.
        """
        assert "." not in function.__qualname__, "only functions of a module's top level can be found in the guest"
        call = Call(function.__code__.co_filename, function.__module__, function.__name__, arguments)
        process = self._start(f"{function.__name__}()", Task(call))
        process.wait(timeout)
        if not process.written[Event.RESULT]:
            raise GuestError(f"{process.name} ended with {process.status}\n{process.stdout}{process.stderr}")
        succeeded, value = pickle.loads(process.written[Event.RESULT])
        if not succeeded:
            raise GuestError(f"{self}: {value}\n{process.stdout}{process.stderr}")
        return cast("_Result", value)

    def put(self, path: str, content: bytes | str | Path, mode: int | None = None) -> None:
        """
        Write a file of the guest, and create its directories.

        If ``content`` is a path of this machine, the file is copied with its mode.
        """
        if isinstance(content, Path):
            mode = content.stat().st_mode & 0o777 if mode is None else mode
            content = content.read_bytes()
        self.request("put", path, content.encode() if isinstance(content, str) else content, mode)

    def get(self, path: str) -> bytes:
        """Return the contents of a file of the guest."""
        return cast("bytes", self.request("get", path))

    def put_module(self, name: str) -> str:
        """Copy a kernel module and those that it needs to their paths in the guest; return the module's path."""
        modules = self.image.modules(name)
        for module in modules:
            self.put(module.path, module.data)
        return modules[-1].path

    def load_module(self, name: str, parameters: str = "") -> None:
        """Load a kernel module with ``parameters``, after the modules that it needs; their files are copied first."""
        self.put_module(name)
        loaded = {line.split()[0] for line in self.get("/proc/modules").decode().splitlines()}
        for module in self.image.modules(name):
            if module.name not in loaded:
                self.request("load_module", module.data, parameters if module.name == name else "")

    def put_kernel(self) -> str:
        """Copy the kernel's image and configuration to /boot, as in a distribution; return the image's path."""
        release = self.image.release
        for name in (f"vmlinuz-{release}", f"config-{release}"):
            self.put(f"/boot/{name}", self.image.directory / "boot" / name)
        return f"/boot/vmlinuz-{release}"

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop the machine's CPUs for the context, as a host does that suspends a guest."""
        self._emulator.command("stop")
        yield
        self._emulator.command("cont")

    def interrupt(self) -> None:
        """Inject a non-maskable interrupt, for which no device is the reason."""
        self._emulator.command("inject-nmi")

    def press_power_button(self) -> None:
        """Press the power button, which wakes a sleeping machine if the module ``button`` is loaded."""
        self._emulator.command("system_powerdown")

    def open_stub(self, path: Path) -> None:
        """Let QEMU's stub listen at the socket ``path``; the machine runs until a client connects."""
        line = f"gdbserver unix:{path},server=on,wait=off"
        self._emulator.command("human-monitor-command", **{"command-line": line})

    def monitor(self, line: str) -> str:
        """Execute a command of QEMU's human monitor, and return its output."""
        return str(self._emulator.command("human-monitor-command", **{"command-line": line}))

    def check_health(self) -> None:
        """Raise ``GuestError`` if the kernel has warned since it booted."""
        if int(self.get("/proc/sys/kernel/tainted")) & _TAINT_WARN:
            raise GuestError(f"{self} has warned:\n{self.kernel_log[-_SHOWN:]}")

    def await_boot(self) -> None:
        """Wait until the agent of the booting guest has sent its first message."""
        self._answer(0, BOOT_TIMEOUT)

    def request(self, operation: str, *arguments: Any) -> Any:
        """Send a request to the agent, wait for its reply, and return the result; raise ``GuestError`` if it failed."""
        number = self._send(operation, *arguments)
        return self._answer(number)

    def wait_until(self, is_true: Callable[[], bool], what: str, timeout: float) -> None:
        """
        Handle messages of the agent until ``is_true`` returns True.

        Raise ``GuestError`` with ``what`` after ``timeout`` seconds, or if the guest ends.
        """
        deadline = time.monotonic() + timeout
        while not is_true():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._emulator.error(f"waits in vain for {what}")
            self._exchange(b"", left)

    def _start(self, name: str, task: Task) -> Process:
        process = Process(self, name)
        number = self._send("start", task, process=process)
        process.pid = self._answer(number)
        return process

    def _send(self, operation: str, *arguments: Any, process: Process | None = None) -> int:
        self._count += 1
        if process is not None:
            self._processes[self._count] = process
        data = memoryview(pack((self._count, operation, arguments)))
        deadline = time.monotonic() + TIMEOUT
        while data:
            # What the agent sends meanwhile has to be taken, or it would not take this.
            data = data[self._exchange(data, max(0, deadline - time.monotonic())) :]
            if time.monotonic() > deadline:
                raise self._emulator.error(f"does not take '{operation}'")
        return self._count

    def _answer(self, number: int, timeout: float = TIMEOUT) -> Any:
        self.wait_until(lambda: number in self._answers, "an answer", timeout)
        event, value = self._answers.pop(number)
        if event is Event.FAILED:
            raise GuestError(f"{self}: {value}")
        return value

    def _exchange(self, data: bytes | memoryview, timeout: float) -> int:
        """
        Wait until the connection is ready, then send a part of ``data``, and handle received messages.

        Return the number of sent bytes. ``timeout`` is in seconds.
        """
        readable, writable, _ = select.select([self._line], [self._line] if data else [], [], timeout)
        received, sent = b"", 0
        with contextlib.suppress(ConnectionError):
            received = self._line.recv(_CHUNK) if readable else b""
            sent = self._line.send(data) if writable else 0
        if readable and not received:
            self.is_alive = False
            raise self._emulator.error("has ended")
        self._incoming += received
        self._dispatch()
        return sent

    def _dispatch(self) -> None:
        while len(self._incoming) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._incoming)
            if len(self._incoming) < HEADER.size + size:
                break
            number, event, value = pickle.loads(self._incoming[HEADER.size : HEADER.size + size])
            del self._incoming[: HEADER.size + size]
            if event in (Event.RETURNED, Event.FAILED):
                self._answers[number] = event, value
            elif event is Event.EXITED:
                self._processes[number].status = value
            else:
                self._processes[number].written[event] += value
