"""
Memory that a stopped process maps for handlers, by injected system calls.

The client's file is passed with SCM_RIGHTS (unix(7)): the process creates a socket, and the tracer sends the descriptor
through a duplicate of the socket (``process_calls.send_file``). So the file needs no path, and may belong to another
namespace; no descriptor remains open in the process. Two mappings are not of the client's file. One is the process page
(``native.process_page``), with room for the entries of calls, which a forked child does not inherit. The other is the
manifest (``restorer_messages``), which a child inherits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from dprobes.bpf.map_layouts import REGISTERS, call_key
from dprobes.engines.ptrace.restorer_messages import (
    ENTRIES,
    MANIFEST_FILE_NAME,
    MANIFEST_LENGTH,
    MANIFEST_MAGIC,
    MANIFEST_SIZE,
    FilesShared,
    JumpsPlanned,
    entry_of,
    length_in,
)
from dprobes.engines.ptrace.site_patches import NativeMemory
from dprobes.engines.ptrace.tracer.address_spaces import LocalIds
from dprobes.engines.ptrace.tracer.call_injection import MADVISE, MMAP, MUNMAP, InjectionError, OccupiedError, injecting
from dprobes.engines.ptrace.tracer.placed_breakpoints import Entry
from dprobes.engines.ptrace.tracer_messages import Warned
from dprobes.errors import reason_of, reason_of_number
from dprobes.native.process_page import PROCESS_IS_NESTED, PROCESS_PID, PROCESS_SIZE, THREAD, thread_window
from dprobes.platform.linux.process_calls import memory_file, same_file, send_file
from dprobes.target.process_maps import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dprobes.bpf.map_layouts import CallTable
    from dprobes.engines.ptrace.site_patches import SitePatch
    from dprobes.engines.ptrace.tracer.address_spaces import AddressSpace
    from dprobes.engines.ptrace.tracer.call_injection import Call
    from dprobes.engines.ptrace.tracer.client_connection import Connection
    from dprobes.engines.ptrace.tracer.tracer_programs import Probe
    from dprobes.engines.ptrace.tracer.tracer_state import Thread

__all__ = [
    "NO_ROOM",
    "add_calls",
    "announce",
    "begin_ids",
    "enter_thread",
    "lacks_ids",
    "leave_thread",
    "map_code",
    "own_pages",
    "receive_file",
    "share_memory",
    "take_call",
]

_WORD = 8
_SOCKET, _RECVMSG, _CLOSE = 41, 47, 3
"""Numbers of system calls (arch/x86/entry/syscalls/syscall_64.tbl)."""

_READ, _READ_WRITE, _READ_EXECUTE = 1, 3, 5
_SHARED, _PRIVATE, _PRIVATE_ANONYMOUS, _FIXED_NOREPLACE = 0x01, 0x02, 0x22, 0x100000
_WIPE_ON_FORK = 18

_AF_UNIX, _DATAGRAMS = 1, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
_CLOSE_ON_EXEC_NOW = 0x40000000 | socket.MSG_DONTWAIT
"""Flags of recvmsg: MSG_CMSG_CLOEXEC and MSG_DONTWAIT."""

_HEADER, _VECTOR, _BYTE, _CONTROL = 64, 128, 160, 192
"""Offsets on the page of the arguments of system calls: a ``struct msghdr`` and the objects that it refers to."""
_MESSAGE_HEADER = struct.Struct("=QIxxxxQQQQi")
_CONTROL_SIZE, _CONTROL_DATA = 24, 16


def share_memory(
    thread: Thread,
    files: Sequence[tuple[int, int]],
    calls: CallTable | None,
    tell: Callable[[FilesShared], None],
) -> NativeMemory:
    """
    Map the tracer's files, (descriptor, size) each, and room for ``calls`` in a process; all threads must be stopped.

    ``tell`` reports the files to the restorer before they are mapped. Raise ``InjectionError``, after unmapping all, if
    that fails.
    """
    manifest = memory_file(MANIFEST_FILE_NAME, MANIFEST_SIZE)
    try:
        mapped = [*files, (manifest, MANIFEST_SIZE)]
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
    """Map the files and report the page by ``tell``; the last file is mapped private and becomes the manifest."""
    own = PROCESS_SIZE + (0 if calls is None else -(-calls.size // PAGE_SIZE) * PAGE_SIZE)
    with injecting(thread) as call:
        page = _checked(call(MMAP[_WORD], 0, own, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0))
        opened: list[int] = []
        mapped: list[tuple[int, int]] = []
        try:
            _checked(call(MADVISE[_WORD], page, own, _WIPE_ON_FORK))
            tell((page, own))
            for number, (descriptor, size) in enumerate(files, 1):
                received = receive_file(thread, call, page, descriptor, opened)
                how = (_READ, _PRIVATE) if number == len(files) else (_READ_WRITE, _SHARED)
                mapped.append((_checked(call(MMAP[_WORD], 0, size, *how, received, 0)), size))
        except (InjectionError, OSError) as error:
            tell((0, 0))  # the process may map other memory there later
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
        thread.space.write(manifest[0], MANIFEST_MAGIC)
    return NativeMemory(page, own, region, size, calls, tuple(others), manifest)


def list_in_manifest(space: AddressSpace, memory: NativeMemory, entry: bytes) -> str | None:
    """
    Add an entry to a manifest: write the entry first, then the new length.

    Return the reason if that is not possible. Then none of the bytes in the entry may be written.
    """
    if memory.manifest is None:
        return None
    start, size = memory.manifest
    try:
        length = length_in(space.read(start, ENTRIES))
        if length is None:
            return "the list of what is written into the process no longer exists"
        if ENTRIES + length + len(entry) > size:
            return f"the list of what is written into the process is full ({size} bytes)"
        space.write(start + ENTRIES + length, entry)
        space.write(start + MANIFEST_LENGTH, (length + len(entry)).to_bytes(8, "little"))
    except OSError as error:
        return f"the list of what is written into the process cannot be written: {reason_of(error)}"
    return None


def receive_file(thread: Thread, call: Call, page: int, descriptor: int, opened: list[int]) -> int:
    """
    Send a file to the process; return the descriptor there, and append descriptors to be closed to ``opened``.

    Other processes may write to its memory meanwhile: the received file is compared with the sent one. Raise
    ``InjectionError`` if they differ, or a call fails.
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
    Map free pages for a program's code in a process, (start, end) each; its threads must be stopped.

    The mapped ranges are recorded in ``patches``, so that nothing else is unmapped later. Raise ``InjectionError`` if
    one cannot be mapped, and ``OccupiedError`` if the range is occupied; those before it stay.
    """
    with injecting(thread) as call:
        for start, end in ranges:
            flags = _PRIVATE_ANONYMOUS | _FIXED_NOREPLACE
            found = call(MMAP[_WORD], start, end - start, _READ_EXECUTE, flags, -1, 0)
            if found == -errno.EEXIST:
                raise OccupiedError(f"something else is mapped at {start:#x}")
            if _checked(found) != start:
                call(MUNMAP[_WORD], found, end - start)  # a kernel that treats the address as a hint
                raise OccupiedError(f"something else is mapped at {start:#x}")
            thread.space.patches.code.setdefault(program, []).append((start, end))


def _checked(result: int) -> int:
    if result < 0:
        raise InjectionError(reason_of_number(-result))
    return result


# Thread ids in the PID namespace of a process, for handlers in it, which look them up there.
#
# The C library of a process provides only local ids, whereas records, tables and messages contain the ids of the
# tracer's namespace. So each thread is entered into a table of its process (``native.process_page``) before it runs. It
# is removed after its end, before its ids can be reused. A process in no nested namespace has no table.


NO_ROOM = "it has more threads than there is room for with their ids in its PID namespace"
_SHARED_IDS = "another process runs in its memory"


def own_pages(space: AddressSpace, pid: int) -> None:
    """
    Write the process id ``pid``, and whether thread ids are local, to the handlers' pages of a forked child.

    The child, which has not run yet, has a copy of its parent's pages.
    """
    space.local_ids = LocalIds.of(pid) if space.patches.memories else None
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):
            _write_head(space, memory.page, pid)


def begin_ids(space: AddressSpace, page: int, pid: int, tids: Iterable[int]) -> str | None:
    """
    Write the ids of all threads of a process, which are stopped, to the table of ids on the page at ``page``.

    Return the reason if that fails, otherwise None. A process whose threads have the same ids in its namespace needs no
    table.
    """
    if space.local_ids is None or space.local_ids.pid not in space.pids:
        space.local_ids = LocalIds.of(pid)
    ids = space.local_ids
    if ids is None:
        return None
    if ids.pid != pid:
        return _SHARED_IDS
    try:
        _write_head(space, page, pid)
        for tid in tids:
            local = ids.local_of(tid)
            if local is not None and not _enter(space, page, local, tid):
                ids.is_full = True
    except OSError as error:
        return reason_of(error)
    return NO_ROOM if ids.is_full else None


def enter_thread(space: AddressSpace, pid: int, tid: int) -> bool:
    """
    Add a new thread, which has not run yet, to the table of thread ids.

    The table maps ids in the process's PID namespace to global ones. Return False if it has no room: then no handler
    may run in the process.
    """
    ids = space.local_ids
    if ids is None or ids.pid != pid:
        return True
    ids.by_thread.pop(tid, None)
    local = ids.local_of(tid)
    if local is None:
        return True
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):  # it has been killed
            ids.is_full |= not _enter(space, memory.page, local, tid)
    return not ids.is_full


def leave_thread(space: AddressSpace, tid: int) -> None:
    """Remove a thread that has ended, before waitpid(2) releases its id, from the table of ``enter_thread``."""
    ids = space.local_ids
    if ids is None or (local := ids.by_thread.pop(tid, None)) is None:
        return
    for memory in space.patches.memories.values():
        with contextlib.suppress(OSError):
            for place, found, other in _places(space, memory.page, local):
                if (found, other) == (local, tid):
                    os.pwrite(space.memory, bytes(THREAD.size), place)


def lacks_ids(space: AddressSpace) -> bool:
    """Return whether there are threads in a space that handlers cannot identify."""
    return space.local_ids is not None and space.local_ids.is_full


def _write_head(space: AddressSpace, page: int, pid: int) -> None:
    space.write(page + PROCESS_IS_NESTED, int(space.local_ids is not None).to_bytes(4, "little"))
    space.write(page + PROCESS_PID, pid.to_bytes(4, "little"))


def _enter(space: AddressSpace, page: int, local: int, tid: int) -> bool:
    """
    Write the ids of a thread, ``local`` in its PID namespace and ``tid`` outside, to the table on the page at ``page``.

    Return False if there is no free place.
    """
    found = list(_places(space, page, local))
    place = next((place for place, known, _ in found if known == local), None)
    if place is None:
        place = next((place for place, known, _ in found if not known), None)
    if place is None:
        return False
    os.pwrite(space.memory, THREAD.pack(local, tid), place)
    return True


def _places(space: AddressSpace, page: int, local: int) -> Iterable[tuple[int, int, int]]:
    """Return the places for a thread in the ids table of a ``page``: address, local id and global id of each."""
    window = thread_window(local)
    data = os.pread(space.memory, len(window) * window.step, page + window.start)
    pairs = THREAD.iter_unpack(data[: len(data) // THREAD.size * THREAD.size])
    return [(page + at, found, tid) for at, (found, tid) in zip(window, pairs, strict=False)]


# Reports of bytes that are about to be written into a process: to the restorer, and to the process's own manifest.
#
# The restorer cleans up after a killed tracer; if both were killed, the manifest lists what to look for
# (``restorer_messages``).


def announce(
    connection: Connection,
    space: AddressSpace,
    number: int,
    pages: tuple[tuple[int, int], ...] = (),
    patches: tuple[SitePatch, ...] = (),
) -> str | None:
    """
    Report pages of code and jumps to the restorer, and add them to the manifest in the process.

    Call this before they are written. They belong to the program ``number``. Return the reason if it fails, and nothing
    may be written; otherwise None.
    """
    memory = space.patches.memories[number]
    for pid in space.pids:
        connection.tell_restorer(JumpsPlanned(pid, memory, pages, patches))
    listed = space.patches.listed.setdefault(memory.page, set())
    # Jumps whose writing failed at first are announced again.
    new = {key: patch for patch in patches if (key := (patch.writes, patch.originals)) not in listed}
    if pages or new or not listed:
        why = list_in_manifest(space, memory, entry_of(memory, pages, tuple(new.values()), ()))
        if why is not None:
            return why
        listed.update(new)
    _list_breakpoints(connection, space, number, listed)
    return None


def _list_breakpoints(connection: Connection, space: AddressSpace, number: int, listed: set[object]) -> None:
    """List the breakpoints beside jumps as well, which normally the tracer or the restorer removes."""
    memory = space.patches.memories[number]
    found = {(each.address, each.original) for each in space.breakpoints.values()}
    new = sorted(found - listed)
    if not new or memory.page in space.patches.unlisted:
        return
    why = list_in_manifest(space, memory, entry_of(memory, (), (), new))
    if why is None:
        listed.update(new)
        return
    space.patches.unlisted.add(memory.page)
    are = "breakpoint is" if len(new) == 1 else "breakpoints are"
    text = f"{len(new)} {are} not listed in process {min(space.pids, default=0)}: {why}"
    hint = "they stay there if all processes of dprobes are killed at once, and 'dprobes stop --left' misses them"
    connection.send(Warned(text, hint, number))


# Entries of calls that handlers in a process store there (``bpf.map_layouts``), accessed by the tracer.
#
# While handlers run, the tracer takes the entry of a call that returns to a breakpoint, after a tail call for instance.
# That slot belongs to the thread that has stopped. The tracer adds entries only while no thread runs.


_HEAD = struct.Struct("=QQ")
_FREE = bytes(8)

Kept = tuple[tuple[int, int | None], ...]
"""Values stored at an entry, as in ``Site.kept``."""


def take_call(space: AddressSpace, probe: Probe, frame: int, kept: Kept) -> Entry | None:
    """Remove and return the entry of a call that returns, or None if it is not stored in the process."""
    memory = space.patches.memories.get(probe.program.number)
    if memory is None or memory.calls is None:
        return None
    table, key = memory.calls, call_key(probe.number, frame)
    window = table.window(key)
    start = memory.page + PROCESS_SIZE
    try:
        data = os.pread(space.memory, len(window) * table.slot, start + window.start)
        for at in range(0, len(data) - table.slot + 1, table.slot):
            found, time = _HEAD.unpack_from(data, at)
            if found != key:
                continue
            os.pwrite(space.memory, _FREE, start + window.start + at + 8)
            os.pwrite(space.memory, _FREE, start + window.start + at)
            values = struct.unpack_from(f"={len(kept)}Q", data, at + REGISTERS)
            return Entry(time, {index: value for (index, _), value in zip(kept, values, strict=True)}) if time else None
    except OSError:
        pass
    return None


def add_calls(space: AddressSpace, memory: NativeMemory, probe: Probe, calls: Sequence[tuple[int, Entry]]) -> None:
    """
    Store ``calls``, (frame, entry) each, that the tracer has recorded in the process; no thread of it may run.

    If there is no free slot for a call, it replaces the oldest of the calls that have the same slots.
    """
    assert memory.calls is not None
    table, start = memory.calls, memory.page + PROCESS_SIZE
    for frame, entry in calls:
        key = call_key(probe.number, frame)
        window = table.window(key)
        try:
            data = os.pread(space.memory, len(window) * table.slot, start + window.start)
            heads = [(*_HEAD.unpack_from(data, at), at) for at in range(0, len(data) - table.slot + 1, table.slot)]
            if not heads:
                return  # the process has unmapped the memory
            free = [at for found, _, at in heads if found in (0, key)]
            at = free[0] if free else min(heads, key=lambda head: head[1])[2]
            registers = [entry.registers[index] for index in sorted(entry.registers)]
            slot = _HEAD.pack(key, entry.time) + struct.pack(f"={len(registers)}Q", *registers)
            os.pwrite(space.memory, slot, start + window.start + at)
        except OSError:
            return
