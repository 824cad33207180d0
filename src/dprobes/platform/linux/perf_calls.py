"""
perf_event_open(2) through ctypes. No other file of the engine makes this system call.

x86-64 Linux only. Layouts and numbers are those of ``include/uapi/linux/perf_event.h`` and
``include/uapi/linux/hw_breakpoint.h``. Every function raises OSError with the kernel's errno. An event runs a BPF
program and takes no samples. It is disabled until it is enabled, and exists until its descriptor is closed. The
exception is the event of ``open_process_news``: it is enabled, and its records are read.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from enum import IntFlag
from typing import NamedTuple

from dprobes.errors import system_error
from dprobes.platform.linux.call_proxy import call_in_proxy

__all__ = [
    "Access",
    "ProbeUnit",
    "disable",
    "enable",
    "move_breakpoint",
    "open_breakpoint",
    "open_counter",
    "open_cpu_clock",
    "open_cpu_counter",
    "open_process_news",
    "open_uprobe",
    "read_counter",
    "uprobe_unit",
]

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ulong,
)
_syscall.restype = ctypes.c_long

_SYS_PERF_EVENT_OPEN = 298
_FLAG_FD_CLOEXEC = 8

_TYPE_SOFTWARE = 1
_TYPE_TRACEPOINT = 2
_TYPE_BREAKPOINT = 5
_SOFTWARE_CPU_CLOCK = 0

_DISABLED = 1 << 0
_INHERIT = 1 << 1
_EXCLUDE_KERNEL = 1 << 5
_EXCLUDE_HYPERVISOR = 1 << 6
_EXCLUDE_IDLE = 1 << 7
_USER_ONLY = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR

#   0 u32 type, size; u64 config, sample_period or sample_freq, sample_type, read_format, the flags above
#  48 u32 wakeup_events, bp_type; u64 bp_addr or config1, bp_len or config2
_ATTRIBUTES = struct.Struct("=IIQQ16xQ4xIQQ56x")

_SOFTWARE_DUMMY = 9
_MAPPINGS = 1 << 8
_NAMES = 1 << 9
_TASKS = 1 << 13
_EACH_HAS_TIME = 1 << 18
_MAPPINGS_BY_FILE = 1 << 23
_NAMES_BY_EXEC = 1 << 24
_OWN_CLOCK = 1 << 25
_SAMPLE_TIME = 1 << 2

#   0 u32 type, size; u64 config, sample_period, sample_type, read_format, the flags above
#  92 s32 clockid
_WATCH_ATTRIBUTES = struct.Struct("=IIQQQQQ44xi32x")

_IOC_ENABLE = 0x2400
_IOC_DISABLE = 0x2401
_IOC_MODIFY_ATTRIBUTES = 0x4008240B


def _attributes(
    kind: int, config: int, period: int, flags: int, access: int, config1: int, config2: int
) -> ctypes.Array[ctypes.c_char]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _ATTRIBUTES.pack_into(buffer, 0, kind, _ATTRIBUTES.size, config, period, flags, access, config1, config2)
    return buffer


def _open(
    kind: int,
    *,
    pid: int,
    cpu: int,
    config: int = 0,
    period: int = 1,
    flags: int = 0,
    access: int = 0,
    config1: int = 0,
    config2: int = 0,
) -> int:
    attributes = _attributes(kind, config, period, _DISABLED | flags, access, config1, config2)
    result: int = _syscall(_SYS_PERF_EVENT_OPEN, ctypes.addressof(attributes), pid, cpu, -1, _FLAG_FD_CLOEXEC)
    if result < 0:
        number = ctypes.get_errno()
        raise system_error(number, "perf_event_open")
    return result


class ProbeUnit(NamedTuple):
    """
    Parameters of the kernel's PMU for uprobes or kprobes: its type, and positions of bits in ``config``.

    ``return_bit`` selects returns. ``counter_bit`` is the lowest bit of a counter's file offset; it is None if the
    kernel does not support counters.
    """

    type: int
    return_bit: int
    counter_bit: int | None = None


_UNITS = "/sys/bus/event_source/devices"


def uprobe_unit() -> ProbeUnit:
    """Return the parameters of uprobe events; raise FileNotFoundError if the kernel has no uprobes."""
    return _probe_unit("uprobe")


def kprobe_unit() -> ProbeUnit:
    """Return the parameters of kprobe events; raise FileNotFoundError if the kernel has no kprobes."""
    return _probe_unit("kprobe")


def _probe_unit(name: str) -> ProbeUnit:
    with open(f"{_UNITS}/{name}/type", encoding="ascii") as file:
        kind = int(file.read())
    with open(f"{_UNITS}/{name}/format/retprobe", encoding="ascii") as file:
        return_bit = int(file.read().removeprefix("config:"))
    try:
        with open(f"{_UNITS}/{name}/format/ref_ctr_offset", encoding="ascii") as file:
            counter_bit: int | None = int(file.read().removeprefix("config:").partition("-")[0])
    except FileNotFoundError:
        counter_bit = None
    return ProbeUnit(kind, return_bit, counter_bit)


def open_uprobe(
    unit: ProbeUnit, path: str | bytes, offset: int, *, pid: int = -1, is_return: bool = False, counter: int = 0
) -> int:
    """
    Open a perf event for a uprobe at an offset of a file, on all CPUs, and return its descriptor.

    Only the process ``pid`` is probed; -1 selects all processes. With ``is_return``, the returns of the function at the
    offset are hits. ``counter`` is the file offset of a 16-bit counter, or 0 for none; the kernel increments it as long
    as the uprobe exists. Raise OSError if the kernel has no uprobes, or does not support counters.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    config = is_return << unit.return_bit
    if counter:
        if unit.counter_bit is None or counter >> 32:
            raise system_error(errno.EOPNOTSUPP)
        config |= counter << unit.counter_bit
    attributes = _attributes(unit.type, config, 1, _DISABLED, 0, ctypes.addressof(name), offset)
    cpu = -1 if pid >= 0 else 0
    # A process killed while it attaches uprobes would leave them.
    return call_in_proxy(_SYS_PERF_EVENT_OPEN, ctypes.addressof(attributes), pid, cpu, -1, _FLAG_FD_CLOEXEC)


