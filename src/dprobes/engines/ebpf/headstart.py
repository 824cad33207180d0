"""
A head start: the kernel objects of a run, made from the plan of an earlier one before most modules are imported.

A plan is data that ``marshal`` takes. It says which requests make the objects, in order; when the scope is filled, and
what maps hold when the first uprobe is attached. The run begins later and in its usual way. It is handed what stands if
it asks for the very same (``kernelobjects.Standing``), and so nothing depends on a plan being right.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time

from dprobes.engines.ebpf.attach.scopecontent import plant
from dprobes.engines.ebpf.attach.untouched import is_untouched, maps_file
from dprobes.engines.ebpf.kernel.earlyreader import EarlyReader
from dprobes.engines.linux.kernelobjects import Request, Standing, issue, system_call

# Nothing that takes long is imported here: no typing, no errors of ours.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["Plan", "begin"]

Place: TypeAlias = "tuple[int, int, int]"
"""
Where a number is to be put in: the place of the address of the data, or -1 for the attributes themselves; the place in
there; and the number of the step whose descriptor it is, or -1 for the id of this process.
"""

Step: TypeAlias = "tuple[int, bytes, dict[int, bytes], tuple[int, ...], int, bool, int, tuple[Place, ...]]"
"""
A request: its command, attributes, data, places of descriptors, place of the path, whether a proxy asks; the number of
the error that is its answer, 0 if it makes an object; and what is to be put in. With the command -1
the scope is filled.
"""

Plan: TypeAlias = (
    "tuple[str, tuple[int, int], tuple[tuple[int, bytes], ...], tuple[Step, ...], "
    "tuple[int, int, int, bool] | None, tuple[tuple[int, int, bytes], ...], tuple[int, int]]"
)
"""
The path of the probed file, its device and inode; the places with the bytes that the file has there; the steps; the
steps that make SCOPE and STATUS, the place of ALIVE, and whether what a process starts is in scope; for maps, by their
steps, size in bytes and what they hold; and the step of the ring, with its size.
"""

_NUMBER = struct.Struct("=I")
_WORD = struct.Struct("=Q")
# struct { u32 map_fd; u64 key; u64 value or next_key; u64 flags; }
_ELEMENT = struct.Struct("=I4xQQQ")
_LOOKUP, _UPDATE, _DELETE = 1, 2, 3
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


def begin(plan: Plan, pid: int | None) -> Standing | None:
    """Make the objects of a plan for a process, or for all; return None if something is not as it was."""
    path, identity, places, *_ = plan
    if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
        return None
    if pid is not None:
        root, own = os.stat(f"/proc/{pid}/root"), os.stat("/")
        if (root.st_dev, root.st_ino) != (own.st_dev, own.st_ino) or not maps_file(pid, path, identity):
            return None
    objects = Standing(identity, frozenset(offset for offset, _ in places))
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if (status.st_dev, status.st_ino) == identity and _make(plan, pid, f"/proc/self/fd/{file}", objects):
            return objects
        objects.close()
    except BaseException:
        objects.close()
        raise
    finally:
        os.close(file)
    return None


def _make(plan: Plan, pid: int | None, reached: str, objects: Standing) -> bool:
    path, identity, places, steps, scope, contents, (ring, ring_size) = plan
    found: list[int] = []
    own = os.getpid()
    for command, attributes, data, descriptors, at_path, in_proxy, error, numbers in steps:
        if command < 0:
            if scope is None or pid is None:
                return False
            objects.scope = pid, _fill(found, scope, pid)
            found.append(-1)
            continue
        pieces = {-1: bytearray(attributes)} | {at: bytearray(each) for at, each in data.items()}
        for where, at, step in numbers:
            _NUMBER.pack_into(pieces[where], at, own if step < 0 else found[step])
        if at_path >= 0:
            pieces[at_path] = bytearray(os.fsencode(reached) + b"\0")
        whole = {at: bytes(each) for at, each in pieces.items()}
        request = Request(command, whole.pop(-1), whole, descriptors, at_path, in_proxy=in_proxy)
        if in_proxy and not objects.since:
            for step, size, content in contents:
                _write(found[step], size, content)
            if not is_untouched(path, identity, places):
                return False
            objects.since = time.monotonic()
        made = -error if error else issue(request)
        if at_path >= 0:
            request.data = whole | {at_path: os.fsencode(path)}  # what is asked for later is that file, however reached
        objects.add(request, made)
        found.append(made)
    if objects.since:
        objects.read(found[ring], EarlyReader(found[ring], ring_size))
    return bool(objects.since)


def _fill(found: list[int], scope: tuple[int, int, int, bool], pid: int) -> int:
    map_step, status_step, place, follow = scope

    def set_alive(count: int) -> None:
        _write(found[status_step], place + _WORD.size, _WORD.pack(count), place)

    return plant(_Map(found[map_step]), set_alive, pid, follow=follow)


def _write(descriptor: int, size: int, content: bytes, place: int = 0) -> None:
    """Write bytes into an array of so many."""
    with mmap.mmap(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE) as memory:
        memory[place : place + len(content)] = content


class _Map:
    """A hash whose keys and values have four bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def _call(self, command: int, key: bytes, value: bytes) -> None:
        first, second = ctypes.create_string_buffer(key, 4), ctypes.create_string_buffer(value, 4)
        attributes = ctypes.create_string_buffer(
            _ELEMENT.pack(self._descriptor, ctypes.addressof(first), ctypes.addressof(second), 0), _ELEMENT.size
        )
        system_call(command, attributes)

    def __contains__(self, key: bytes) -> bool:
        try:
            self._call(_LOOKUP, key, bytes(4))
        except FileNotFoundError:
            return False
        return True

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._call(_UPDATE, key, value)

    def discard(self, key: bytes) -> bool:
        """Delete a key; return whether it was there."""
        try:
            self._call(_DELETE, key, bytes(4))
        except FileNotFoundError:
            return False
        return True
