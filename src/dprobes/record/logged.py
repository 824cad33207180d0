"""The header items of a record that carries them: numbers, and an error where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dprobes.errors import FormatError

if TYPE_CHECKING:
    from dprobes.record.layout import LogRecord

__all__ = ["LoggedItems"]

_T = TypeVar("_T")


class LoggedItems:
    """
    Give the header items of a record, each as what it is when it was logged.

    Asking for an item that the record lacks raises ``FormatError``: which ones records carry is for the session to say.
    """

    __slots__ = ("_record",)

    def __init__(self, record: LogRecord) -> None:
        self._record = record

    @property
    def major(self) -> int:
        """The major code."""
        return _there(self._record.major, "major")

    @property
    def minor(self) -> int:
        """The minor code."""
        return _there(self._record.minor, "minor")

    @property
    def cpu(self) -> int:
        """The CPU that was hit."""
        return _there(self._record.cpu, "cpu")

    @property
    def pid(self) -> int:
        """The process."""
        return _there(self._record.pid, "pid")

    @property
    def tid(self) -> int:
        """The thread."""
        return _there(self._record.tid, "tid")

    @property
    def uid(self) -> int:
        """The user."""
        return _there(self._record.uid, "uid")

    @property
    def cs(self) -> int:
        """The code segment."""
        return _there(self._record.cs, "cs")

    @property
    def ip(self) -> int:
        """The address of the instruction."""
        return _there(self._record.ip, "ip")

    @property
    def ss(self) -> int:
        """The stack segment."""
        return _there(self._record.ss, "ss")

    @property
    def sp(self) -> int:
        """The stack pointer."""
        return _there(self._record.sp, "sp")

    @property
    def time(self) -> int:
        """The time, CLOCK_MONOTONIC in nanoseconds."""
        return _there(self._record.time, "time")

    @property
    def process_name(self) -> str:
        """The name of the process."""
        return _there(self._record.process_name, "process_name")


def _there(value: _T | None, name: str) -> _T:
    if value is None:
        raise FormatError(
            f"the record carries no item '{name}'",
            hint=f"have it logged: items=Item.{name.upper()}, or --log of the command line",
        )
    return value