def open_kprobe(unit: ProbeUnit, address: int, *, is_return: bool = False) -> int:
    """
    Return the descriptor of a kprobe event at a kernel address, which is for all CPUs.

    Raise OSError if the kernel refuses the event.
    """
    attributes = _attributes(unit.type, is_return << unit.return_bit, 1, _DISABLED, 0, 0, address)
    result: int = _syscall(_SYS_PERF_EVENT_OPEN, ctypes.addressof(attributes), -1, 0, -1, _FLAG_FD_CLOEXEC)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"perf_event_open: {os.strerror(number)}")
    return result


def open_tracepoint(number: int) -> int:
    """
    Return the descriptor of a perf event for a tracepoint, by its number in tracefs.

    A BPF program on it runs for hits on all CPUs.
    """
    return _open(_TYPE_TRACEPOINT, pid=-1, cpu=0, config=number)


class Access(IntFlag):
    """Accesses that a breakpoint watches (HW_BREAKPOINT_*)."""

    READ = 1
    WRITE = 2
    EXECUTE = 4


_EXECUTE_LENGTH = 8
"""Length in bytes of an execute breakpoint: sizeof(long), see ``arch_build_bp_info``."""


def open_breakpoint(
    address: int, size: int, access: Access, *, pid: int = -1, cpu: int = -1, inherit: bool = False
) -> int:
    """
    Open a perf event for a hardware breakpoint in one thread (``pid``) or on one CPU, and return its descriptor.

    At a kernel address only accesses by the kernel are hits, at a user address only accesses in user mode. ``size`` is
    1, 2, 4 or 8 bytes, and the address a multiple of it; for EXECUTE it is ignored. With ``inherit``, threads and
    processes that the thread starts are watched, too. Raise OSError, with ENOSPC if all four breakpoints are in use.
    """
    flags = (0 if address >> 63 else _USER_ONLY) | (_INHERIT if inherit else 0)
    length = _watched_length(size, access)
    return _open(_TYPE_BREAKPOINT, pid=pid, cpu=cpu, flags=flags, access=access, config1=address, config2=length)


def _watched_length(size: int, access: Access) -> int:
    return _EXECUTE_LENGTH if access is Access.EXECUTE else size


