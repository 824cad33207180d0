"""
bpf(2) through ctypes: the only file that makes this system call, and what is asked of it as data.

A request for an object, be it a map, a program or a link, may be noted for another run. That makes the objects of a run
before most of its modules are imported (``engines.ebpf.headstart``), and whoever asks for the very same then, one after
the other, is given what stands already (``Standing``). Each thread has notes and standing objects of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from _thread import _local

from dprobes.engines.linux.proxy import call_in_proxy, close_in_proxy

# Nothing that takes long is imported here: no typing, no errors of ours.

TYPE_CHECKING = False  # what type checkers take for true
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Protocol, TypeVar

    T = TypeVar("T")

    class Reader(Protocol):
        """Who reads a ring before the run does."""

        def stop(self) -> list[tuple[bytes, float]]:
            """End, and return what was taken, each piece with the time of that."""


__all__ = [
    "HeadStartError",
    "Notes",
    "Request",
    "Standing",
    "aside",
    "give_up",
    "issue",
    "made",
    "note_into",
    "notes",
    "stand",
    "standing",
    "system_call",
]

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong)
_syscall.restype = ctypes.c_long

_SYS_BPF = 321
_ADDRESS = struct.Struct("=Q")
_ATTEMPTS = 6


def system_call(command: int, attributes: ctypes.Array[ctypes.c_char]) -> int:
    """Make the system call, and return its result; OSError as the kernel answers."""
    result: int = _syscall(_SYS_BPF, command, ctypes.addressof(attributes), len(attributes))
    if result < 0:
        raise _error(ctypes.get_errno(), command)
    return result


def _error(number: int, command: int) -> OSError:
    return OSError(number, f"bpf {getattr(command, 'name', command)}: {os.strerror(number)}")


class Request:
    """
    A request for an object of the kernel.

    ``attributes`` are those of the command, with zeros where addresses are to be: ``data`` has the bytes that these
    lead to, by their places. ``descriptors`` are the places of descriptors in the attributes. ``path`` is the place of
    the address of a path, -1 if there is none. What attaches uprobes is asked ``in_proxy``.
    """

    __slots__ = ("attributes", "command", "data", "descriptors", "in_proxy", "path")

    def __init__(
        self,
        command: int,
        attributes: bytes,
        data: Mapping[int, bytes] | None = None,
        descriptors: Sequence[int] = (),
        path: int = -1,
        *,
        in_proxy: bool = False,
    ) -> None:
        self.command = command
        self.attributes = attributes
        self.data = data or {}
        self.descriptors = tuple(descriptors)
        self.path = path
        self.in_proxy = in_proxy

    def is_same(self, other: Request) -> bool:
        """Return whether another request asks for the very same; a file may be reached by another path."""
        if (self.command, self.attributes, self.path) != (other.command, other.attributes, other.path):
            return False
        if self.data == other.data:
            return True
        one, another = dict(self.data), dict(other.data)
        first, second = one.pop(self.path, b""), another.pop(self.path, b"")
        try:
            return one == another and os.path.samefile(first.rstrip(b"\0"), second.rstrip(b"\0"))
        except OSError:
            return False


def issue(request: Request) -> int:
    """Ask the kernel, and return the descriptor; OSError as it answers."""
    attributes = ctypes.create_string_buffer(request.attributes, len(request.attributes))
    buffers = []
    for place, data in request.data.items():
        buffers.append(ctypes.create_string_buffer(data, len(data)))
        _ADDRESS.pack_into(attributes, place, ctypes.addressof(buffers[-1]))
    if request.in_proxy:
        # Who is killed while it attaches uprobes would leave them.
        return call_in_proxy(_SYS_BPF, request.command, ctypes.addressof(attributes), len(attributes))
    for _ in range(_ATTEMPTS - 1):
        try:
            return system_call(request.command, attributes)
        except BlockingIOError:
            continue  # the verifier gives up when a signal is pending
    return system_call(request.command, attributes)


class Notes:
    """
    What a run has asked for, in order, each request with its descriptor or else minus the number of the error.

    ``before_arming`` is called once, before the first uprobe is attached. ``plan`` is what was made of the notes.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Request | None, int]] = []
        self.before_arming: Callable[[], None] | None = None
        self.plan: object = None

    def before(self, request: Request) -> None:
        """Be told of a request that is about to be made."""
        if request.in_proxy and self.before_arming is not None:
            work, self.before_arming = self.before_arming, None
            work()

    def add(self, request: Request | None, result: int) -> None:
        """Note a request; None stands for the moment at which the scope was filled."""
        self.steps.append((request, result))


