"""
QEMU without hardware support: a machine that boots a kernel, or resumes a snapshot.

The options result from measurements: without ``no_timer_check`` one boot in sixty panics, and booting the uncompressed
kernel saves seconds. All files are unnamed, and QEMU ends with the thread that has started it: a test run that is
killed leaves nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from guests.images import UnavailableError, cache_directory, image
from guests.initramfs import make_initramfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from guests.images import Image

__all__ = ["BOOT_TIMEOUT", "PATIENCE", "Emulator", "GuestError", "Machine", "Snapshot", "turn"]

QEMU = "qemu-system-x86_64"
PATIENCE = int(os.environ.get("DPROBES_TEST_PATIENCE", "1"))
BOOT_TIMEOUT = 150 * PATIENCE
"""The maximum duration of a boot in seconds; on a busy machine it takes much longer than on an idle one."""

_COMMAND_LINE = (
    "console=ttyS0 panic=-1 oops=panic quiet no_timer_check cryptomgr.notests rcupdate.rcu_expedited=1 rdinit=/init"
)
_CPU = "qemu64,+rdrand"  # random numbers: without them Python waits until the kernel has collected some
_SHOWN = 4000  # characters of the console in messages


class GuestError(AssertionError):
    """An operation in a guest has failed, or the guest has ended; the message has its output."""


@dataclass(frozen=True, slots=True)
class Machine:
    """
    The configuration of a guest: kernel series, number of CPUs, KASLR, memory in MiB.

    ``programs`` are the names of programs of this machine that are added to its root file system.
    """

    kernel: str
    cpus: int = 2
    kaslr: bool = False
    memory: int = 768
    programs: tuple[str, ...] = ()

    @property
    def image(self) -> Image:
        return image(self.kernel)

    def __str__(self) -> str:
        return f"Linux {self.kernel}"


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """
    Wait until a guest may run, and hold its lock for the context.

    A guest keeps one CPU busy: there are as many locks as CPUs, for the guests of all test runs.
    """
    count = os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(Path(tempfile.gettempdir(), f"dprobes-guest-{os.getuid()}.{number}.lock").open("w"))
            for number in range(count)
        ]
        while True:
            for file in files:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.05)


class Emulator:
    """
    A running machine; ``line`` is the connection to its agent.

    It boots from a root file system, or resumes a snapshot if there is one.
    """

    def __init__(self, machine: Machine, root: BinaryIO, snapshot: BinaryIO | None = None) -> None:
        if shutil.which(QEMU) is None:
            raise UnavailableError(f"{QEMU} is not installed (package qemu-system-x86)")
        self.machine = machine
        self._console = tempfile.TemporaryFile()  # noqa: SIM115
        self.line, agent = socket.socketpair()
        self._monitor, monitor = socket.socketpair()
        with agent, monitor, contextlib.ExitStack() as stack:
            inherited = [agent.fileno(), monitor.fileno(), self._console.fileno(), root.fileno()]
            command = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
            command += ["nice", QEMU, *_hardware(machine), *_start(machine, root.fileno())]
            command += ["-chardev", f"file,id=console,path=/proc/self/fd/{self._console.fileno()}"]
            command += ["-chardev", f"socket,id=agent,fd={agent.fileno()}"]
            command += ["-chardev", f"socket,id=monitor,fd={monitor.fileno()}", "-mon", "chardev=monitor,mode=control"]
            if snapshot is not None:
                file = stack.enter_context(Path(f"/proc/self/fd/{snapshot.fileno()}").open("rb"))
                inherited.append(file.fileno())
                command += ["-incoming", f"fd:{file.fileno()}"]
            self._process = subprocess.Popen(
                command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        self._answers = self._monitor.makefile("rb")
        self._monitor.settimeout(BOOT_TIMEOUT)
        try:
            self._answers.readline()  # the greeting
            self.command("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    @property
    def console(self) -> str:
        """The end of the kernel's console output."""
        size = os.fstat(self._console.fileno()).st_size
        return os.pread(self._console.fileno(), size, 0).decode(errors="replace")[-_SHOWN:]

    def error(self, what: str) -> GuestError:
        """Return an error whose message ``what`` is followed by the console output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # it ends a moment after the line
        return GuestError(f"{self.machine} {what}; its console:\n{self.console}")

    def command(self, name: str, **arguments: object) -> object:
        """Execute a command of the QEMU Machine Protocol, and return its result."""
        self._tell(name, arguments, [])
        return self._answer()

    def save(self, file: BinaryIO) -> None:
        """
        Write a snapshot to ``file``, and end the machine.

        It must be running: a machine that is saved while stopped stays stopped when it is resumed.
        """
        self.command("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        self._tell("getfd", {"fdname": "snapshot"}, [file.fileno()])
        self._answer()
        self.command("migrate", uri="fd:snapshot")
        while (state := self.command("query-migrate")) and isinstance(state, dict):
            if state["status"] == "completed":
                break
            if state["status"] in ("failed", "cancelled"):
                raise self.error(f"cannot be saved: {state}")
            time.sleep(0.01)
        self.close()

    def close(self) -> None:
        """End QEMU, and wait for its exit."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._monitor.close()
        self.line.close()
        self._console.close()

    def _tell(self, name: str, arguments: dict[str, object], descriptors: list[int]) -> None:
        message = json.dumps({"execute": name, "arguments": arguments}).encode()
        try:
            socket.send_fds(self._monitor, [message], descriptors)
        except OSError:
            raise self.error("has ended") from None

    def _answer(self) -> object:
        while line := self._answers.readline():
            message = json.loads(line)
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise self.error(f"refuses a command: {message['error']['desc']}")
        raise self.error("has ended")