def move_breakpoint(event_fd: int, address: int, size: int, access: Access) -> None:
    """
    Move the breakpoint of an event to another address, whether the event is enabled or not.

    ``size`` and ``access`` must be those with which ``open_breakpoint`` opened the event, without ``inherit``. Since
    Linux kernel commit 32ff77e8cc9e ("perf/core: Implement fast breakpoint modification via _IOC_MODIFY_ATTRIBUTES")
    (in v4.17).
    """
    length = _watched_length(size, access)
    attributes = _attributes(_TYPE_BREAKPOINT, 0, 1, _USER_ONLY, access, address, length)
    fcntl.ioctl(event_fd, _IOC_MODIFY_ATTRIBUTES, bytes(attributes))


def open_cpu_clock(cpu: int, period: int) -> int:
    """Return the descriptor of a perf event that takes a sample on one CPU every ``period`` nanoseconds."""
    return _open(_TYPE_SOFTWARE, pid=-1, cpu=cpu, config=_SOFTWARE_CPU_CLOCK, period=period)


def open_cpu_counter(cpu: int, kind: int, config: int, period: int) -> int:
    """
    Open a perf event that takes a sample at each ``period``-th event on one CPU; return its descriptor.

    CPU time in which the CPU is idle does not count. ``kind`` and ``config`` are members of ``struct perf_event_attr``.
    Errors are those of ``open_counter``.
    """
    flags = _EXCLUDE_IDLE if kind == _TYPE_SOFTWARE else 0  # for task-clock; PMUs of AArch64 refuse the flag
    return _open(kind, pid=-1, cpu=cpu, config=config, period=period, flags=flags)


_TIME_ENABLED, _TIME_RUNNING = 1 << 0, 1 << 1
_READING = struct.Struct("=QQQ")


def open_counter(kind: int, config: int, *, tid: int = -1, cpu: int = -1) -> int:
    """
    Open a perf event that counts from now on, and return its descriptor.

    It counts in the kernel and in user mode, either in the thread ``tid``, or (-1) in all threads on one CPU. ``kind``
    and ``config`` are members of ``struct perf_event_attr``. OSError has ENOENT or EOPNOTSUPP if the machine does not
    have the event, and EACCES if the user may not count in the kernel (``kernel.perf_event_paranoid``).
    """
    attributes = ctypes.create_string_buffer(_WATCH_ATTRIBUTES.size)
    reads = _TIME_ENABLED | _TIME_RUNNING
    _WATCH_ATTRIBUTES.pack_into(attributes, 0, kind, _WATCH_ATTRIBUTES.size, config, 0, 0, reads, 0, 0)
    result: int = _syscall(_SYS_PERF_EVENT_OPEN, ctypes.addressof(attributes), tid, cpu, -1, _FLAG_FD_CLOEXEC)
    if result < 0:
        raise system_error(ctypes.get_errno(), "perf_event_open")
    return result


def read_counter(event_fd: int) -> int | None:
    """Return the count of a counter, or None if it was not counting all the time, because other events used the PMU."""
    value, enabled, running = _READING.unpack(os.read(event_fd, _READING.size))
    return int(value) if enabled == running else None


def open_process_news(cpu: int) -> int:
    """
    Return the descriptor of an enabled event for code mappings, execs and forks on a CPU, with CLOCK_MONOTONIC times.

    The caller maps its ring buffer of records with mmap(2) (perf_event_open(2)).
    """
    flags = _MAPPINGS | _NAMES | _TASKS | _EACH_HAS_TIME | _MAPPINGS_BY_FILE | _NAMES_BY_EXEC | _OWN_CLOCK
    attributes = ctypes.create_string_buffer(_WATCH_ATTRIBUTES.size)
    size, clock = _WATCH_ATTRIBUTES.size, time.CLOCK_MONOTONIC
    _WATCH_ATTRIBUTES.pack_into(attributes, 0, _TYPE_SOFTWARE, size, _SOFTWARE_DUMMY, 0, _SAMPLE_TIME, 0, flags, clock)
    result: int = _syscall(_SYS_PERF_EVENT_OPEN, ctypes.addressof(attributes), -1, cpu, -1, _FLAG_FD_CLOEXEC)
    if result < 0:
        raise system_error(ctypes.get_errno(), "perf_event_open")
    return result


def disable(event_fd: int) -> None:
    """Disable a perf event, so that it no longer counts or hits."""
    fcntl.ioctl(event_fd, _IOC_DISABLE, 0)


def enable(event_fd: int) -> None:
    """Enable a perf event: it counts, or its breakpoint can be hit, from now on."""
    fcntl.ioctl(event_fd, _IOC_ENABLE, 0)