class HeadStartError(Exception):
    """What stands is not what is asked for: the run is to begin again, after ``give_up``."""


class Standing:
    """
    Objects that stand already, with their requests, in the order in which they will be asked for.

    ``places`` are the file offsets at which no process was found to have other code than the file with ``identity``,
    device and inode. ``scope`` is the process that was put in scope with what it has started, and how many more there
    are than the kernel counts; None if all processes are. ``since`` is when uprobes were attached, by the monotonic
    clock.
    """

    def __init__(self, identity: tuple[int, int], places: frozenset[int]) -> None:
        self._made: list[tuple[Request, int]] = []
        self._next = 0
        self.identity = identity
        self.places = places
        self.scope: tuple[int, int] | None = None
        self.since = 0.0
        self._readers: dict[int, Reader] = {}

    def planted(self, pid: int) -> int:
        """Return how many more processes are in scope than the kernel counts, ``pid`` being the first."""
        if self.scope is None or self.scope[0] != pid:
            raise HeadStartError
        return self.scope[1]

    def read(self, descriptor: int, reader: Reader) -> None:
        """Take note of the reader of a ring."""
        self._readers[descriptor] = reader

    def end_reading(self, descriptor: int) -> list[tuple[bytes, float]]:
        """End the reader of a ring, if it has one, and return what that took."""
        reader = self._readers.pop(descriptor, None)
        return [] if reader is None else reader.stop()

    def add(self, request: Request, result: int) -> None:
        """Add an object, or minus the number of the error with which the kernel refused it."""
        self._made.append((request, result))

    @property
    def is_used_up(self) -> bool:
        """Whether somebody has asked for everything."""
        return self._next == len(self._made)

    def take(self, request: Request) -> int:
        """Return the descriptor that is asked for, which is the caller's from now on."""
        expected, result = self._made[self._next]
        if not expected.is_same(request):
            raise HeadStartError
        self._next += 1
        if result < 0:
            raise _error(-result, request.command)
        return result

    def close(self) -> None:
        """Give up what nobody has taken; its uprobes are gone when this returns."""
        for descriptor in list(self._readers):
            self.end_reading(descriptor)
        left = [(request, result) for request, result in self._made[self._next :] if result >= 0]
        self._next = len(self._made)
        close_in_proxy([descriptor for request, descriptor in left if request.in_proxy])
        for request, descriptor in reversed(left):
            if not request.in_proxy:
                os.close(descriptor)


class _State(_local):
    standing: Standing | None = None
    notes: Notes | None = None
    asides = 0


_state = _State()


def made(request: Request) -> int:
    """
    Return the descriptor of what is asked for, which may stand already; OSError as the kernel answers.

    Raise ``HeadStartError`` if something else stands in its place.
    """
    if _state.asides:
        return issue(request)
    if (found := _state.standing) is not None and not found.is_used_up:
        return found.take(request)
    notes = _state.notes
    if notes is None:
        return issue(request)
    notes.before(request)
    try:
        result = issue(request)
    except OSError as error:
        notes.add(request, -(error.errno or errno.EIO))
        raise
    notes.add(request, result)
    return result


def aside(work: Callable[[], T]) -> T:
    """Do what asks for objects that are no part of the run, such as trials."""
    _state.asides += 1
    try:
        return work()
    finally:
        _state.asides -= 1


def standing() -> Standing | None:
    """Return what stands already for a run in this thread."""
    return _state.standing


def stand(objects: Standing | None) -> None:
    """Let the next run in this thread find objects that stand already; or none any more."""
    _state.standing = objects


def give_up() -> None:
    """Take away what stands and was not asked for."""
    objects, _state.standing = _state.standing, None
    if objects is not None:
        objects.close()


def notes() -> Notes | None:
    """Return the notes that are taken in this thread."""
    return _state.notes


def note_into(notes: Notes | None) -> None:
    """Take notes in this thread from now on, or none any more."""
    _state.notes = notes