def _hardware(machine: Machine) -> list[str]:
    # With a thread for each processor one could run into half of the code that another one was changing (kprobes,
    # static keys): guests crashed or hung now and then. One thread for all is no slower where guests share processors.
    return [
        *("-accel", "tcg,thread=single", "-cpu", _CPU, "-smp", str(machine.cpus), "-m", str(machine.memory)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", "chardev:console"),
        *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent"),
        *("-device", "vmcoreinfo"),  # for dumps of memory
        *("-netdev", "user,id=network,restrict=on", "-device", "virtio-net-pci,netdev=network,romfile="),
    ]


def _start(machine: Machine, root: int) -> list[str]:
    kernel = machine.image.vmlinuz if machine.kaslr else machine.image.vmlinux
    options = _COMMAND_LINE if machine.kaslr else f"{_COMMAND_LINE} nokaslr"
    return ["-kernel", str(kernel), "-initrd", f"/proc/self/fd/{root}", "-append", options]


class Snapshot:
    """The state of a machine after its boot; it can be resumed several times."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._root: BinaryIO = self._file()
        self._state: BinaryIO | None = None
        make_initramfs(machine.image, machine.programs, self._root)
        self._root.flush()

    @classmethod
    def of_process(cls, machine: Machine, note: str) -> Snapshot | None:
        """
        Return the snapshot that another process has taken; None if that process has ended.

        ``note`` is that snapshot's ``note``.
        """
        found = cls.__new__(cls)
        found.machine = machine
        with contextlib.ExitStack() as stack:
            files = []
            for path, number in json.loads(note):
                try:
                    files.append(stack.enter_context(Path(path).open("rb")))
                except OSError:
                    return None
                if os.fstat(files[-1].fileno()).st_ino != number:
                    return None  # another process has this number now
            stack.pop_all()
        found._root, found._state = files
        return found

    @property
    def note(self) -> str:
        """The paths in /proc and inode numbers of the unnamed files as JSON, with which another process opens them."""
        assert self._state is not None
        descriptors = (self._root.fileno(), self._state.fileno())
        return json.dumps([(f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino) for fd in descriptors])

    def boot(self) -> Emulator:
        return Emulator(self.machine, self._root)

    def take(self, emulator: Emulator) -> None:
        self._state = self._file()
        emulator.save(self._state)

    def restore(self) -> Emulator:
        assert self._state is not None
        return Emulator(self.machine, self._root, self._state)

    def close(self) -> None:
        self._root.close()
        if self._state is not None:
            self._state.close()

    def _file(self) -> BinaryIO:
        return tempfile.TemporaryFile(dir=cache_directory())
