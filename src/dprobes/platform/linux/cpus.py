"""
The CPUs of this machine: which there can be, which are online, and what the kernel says when one comes online.

Its messages are uevents: ``device_online`` in ``drivers/base/core.c`` sends one, and so does ``thaw_secondary_cpus`` in
``kernel/cpu.c`` after the machine was suspended.
"""

from __future__ import annotations

import os

__all__ = ["CpuNews", "cpu_limit", "online_cpus"]

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
    """Return one more than the highest number that a CPU of this machine can have."""
    try:
        with open(f"{_CPUS}/possible", encoding="ascii") as file:
            return int(file.read().replace("-", ",").split(",")[-1]) + 1
    except (OSError, ValueError):
        return os.cpu_count() or 1


class CpuNews:
    """The news of CPUs that come online, from now until ``close``; OSError if this process may not hear them."""

    def __init__(self) -> None:
        from dprobes.platform.linux.kernel_events import KernelEvents

        self._events = KernelEvents()

    @property
    def descriptor(self) -> int:
        """What can be read when there is news, of CPUs or of other devices."""
        return self._events.descriptor

    def arrived(self) -> list[int]:
        """Return the CPUs that have come online since the last call; all, if news was lost."""
        messages, is_lossy = self._events.drain()
        cpus = {cpu for message in messages if (cpu := _cpu_of(message)) is not None}
        return sorted(cpus.union(online_cpus() if is_lossy else ()))

    def close(self) -> None:
        """Hear no more."""
        self._events.close()


def _cpu_of(message: bytes) -> int | None:
    """Return the CPU that a message says has come online; None for other messages."""
    number = message.partition(b"\0")[0].removeprefix(_ONLINE)
    return int(number) if message.startswith(_ONLINE) and number.isdigit() else None
