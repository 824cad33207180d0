"""
Queries of ``/proc`` and ``/sys`` about processes, threads, mapped files and CPUs (proc(5)).

The ioctl PROCMAP_QUERY on ``/proc/PID/maps`` finds the files that a process executes without printing a line for each
mapping. The kernel takes at least a third of a microsecond to print a line. A query of one mapping takes as long, but
only a quarter of the mappings are code of a file, and only these are queried. The ioctl exists since Linux 6.11, kernel
commit ed5d583a88a9 ("fs/procfs: implement efficient VMA querying API for /proc/<pid>/maps").

The kernel sends a uevent for a CPU that comes online: in ``device_online`` (``drivers/base/core.c``), and in
``thaw_secondary_cpus`` (``kernel/cpu.c``) after the machine was suspended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dprobes.target.process_maps import COVERING_OR_NEXT, EXECUTABLE, NAME_MAX, OF_FILE, PROCMAP_QUERY, QUERY

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "SPARED",
    "CpuNews",
    "MapQuestion",
    "ThreadIdentity",
    "catches_signal",
    "children_of",
    "copy_score",
    "cpu_limit",
    "first_stack_of",
    "identity_of",
    "ids_of",
    "is_in_user_namespace",
    "living_thread",
    "missing_privilege",
    "online_cpus",
    "process_field",
    "process_of",
    "program_of",
    "set_score",
    "spare_process",
    "start_time",
    "system_call_of",
    "thread_state",
    "threads_of",
    "without_waiting",
]


def without_waiting(path: str, flags: int) -> int:
    """Open a file of a process with O_NONBLOCK, as an ``opener`` of ``open``: a FIFO may have replaced the file."""
    return os.open(path, flags | os.O_NONBLOCK)


def process_field(tid: int, name: str) -> str:
    """
    Return the value of a field of ``/proc/TID/status``, such as "Uid".

    Return "" if the thread or the field does not exist.
    """
    with contextlib.suppress(OSError), open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as file:
        for line in file.read().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
    return ""


def ids_of(tid: int) -> tuple[int, ...]:
    """
    Return the ids of a thread in all its PID namespaces: first in the namespace of ``/proc``, last in the innermost.

    Return an empty tuple if the thread has ended, or the kernel has no PID namespaces.
    """
    return tuple(map(int, process_field(tid, "NSpid").split()))


def catches_signal(tid: int, number: int) -> bool:
    """Return True if a thread's process has a handler for a signal (SigCgt). Return False if the thread has ended."""
    caught = process_field(tid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> number - 1 & 1)


def thread_state(tid: int) -> str:
    """Return the state of a thread as a letter of proc(5), such as S, D or Z. X means that the thread has ended."""
    try:
        descriptor = os.open(f"/proc/{tid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _STAT_MAX).rpartition(b")")[2].split()[0].decode()
        finally:
            os.close(descriptor)
    except OSError:
        return "X"


def process_of(tid: int) -> int:
    """Return the id of a thread's process, or ``tid`` if there is no such thread."""
    return int(process_field(tid, "Tgid") or tid)


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks (SC_CLK_TCK) since the boot, or 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def first_stack_of(pid: int) -> int | None:
    """
    Return the address of the bottom of a process's initial stack (proc(5), startstack).

    Return None if reading it is not permitted, or the process has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # proc(5): field 28, which is 0 or 1 for a reader who may not trace the process.
            start = int(file.read().rpartition(b")")[2].split()[25])
    except (OSError, IndexError):
        return None
    return start if start > 1 else None


def system_call_of(tid: int) -> int | None:
    """
    Return the number of the system call that a thread sleeps in, -1 if it sleeps elsewhere.

    Return None if it runs or has ended. Source: ``proc_pid_syscall`` in ``fs/proc/base.c``.
    """
    try:
        with open(f"/proc/{tid}/syscall", "rb") as file:
            first = file.read().split()[0]
    except (OSError, IndexError):
        return None
    return None if first == b"running" else int(first)


_STAT_MAX = 4096
"""Maximum size of ``/proc/TID/stat`` in bytes: a name of at most 64 and fifty numbers."""


def children_of(pid: int, tid: int) -> list[int]:
    """Return the ids of the processes that a thread has started and that have not been waited for."""
    try:
        with open(f"/proc/{pid}/task/{tid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def threads_of(pid: int) -> set[int]:
    """Return the ids of the threads of a process; raise ``ProcessLookupError`` if it has ended."""
    try:
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error


def living_thread(pid: int) -> int:
    """
    Return the id of a thread of the process that has not ended, or ``pid`` if there is none.

    When the first thread ends before the others, ``/proc/PID`` no longer shows the memory of the process.
    """
    if thread_state(pid) not in ("Z", "X"):
        return pid
    with contextlib.suppress(OSError):
        for tid in sorted(threads_of(pid)):
            if thread_state(tid) not in ("Z", "X"):
                return tid
    return pid


_STATUS_MAX = 4096
_UID = b"\nUid:\t"


class ThreadIdentity(NamedTuple):
    """
    Process, thread id, name (comm) and real user id of a thread.

    ``program`` has the device and inode of the executable of its process.
    """

    pid: int
    tid: int
    name: bytes
    uid: int
    program: tuple[int, int] | None = None


def identity_of(pid: int, tid: int) -> ThreadIdentity | None:
    """Return the identity of a thread, or None if the thread has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        name = _read(f"/proc/{pid}/task/{tid}/comm").rstrip(b"\n")
        status = _read(f"/proc/{pid}/task/{tid}/status")
        return ThreadIdentity(pid, tid, name, int(status.partition(_UID)[2].split(None, 1)[0]))
    return None


