"""
The messages between a test and the agent in its guest.

Both ends run the same Python: a message is a pickled tuple after its size. The test sends ``(number, operation,
arguments)``. The agent sends ``(number, event, value)``: one ``RETURNED`` or ``FAILED`` for each request. Output of a
process (``STDOUT``, ``STDERR``, ``RESULT``) and its status (``EXITED``) have the number of the request that started it.
"""

from __future__ import annotations

import enum
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AGENT_PORT", "HEADER", "Call", "Command", "Event", "Task", "pack"]

AGENT_PORT = "/dev/vport0p1"
"""The first port of the first virtio-serial device."""

HEADER = struct.Struct("<I")


class Event(enum.IntEnum):
    RETURNED = enum.auto()
    FAILED = enum.auto()
    STDOUT = enum.auto()
    STDERR = enum.auto()
    RESULT = enum.auto()
    EXITED = enum.auto()


@dataclass(frozen=True)
class Command:
    """A program to execute; ``argv`` are its name and arguments."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A function to call; ``file`` is imported under the name ``module`` that it has in the test."""

    file: str
    module: str
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Task:
    """
    The work of a new process in the guest: a command, a call, or arguments of ``python -m dprobes``.

    These are executed in a forked process that has already imported the package.
    """

    what: Command | Call | tuple[str, ...]
    input: bytes | None = b""
    """Standard input; None is a pipe to which the test writes."""
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/root"
    user: int = 0


def pack(message: tuple[Any, ...]) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data
