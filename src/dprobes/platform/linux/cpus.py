"""
CPUs of this machine: the possible and the online ones, and the kernel's messages about CPUs that come online.

The messages are uevents: ``device_online`` in ``drivers/base/core.c`` sends one, and so does ``thaw_secondary_cpus`` in
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
        """Return the CPUs that have come online since the last call; all online ones if messages were lost."""
        messages, is_lossy = self._events.drain()
        cpus = {cpu for message in messages if (cpu := _cpu_of(message)) is not None}
        return sorted(cpus.union(online_cpus() if is_lossy else ()))

    def close(self) -> None:
        """Stop receiving messages."""
        self._events.close()


def _cpu_of(message: bytes) -> int | None:
    """Return the CPU that has come online according to a message; None for other messages."""
    number = message.partition(b"\0")[0].removeprefix(_ONLINE)
    return int(number) if message.startswith(_ONLINE) and number.isdigit() else None
