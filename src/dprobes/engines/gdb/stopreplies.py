"""
Why the target has stopped: the stop reply packets (GDB manual, appendix E.3).

::

    S AA               T AA n:r;n:r;...          W AA [;process:pid]     X AA [;process:pid]     N     O text
      a signal           and registers, or keys    has exited              was ended by a signal   no threads left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import EngineError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Console", "Exited", "NoThreads", "StopReply", "Stopped", "ThreadId", "parse_stop_reply"]

_SIGNAL_DIGITS = 2


@dataclass(frozen=True, slots=True)
class ThreadId:
    """Name a thread as a stub does: ``process`` is 0 where it does not speak of processes."""

    process: int
    thread: int

    def __str__(self) -> str:
        return f"p{self.process:x}.{self.thread:x}" if self.process else f"{self.thread:x}"

    @classmethod
    def parse(cls, text: str) -> ThreadId:
        """Read ``p PID . TID`` or ``TID``, in hexadecimal; raise ``EngineError`` for anything else."""
        process, _, thread = text[1:].partition(".") if text.startswith("p") else ("0", "", text)
        try:
            return cls(int(process, 16), int(thread or "0", 16))
        except ValueError:
            raise EngineError(f"the stub named a thread '{text}'") from None


@dataclass(frozen=True, slots=True)
class Stopped:
    """
    The target has stopped with a signal, by the number that GDB gives it.

    ``registers`` are those that the stub told at once, by their numbers. ``reason`` is what else it is: ``watch``,
    ``rwatch`` or ``awatch`` with the address ``data``, ``swbreak``, ``hwbreak``, ``fork``, ``library`` and others.
    """

    signal: int
    thread: ThreadId | None
    registers: Mapping[int, bytes]
    reason: str = ""
    data: str = ""

    @property
    def address(self) -> int | None:
        """The address that was accessed, None if it is no such stop."""
        return int(self.data, 16) if self.reason in _WATCHED else None


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has come to its end: with a ``status``, or by a ``signal``."""

    status: int | None
    signal: int | None
    process: int | None = None


@dataclass(frozen=True, slots=True)
class NoThreads:
    """No thread is left that could go on."""


@dataclass(frozen=True, slots=True)
class Console:
    """The target has printed something; it goes on."""

    text: bytes


StopReply = Stopped | Exited | NoThreads | Console

_WATCHED = ("watch", "rwatch", "awatch")


def parse_stop_reply(payload: bytes) -> StopReply:
    """Read a stop reply; raise ``EngineError`` if it is none."""
    try:
        kind, rest = payload[:1].decode("ascii"), payload[1:].decode("ascii")
        match kind:
            case "S":
                return Stopped(int(rest[:_SIGNAL_DIGITS], 16), None, {})
            case "T":
                return _stopped(rest)
            case "W" | "X":
                code, _, keys = rest.partition(";")
                process = int(keys.removeprefix("process:"), 16) if keys.startswith("process:") else None
                number = int(code, 16)
                return Exited(number, None, process) if kind == "W" else Exited(None, number, process)
            case "N":
                return NoThreads()
            case "O" if rest != "K":
                return Console(bytes.fromhex(rest))
    except ValueError:
        pass
    raise EngineError(f"the stub's answer is no reason for a stop: {payload[:60]!r}")


def _stopped(text: str) -> Stopped:
    registers: dict[int, bytes] = {}
    thread: ThreadId | None = None
    reason = data = ""
    for pair in text[_SIGNAL_DIGITS:].split(";"):
        if not pair:
            continue
        key, colon, value = pair.partition(":")
        if not colon:
            raise ValueError(pair)
        if key == "thread":
            thread = ThreadId.parse(value)
        elif _is_number(key):
            registers[int(key, 16)] = bytes.fromhex(value)
        elif key in _WATCHED:
            reason, data = key, f"{int(value, 16):x}"
        elif key not in ("core", "threads", "thread-pcs") and not reason:
            reason, data = key, value
    return Stopped(int(text[:_SIGNAL_DIGITS], 16), thread, registers, reason, data)


def _is_number(key: str) -> bool:
    return bool(key) and all(character in "0123456789abcdefABCDEF" for character in key)
