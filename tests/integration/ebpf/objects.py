"""What a run holds in the kernel, seen from outside: the BPF objects behind a process's descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from integration.support import await_true, status_field

if TYPE_CHECKING:
    import subprocess

_SYS_BPF = 321
_GET_FD_BY_ID = {"prog": 13, "map": 14, "link": 30}  # enum bpf_cmd
_ID = re.compile(r"^(prog|map|link)_id:\s*(\d+)$", re.MULTILINE)
_LINK = re.compile(r"^link_type:\s*(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class KernelObjects:
    """Hold the ids of the BPF objects of a process, by what proc_pid_fdinfo(5) calls them, and how its links are."""

    ids: frozenset[tuple[str, int]] = frozenset()
    links: tuple[str, ...] = ()
    descriptors: int = field(default=0, compare=False)

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.ids}

    def left(self) -> set[tuple[str, int]]:
        """Return which of them still exist."""
        return {each for each in self.ids if _exists(*each)}


def kernel_objects(pid: int) -> KernelObjects:
    """Return what BPF objects a process holds now."""
    ids: set[tuple[str, int]] = set()
    links: list[str] = []
    count = 0
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                text = path.read_text()
                count += 1
                ids |= {(kind, int(number)) for kind, number in _ID.findall(text)}
                links += _LINK.findall(text)
    return KernelObjects(frozenset(ids), tuple(sorted(links)), count)


def is_attached(pid: int) -> bool:
    """Return whether a process holds a link of uprobes, which is one of a perf event where there are no others."""
    return bool({"uprobe_multi", "perf"} & set(kernel_objects(pid).links))


def await_handlers(client: subprocess.Popen[str]) -> None:
    """Wait until an interrupt ends a client as Ctrl-C does: after it has attached its probepoints."""

    def catches() -> bool:
        assert client.poll() is None, client.communicate()
        return bool(int(status_field(client.pid, "SigCgt"), 16) >> (signal.SIGTERM - 1) & 1)

    await_true(catches, "a client that can be ended")


def await_attached(client: subprocess.Popen[str]) -> KernelObjects:
    """Wait until a client has attached its probepoints and can be ended, and return what it holds then."""

    await_handlers(client)
    try:
        await_true(lambda: is_attached(client.pid), "uprobes of the run")
    except AssertionError as error:
        # Such as a conflict with what somebody else does on this machine.
        client.terminate()
        raise AssertionError(f"{error}; it had said:\n{client.communicate()[1]}") from None
    objects = kernel_objects(client.pid)
    assert objects.kinds == {"prog", "map", "link"}
    return objects


def await_gone(objects: KernelObjects) -> None:
    """Wait until the kernel has none of the objects any more: it frees them a moment after the last descriptor."""
    await_true(lambda: not objects.left(), "the end of all BPF objects")


def _exists(kind: str, number: int) -> bool:
    """Ask bpf(2) for an object by its id."""
    attributes = ctypes.create_string_buffer(struct.pack("=III", number, 0, 0), 16)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_SYS_BPF, _GET_FD_BY_ID[kind], attributes, 16)
    if descriptor >= 0:
        os.close(descriptor)
        return True
    number = ctypes.get_errno()
    if number != errno.ENOENT:
        raise OSError(number, os.strerror(number))
    return False
