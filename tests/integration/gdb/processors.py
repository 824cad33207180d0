"""The processors that programs of the tests are compiled for and QEMU executes: six, with both byte orders."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

from dprobes.engines.gdb.remote_protocol import packet
from integration.support import TIMEOUT

if TYPE_CHECKING:
    from pathlib import Path

    from integration.support import Builder

__all__ = ["PROCESSORS", "EmulatedProgram", "Processor", "without_steps"]


class Processor(NamedTuple):
    """A processor: its name, Debian's name of its programs, and how its words are."""

    name: str
    triplet: str
    word_size: int
    order: Literal["little", "big"]

    @property
    def emulator(self) -> str:
        return f"qemu-{self.name}"

    @property
    def root(self) -> str:
        """Where its libraries are."""
        return f"/usr/{self.triplet}"

    def build(self, build: Builder, source: str, *flags: str) -> Path:
        """Compile a program of the tests; skip the test if there is no compiler."""
        return build(source, *flags, compiler=f"{self.triplet}-gcc")


PROCESSORS = {
    each.name: each
    for each in (
        Processor("aarch64", "aarch64-linux-gnu", 8, "little"),
        Processor("riscv64", "riscv64-linux-gnu", 8, "little"),
        Processor("s390x", "s390x-linux-gnu", 8, "big"),
        Processor("ppc64", "powerpc64-linux-gnu", 8, "big"),
        Processor("ppc", "powerpc-linux-gnu", 4, "big"),
        Processor("i386", "i686-linux-gnu", 4, "little"),
    )
}


class EmulatedProgram:
    """A program that QEMU holds at its beginning, with a stub at ``endpoint``."""

    def __init__(self, processor: Processor, directory: Path, *command: str) -> None:
        if shutil.which(processor.emulator) is None:
            pytest.skip(f"{processor.emulator} is not installed")
        self.endpoint = str(directory / "stub.socket")
        self._log = directory / "program.log"
        argv = [processor.emulator, "-L", processor.root, "-g", self.endpoint, *command]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        """What was printed so far."""
        return self._log.read_text()

    def output(self) -> str:
        """Return what the program printed, after its end."""
        self.process.wait(TIMEOUT)
        return self.log

    def close(self) -> None:
        """End it if it has not ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(TIMEOUT)


def without_steps(endpoint: str, directory: Path) -> str:
    """Return the endpoint of the same stub, which says that it makes no single steps, for one connection."""
    path = str(directory / "stepless.socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    threading.Thread(target=_forward, args=(listener, endpoint), daemon=True).start()
    return path


def _forward(listener: socket.socket, endpoint: str) -> None:
    ours, _ = listener.accept()
    theirs = socket.socket(socket.AF_UNIX)
    theirs.connect(endpoint)
    with listener, ours, theirs:
        while True:
            for readable in select.select([ours, theirs], [], [])[0]:
                data = os.read(readable.fileno(), 1 << 16)
                if not data:
                    return
                assert b"vCont;s" not in data
                data = data.replace(packet(b"vCont;c;C;s;S"), packet(b"vCont;c;C"))
                (theirs if readable is ours else ours).sendall(data)