def program_of(pid: int) -> tuple[int, int] | None:
    """Return the device and inode of a process's executable, or None if they cannot be read."""
    try:
        found = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STATUS_MAX)
    finally:
        os.close(descriptor)


# Scores of our processes for the out-of-memory killer (``oom_score_adj``, proc(5)).
#
# The tracer must not be killed before others: it uses little memory, and its end may end the traced processes.


SPARED = -900
"""Score of a tracer: nearly all other processes are killed first, except in a memory cgroup without others."""


def set_score(pid: int, score: int) -> None:
    """
    Set ``oom_score_adj`` of a process.

    Raise OSError if that is not permitted (lowering requires CAP_SYS_RESOURCE).
    """
    _file(pid).write_text(f"{score}\n")


def spare_process() -> None:
    """Set the OOM score of this process to that of a tracer, if permitted. ``dprobes doctor`` shows whether it is."""
    with contextlib.suppress(OSError):
        set_score(os.getpid(), SPARED)


def copy_score(source: int, pid: int) -> None:
    """
    Copy ``oom_score_adj`` of the process ``source`` to the process ``pid``.

    Do nothing if ``source`` has ended, or on an error.
    """
    with contextlib.suppress(OSError):
        _file(pid).write_text(_file(source).read_text())


def _file(pid: int) -> Path:
    return Path(f"/proc/{pid}/oom_score_adj")


_WANTED = EXECUTABLE | COVERING_OR_NEXT | OF_FILE

_OURS_MAX = 1 << 12
"""Maximum number of this process's mappings that are queried."""

_ADDRESS = struct.Struct("=Q")
_ASKED, _END, _INODE = 16, 32, 64
"""Offsets of the address in a query, and of the end of the mapping and the inode in the answer."""


