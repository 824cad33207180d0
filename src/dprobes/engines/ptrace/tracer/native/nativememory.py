"""
Memory that a stopped process maps for handlers in it, without noticing.

The file of the client's is handed over as a process hands files to another one, by SCM_RIGHTS (unix(7)): the process
makes a socket, which takes what we send through a copy of it (``processcalls.send_file``). So it needs no path, works
through namespaces, and whoever owns the file; and nothing is open in the process afterwards. What is not the file's is
a page with a table of threads, and room for calls behind it, of which a child of the process does not inherit the
contents; and a manifest (``leftmanifest``), of which it does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from dprobes.engines.linux.memoryfile import memory_file
from dprobes.engines.linux.processcalls import same_file, send_file
from dprobes.engines.ptrace.leftmanifest import ENTRIES, FILE_NAME, LENGTH, MAGIC, SIZE, length_in
from dprobes.engines.ptrace.restorerwire import FilesShared
from dprobes.engines.ptrace.tracer.injection import MADVISE, MMAP, MUNMAP, InjectionError, OccupiedError, injecting
from dprobes.engines.ptrace.tracer.native.patches import NativeMemory
from dprobes.errors import reason_of, reason_of_number
from dprobes.native.processpage import PROCESS_PID, PROCESS_SIZE
from dprobes.target.processmaps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.bpf.calltable import CallTable
    from dprobes.engines.ptrace.tracer.addressspaces import AddressSpace
    from dprobes.engines.ptrace.tracer.injection import Call
    from dprobes.engines.ptrace.tracer.state import Thread

__all__ = ["list_in_manifest", "map_code", "share_memory"]

_WORD = 8
_SOCKET, _RECVMSG, _CLOSE = 41, 47, 3
"""Numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)."""

_READ, _READ_WRITE, _READ_EXECUTE = 1, 3, 5
_SHARED, _PRIVATE, _PRIVATE_ANONYMOUS, _FIXED_NOREPLACE = 0x01, 0x02, 0x22, 0x100000
_WIPE_ON_FORK = 18

_AF_UNIX, _DATAGRAMS = 1, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
_CLOSE_ON_EXEC_NOW = 0x40000000 | socket.MSG_DONTWAIT
"""MSG_CMSG_CLOEXEC, and no waiting."""

_HEADER, _VECTOR, _BYTE, _CONTROL = 64, 128, 160, 192
"""Where on the page things are put for the calls: a ``struct msghdr`` with what it names."""
_MESSAGE_HEADER = struct.Struct("=QIxxxxQQQQi")
_CONTROL_SIZE, _CONTROL_DATA = 24, 16


def share_memory(
    thread: Thread,
    files: Sequence[tuple[int, int]],
    calls: CallTable | None,
    tell: Callable[[FilesShared], None],
) -> NativeMemory:
    """
    Let a process map files of ours, (descriptor, size) each, and room for ``calls``; its other threads must be stopped.

    ``tell`` says beforehand which files they are, should we be killed in the middle. Raise ``InjectionError`` if it is
    not possible; then nothing is left of the attempt.
    """
    manifest = memory_file(FILE_NAME, SIZE)
    try:
        mapped = [*files, (manifest, SIZE)]
        identities = tuple((found.st_dev, found.st_ino) for found in (os.fstat(each) for each, _ in mapped))

        def tell_all(page: tuple[int, int]) -> None:
            for pid in thread.space.pids:
                tell(FilesShared(pid, identities, page))

        return _share(thread, mapped, calls, tell_all)
    finally:
        os.close(manifest)


def _share(
    thread: Thread,
    files: Sequence[tuple[int, int]],
    calls: CallTable | None,
    tell: Callable[[tuple[int, int]], None],
) -> NativeMemory:
    """Do it, and ``tell`` where the page is; the last one of the files becomes a manifest of the process's own."""
    own = PROCESS_SIZE + (0 if calls is None else -(-calls.size // PAGE_SIZE) * PAGE_SIZE)
    with injecting(thread) as call:
        page = _checked(call(MMAP[_WORD], 0, own, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0))
        opened: list[int] = []
        mapped: list[tuple[int, int]] = []
        try:
            _checked(call(MADVISE[_WORD], page, own, _WIPE_ON_FORK))
            tell((page, own))
            for number, (descriptor, size) in enumerate(files, 1):
                received = _receive(thread, call, page, descriptor, opened)
                how = (_READ, _PRIVATE) if number == len(files) else (_READ_WRITE, _SHARED)
                mapped.append((_checked(call(MMAP[_WORD], 0, size, *how, received, 0)), size))
        except (InjectionError, OSError) as error:
            tell((0, 0))  # the process may have something of its own there one day
            for address, size in ((page, own), *mapped):
                call(MUNMAP[_WORD], address, size)
            if isinstance(error, OSError):
                raise InjectionError(reason_of(error)) from error
            raise
        finally:
            for number in opened:
                call(_CLOSE, number)
        thread.space.write(page, bytes(_CONTROL + _CONTROL_SIZE))
        thread.space.write(page + PROCESS_PID, thread.pid.to_bytes(4, "little"))
    (region, size), *others, manifest = mapped
    with contextlib.suppress(OSError):
        thread.space.write(manifest[0], MAGIC)
    return NativeMemory(page, own, region, size, calls, tuple(others), manifest)


def list_in_manifest(space: AddressSpace, memory: NativeMemory, entry: bytes) -> str | None:
    """
    Enter something into a manifest: first the entry, and then that there is one more.

    Return why that cannot be; then nothing of what is in the entry may be written.
    """
    if memory.manifest is None:
        return None
    start, size = memory.manifest
    try:
        length = length_in(space.read(start, ENTRIES))
        if length is None:
            return "the list of what is written into the process is not there any more"
        if ENTRIES + length + len(entry) > size:
            return f"the list of what is written into the process is full ({size} bytes)"
        space.write(start + ENTRIES + length, entry)
        space.write(start + LENGTH, (length + len(entry)).to_bytes(8, "little"))
    except OSError as error:
        return f"the list of what is written into the process cannot be written: {reason_of(error)}"
    return None


def _receive(thread: Thread, call: Call, page: int, descriptor: int, opened: list[int]) -> int:
    """
    Let the process receive a file of ours; return its number there, and note what is to be closed.

    The process may have others that write into its memory meanwhile: what is read from there is compared.
    """
    space = thread.space
    number = _checked(call(_SOCKET, _AF_UNIX, _DATAGRAMS, 0))
    opened.append(number)
    send_file(thread.tid, thread.pid, number, descriptor)
    header = _MESSAGE_HEADER.pack(0, 0, page + _VECTOR, 1, page + _CONTROL, _CONTROL_SIZE, 0)
    space.write(page + _HEADER, header)
    space.write(page + _VECTOR, struct.pack("=QQ", page + _BYTE, 1))
    _checked(call(_RECVMSG, number, page + _HEADER, _CLOSE_ON_EXEC_NOW))
    received = int.from_bytes(space.read(page + _CONTROL + _CONTROL_DATA, 4), "little")
    if same_file(descriptor, thread.tid, received) is False:
        raise InjectionError("another file arrived in the process than was sent to it")
    opened.append(received)
    return received


def map_code(thread: Thread, program: int, ranges: Iterable[tuple[int, int]]) -> None:
    """
    Let a process map pages for a program's code, (start, end) each, where nothing is; its threads must be stopped.

    What is mapped is noted with the jumps of its address space: nothing else may be unmapped one day. Raise
    ``InjectionError`` if one cannot be had, and ``OccupiedError`` if something is there; those before it stay.
    """
    with injecting(thread) as call:
        for start, end in ranges:
            flags = _PRIVATE_ANONYMOUS | _FIXED_NOREPLACE
            found = call(MMAP[_WORD], start, end - start, _READ_EXECUTE, flags, -1, 0)
            if found == -errno.EEXIST:
                raise OccupiedError(f"something else is mapped at {start:#x}")
            if _checked(found) != start:
                call(MUNMAP[_WORD], found, end - start)  # a kernel that takes the address as a hint
                raise OccupiedError(f"something else is mapped at {start:#x}")
            thread.space.patches.code.setdefault(program, []).append((start, end))


def _checked(result: int) -> int:
    if result < 0:
        raise InjectionError(reason_of_number(-result))
    return result
