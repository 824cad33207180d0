"""
The first process of a guest: it runs the Python sources that the tests send over a serial line.

A request is the size of the source in a line, and the source; the answer the exit status, the size of what was
printed, and that. The sources run in children of this process, which has imported nothing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import termios
import tty
from pathlib import Path
from typing import BinaryIO

_LINE = "/dev/ttyS1"
_MOUNTS = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("bpf", "/sys/fs/bpf"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("securityfs", "/sys/kernel/security"),
    ("tracefs", "/sys/kernel/tracing"),
)


def main() -> None:
    """Prepare the guest and serve requests until the line ends, which ends the guest."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b"devtmpfs", b"/dev", b"devtmpfs", 0, None)
    for kind, where in _MOUNTS:
        Path(where).mkdir(parents=True, exist_ok=True)
        libc.mount(kind.encode(), where.encode(), kind.encode(), 0, None)
    for directory in ("/root", "/tmp"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    os.chdir("/root")
    environment = {
        "PATH": "/bin:/usr/bin:/sbin:/usr/sbin",
        "HOME": "/root",
        "PYTHONPATH": "/packages",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for setting in Path("/agent/environment").read_text().splitlines():
        name, _, value = setting.partition("=")
        environment[name] = value
    line = os.open(_LINE, os.O_RDWR | os.O_NOCTTY)
    tty.setraw(line, termios.TCSANOW)
    with os.fdopen(line, "r+b", buffering=0) as stream:
        stream.write(b"ready\n")
        while size := stream.readline():
            source = b""
            while len(source) < int(size):
                source += stream.read(int(size) - len(source))
            status, output = _run(source, environment)
            _write(stream, b"%d %d\n" % (status, len(output)) + output)


def _run(source: bytes, environment: dict[str, str]) -> tuple[int, bytes]:
    Path("/tmp/request.py").write_bytes(source)
    with Path("/tmp/output").open("wb+") as output:
        process = subprocess.Popen(
            [sys.executable, "/tmp/request.py"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        while True:  # orphans are ours, too
            pid, state = os.wait()
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(state)
                break
        output.seek(0)
        return process.returncode, output.read()


def _write(stream: BinaryIO, data: bytes) -> None:
    while data:
        data = data[stream.write(data) :]