class MapQuestion:
    """
    Query for ``/proc/PID/maps`` (PROCMAP_QUERY) whether a process has an executable mapping of a file.

    A mapping is of the file if its inode number matches, or if its name contains ``base``. On some file systems
    mappings have other inode numbers than stat(2). Without ``base`` no names are requested, which takes a third less
    time.
    """

    def __init__(self, inode: int, base: str = "") -> None:
        self._inode = inode
        self._base = os.fsencode(base)
        self._query = bytearray(QUERY.size)
        self._name = ctypes.create_string_buffer(NAME_MAX)
        self._view = memoryview(self._name)
        self._address = ctypes.addressof(self._name)

    @classmethod
    def about(cls, path: str, inode: int, base: str) -> Self:
        """Return the query about a file, by inode number alone if a mapping of this process shows that number."""
        by_number, executable = cls(inode), mmap.PROT_READ | mmap.PROT_EXEC
        try:
            with (
                open(path, "rb", opener=without_waiting) as file,
                mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=executable),
            ):
                if by_number.answer(os.getpid(), _OURS_MAX):
                    return by_number
        except (OSError, ValueError):
            pass  # the file may not be executed, or is empty
        return cls(inode, base)

    def answer(self, thread: int, most: int) -> bool | None:
        """
        Return True if a process has an executable mapping of the file, False if it has none.

        Return None if the first ``most`` mappings are of other files, or on an error. Raise ``PermissionError`` if the
        mappings may not be read, and ``ProcessLookupError`` if the process has ended.
        """
        try:
            descriptor = os.open(f"/proc/{thread}/maps", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ProcessLookupError(*error.args) from None
        try:
            return self._ask(descriptor, most) if self._base else self._ask_for_numbers(descriptor, most)
        except OSError as error:
            if error.errno == errno.ENOENT:  # there is no further mapping
                return False
            if error.errno == errno.ESRCH:
                raise
            return None
        finally:
            os.close(descriptor)

    def _ask(self, descriptor: int, most: int) -> bool | None:
        query, end = self._query, 0
        for _ in range(most):
            QUERY.pack_into(query, 0, QUERY.size, _WANTED, end, 0, 0, 0, 0, 0, 0, 0, 0, NAME_MAX, 0, self._address, 0)
            ioctl(descriptor, PROCMAP_QUERY, query)
            _, _, _, _, end, _, _, _, inode, _, _, length, *_ = QUERY.unpack(query)
            if inode == self._inode or self._base in bytes(self._view[:length]):
                return True
        return None

    def _ask_for_numbers(self, descriptor: int, most: int) -> bool | None:
        query, wanted = self._query, self._inode
        QUERY.pack_into(query, 0, QUERY.size, _WANTED, *[0] * 13)
        for _ in range(most):
            ioctl(descriptor, PROCMAP_QUERY, query)
            if _ADDRESS.unpack_from(query, _INODE)[0] == wanted:
                return True
            query[_ASKED : _ASKED + _ADDRESS.size] = query[_END : _END + _ADDRESS.size]
        return None


_CPUS = "/sys/devices/system/cpu"

#   online@/devices/system/cpu/cpu1 \0 ACTION=online \0 DEVPATH=… \0 SUBSYSTEM=cpu \0 …
_ONLINE = b"online@/devices/system/cpu/cpu"


def online_cpus() -> list[int]:
    """Return the numbers of the CPUs that are online."""
    with open(f"{_CPUS}/online", encoding="ascii") as file:
        ranges = file.read().strip().split(",")
    cpus: list[int] = []
    for text in ranges:
        first, _, last = text.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def cpu_limit() -> int:
    """Return one more than the highest possible number of a CPU of this machine."""
    try:
        with open(f"{_CPUS}/possible", encoding="ascii") as file:
            return int(file.read().replace("-", ",").split(",")[-1]) + 1
    except (OSError, ValueError):
        return os.cpu_count() or 1


class CpuNews:
    """
    Receiver of messages about CPUs that come online, until ``close``.

    The constructor raises OSError if that is not permitted.
    """

    def __init__(self) -> None:
        from dprobes.platform.linux.kernel_events import KernelEvents

        self._events = KernelEvents()

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket, readable if messages about CPUs or other devices have arrived."""
        return self._events.descriptor

    def arrived(self) -> list[int]:
        """Return the CPUs that have come online since the last call. If messages were lost, return all online CPUs."""
        messages, is_lossy = self._events.drain()
        cpus = {cpu for message in messages if (cpu := _cpu_of(message)) is not None}
        return sorted(cpus.union(online_cpus() if is_lossy else ()))

    def close(self) -> None:
        """Close the socket."""
        self._events.close()


def _cpu_of(message: bytes) -> int | None:
    """Return the CPU that has come online according to a uevent, or None if the uevent is about something else."""
    number = message.partition(b"\0")[0].removeprefix(_ONLINE)
    return int(number) if message.startswith(_ONLINE) and number.isdigit() else None


_USERS = Path("/proc/self/uid_map")
_ALL_USERS = ["0", "0", "4294967295"]
"""Fields of the only line of ``uid_map`` in the initial user namespace (user_namespaces(7))."""

_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39  # capability(7)


def missing_privilege() -> str | None:
    """
    Return a clause that names the capabilities this process lacks for BPF programs on uprobes.

    Return None if it has all.
    """
    effective = int(process_field(os.getpid(), "CapEff") or "0", 16)
    if effective >> _CAP_SYS_ADMIN & 1:
        return None
    wanted = {"CAP_BPF": _CAP_BPF, "CAP_PERFMON": _CAP_PERFMON}
    missing = [name for name, bit in wanted.items() if not effective >> bit & 1]
    return f"this user lacks {' and '.join(missing)}" if missing else None


def is_in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the initial one, where root lacks privileges."""
    try:
        return _USERS.read_text().split() != _ALL_USERS
    except OSError:
        return False  # a kernel without user namespaces
