"""
A guest: another kernel in QEMU, without hardware support, in which Python sources run as root.

    with Guest("6.1") as guest:
        print(guest.run("import os; print(os.uname().release)"))

What has to be so and not otherwise was measured: without ``no_timer_check`` one boot in sixty panics, and booting the
uncompressed kernel saves seconds. Python is 10 to 13 times slower in there.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kernel.images import UnavailableError, vmlinux
from kernel.initramfs import REPOSITORY, archive, base_archive, source_files

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Guest", "GuestError", "UnavailableError"]

QEMU = "qemu-system-x86_64"

_COMMAND_LINE = (
    "console=ttyS0 panic=-1 quiet nokaslr no_timer_check cryptomgr.notests rcupdate.rcu_expedited=1 rdinit=/init"
)
_CPU = "qemu64,+rdrand"  # random numbers: without them Python waits until the kernel has collected some
_BOOT_TIMEOUT = 150  # on a machine that is busy with other things; else some seconds
_SHOWN = 3000  # characters of the console in messages
_BOOTS = 2
"""How many boots are tried: an emulated machine on a busy one may be too slow for the kernel's own checks."""


class GuestError(AssertionError):
    """Report that a source failed in the guest, or that the guest ended; the text is what was printed."""


class Guest:
    """
    Boot a kernel; use it as a context manager.

    ``files`` are added by their absolute paths in the guest; they are executable if they are bytes. Raises
    ``UnavailableError`` where there can be no guest.
    """

    def __init__(self, kernel: str, files: Mapping[str, Path | bytes] | None = None, *, memory: int = 768) -> None:
        if shutil.which(QEMU) is None:
            raise UnavailableError(f"{QEMU} is not installed (package qemu-system-x86)")
        self.kernel = kernel
        self._vmlinux = vmlinux(kernel)
        self._files = dict(files or {})
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="dprobes-guest-")
        try:
            initramfs = self._make_initramfs(Path(self._directory.name))
            for _ in range(_BOOTS):
                if self._boot(initramfs):
                    return self
                self._stop()
        except BaseException:
            self.__exit__()
            raise
        console = self.console
        self.__exit__()
        raise GuestError(f"Linux {self.kernel} did not boot; its console:\n{console[-_SHOWN:]}")

    def __exit__(self, *exception: object) -> None:
        self._stop()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    @property
    def console(self) -> str:
        """Return what the kernel has printed so far."""
        assert self._directory is not None
        return Path(self._directory.name, "console").read_text(errors="replace")

    def run(self, source: str, timeout: float = 400) -> str:
        """Run a Python source in a new process; return what it printed, ``GuestError`` if it failed."""
        status, output = self.attempt(source, timeout)
        if status != 0:
            raise GuestError(f"Linux {self.kernel}: exit status {status}\n{output}")
        return output

    def attempt(self, source: str, timeout: float = 400) -> tuple[int, str]:
        """Run a Python source in a new process; return its exit status and what it printed."""
        assert self._line is not None
        data = source.encode()
        self._line.settimeout(timeout)
        self._line.sendall(b"%d\n" % len(data) + data)
        status, size = (int(number) for number in self._read_line().split())
        output = b""
        while len(output) < size:
            output += self._receive(size - len(output))
        return status, output.decode(errors="replace")

    def _make_initramfs(self, directory: Path) -> Path:
        environment = f"PYTHONPATH={REPOSITORY}/src:{REPOSITORY}/tests:/packages\nREPOSITORY={REPOSITORY}\n"
        path = directory / "initramfs"
        shutil.copyfile(base_archive(), path)
        with path.open("ab") as file:
            file.write(archive({**source_files(), "/agent/environment": environment.encode(), **self._files}))
        return path

    def _boot(self, initramfs: Path) -> bool:
        assert self._directory is not None
        ours, its = socket.socketpair()
        with its:
            its.set_inheritable(True)
            self._line = ours
            command = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
            command += ["nice", QEMU, "-accel", "tcg,thread=multi", "-cpu", _CPU, "-smp", "2", "-m", str(self._memory)]
            command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
            command += ["-kernel", str(self._vmlinux), "-initrd", str(initramfs), "-append", _COMMAND_LINE]
            command += ["-serial", f"file:{self._directory.name}/console"]
            command += ["-chardev", f"socket,id=agent,fd={its.fileno()}", "-serial", "chardev:agent"]
            self._process = subprocess.Popen(
                command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        ours.settimeout(_BOOT_TIMEOUT)
        try:
            return self._read_line() == b"ready"
        except GuestError:
            return False

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += self._receive(1)
        return line.strip()

    def _receive(self, size: int) -> bytes:
        assert self._line is not None
        try:
            data = self._line.recv(size)
        except TimeoutError:
            raise GuestError(f"Linux {self.kernel} does not answer; its console:\n{self.console[-_SHOWN:]}") from None
        except ConnectionError:
            data = b""
        if not data:
            raise GuestError(f"Linux {self.kernel} has ended; its console:\n{self.console[-_SHOWN:]}")
        return data

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._line is not None:
            self._line.close()
            self._line = None
