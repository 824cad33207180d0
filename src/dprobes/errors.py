"""
All exceptions of DProbes, in one place so that no module imports another for its errors.

::

    DprobesError
    ├── SourceError         the user's program: carries its diagnostics
    ├── FormatError         malformed record, trace or compiled file: byte offset and what was expected
    ├── TargetError         module, symbol, process or debug file: missing, ambiguous, or of the wrong kind
    ├── EngineError         an engine cannot do what was asked
    │   ├── NotSupportedError   the engine, kernel or processor lacks the feature
    │   └── PrivilegeError      the feature exists, but not for this user
    ├── SinkError           a place where log records go
    │   └── RecordsRefusedError     it works, but does not want some of the records
    ├── ManagerError        the probe manager, or the way to it
    └── InternalError       a bug in DProbes

There is one class for each decision that a caller can make, not one for each message. A message is lower case,
without full stop, names the thing in quotes, and says what was expected and what was found. ``hint`` says what to do.
What is quoted may be anybody's, so a message has no character that disturbs a line or a terminal.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dprobes.escapes import escaped, escaped_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dprobes.source_text import Diagnostic

__all__ = [
    "DprobesError",
    "EngineError",
    "FormatError",
    "InternalError",
    "ManagerError",
    "NotSupportedError",
    "PrivilegeError",
    "RecordsRefusedError",
    "SinkError",
    "SourceError",
    "TargetError",
    "reason_of",
    "reason_of_number",
    "system_error",
]


class DprobesError(Exception):
    """Base of every error that DProbes raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = self._shown(message)
        self.hint = hint if hint is None else escaped(hint)
        super().__init__(self.message)

    def _shown(self, message: str) -> str:
        return escaped(message)


class SourceError(DprobesError):
    """
    Report that a probe program has errors; ``diagnostics`` holds all of them, warnings included.

    ``outline`` has what is right all the same and can be looked at: programs with its places, and empty handlers.
    """

    def __init__(self, diagnostics: Sequence[Diagnostic], outline: Sequence[Any] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.outline = tuple(outline)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    @classmethod
    def rendered(cls, text: str) -> SourceError:
        """Return the error of a program that another process has found wrong; only the text is known of it."""
        error = cls(())
        error.message = error._shown(text)
        error.args = (error.message,)
        return error

    def _shown(self, message: str) -> str:
        return escaped_lines(message)


class FormatError(DprobesError):
    """Report malformed binary data; ``offset`` is the byte position at which it was noticed."""

    def __init__(self, message: str, *, offset: int | None = None, hint: str | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})", hint=hint)
        self.offset = offset


class TargetError(DprobesError):
    """Report a module, symbol, process or debug file that is missing, ambiguous, or not what was expected."""


class EngineError(DprobesError):
    """Report that an engine could not insert, run or remove probepoints."""


class NotSupportedError(EngineError):
    """
    Report a feature that this engine, kernel or processor does not have.

    ``origin`` is the byte of the encoded program whose instruction needs it, if it is one.
    """

    origin: int | None = None

    def of_instruction(self, origin: int) -> NotSupportedError:
        """Say which instruction needs it, if nothing says so yet; return the error."""
        if self.origin is None and origin >= 0:
            self.origin = origin
        return self


class PrivilegeError(EngineError):
    """Report a feature that exists but is denied to this user."""


class SinkError(DprobesError):
    """
    Report a failure to open or write a sink.

    ``taken`` is how many records of a batch it had taken before: the first ones, unless ``left`` has the positions of
    all others. ``lost`` is how many that it had taken, of this or of earlier batches, are known to be lost;
    ``unmarked`` how many of which source, by its number, are to be marked where they are missing, before what comes
    next. ``wait`` is for how many seconds what is outside asks to be left alone.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        taken: int = 0,
        lost: int = 0,
        left: Sequence[int] | None = None,
        unmarked: Mapping[int, int] | None = None,
        wait: float = 0.0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.taken = taken
        self.lost = lost
        self.left = left
        self.unmarked = unmarked or {}
        self.wait = wait


class RecordsRefusedError(SinkError):
    """
    Report that what is outside does not want ``lost`` records, of this or of earlier batches.

    The sink works as before: no record of the batch comes again, and the next batch may come at once.
    """


class ManagerError(DprobesError):
    """Report that the probe manager cannot be reached or started, or refuses what was asked of it."""


class InternalError(DprobesError):
    """Report a bug in DProbes itself; the message may have several lines."""

    def _shown(self, message: str) -> str:
        return escaped_lines(message)


def reason_of(error: Exception) -> str:
    """Return why a system call failed, or what it did not take, as part of a message."""
    return ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()


def reason_of_number(number: int) -> str:
    """Return why a system call failed with an error number, as part of a message."""
    return os.strerror(number).lower()


def system_error(number: int, call: str | None = None) -> OSError:
    """Return the exception for an error number, as Python itself would raise it for the system call of a name."""
    reason = os.strerror(number)
    return OSError(number, reason if call is None else f"{call}: {reason}")
