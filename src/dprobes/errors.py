"""
All exceptions of DProbes, in one place so that no module imports another for its errors.

::

    DprobesError
    ├── SourceError         the user's program: carries its diagnostics
    ├── FormatError         malformed record, trace or compiled file: byte offset and what was expected
    ├── TargetError         module, symbol, process or debug file: missing, ambiguous, or of the wrong kind
    ├── EngineError         an engine cannot do what was requested
    │   ├── NotSupportedError   the engine, kernel or processor lacks the feature
    │   └── PrivilegeError      the feature exists, but not for this user
    ├── SinkError           a log target failed
    │   └── RecordsRefusedError     it works, but refuses some of the records
    ├── ManagerError        the probe manager, or the connection to it
    └── InternalError       a bug in DProbes

There is one class for each decision that a caller can make, not one for each message. A message is lower case, without
full stop, names the thing in quotes, and states what was expected and what was found. ``hint`` proposes an action.
Quoted text may come from other users, so characters that disturb a line or a terminal are escaped.
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
    """Base class of the errors that DProbes reports to users, as opposed to errors in its own code."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = self._shown(message)
        self.hint = hint if hint is None else escaped(hint)
        super().__init__(self.message)

    def _shown(self, message: str) -> str:
        return escaped(message)


class SourceError(DprobesError):
    """
    Errors in a probe program; ``diagnostics`` contains all of them, warnings included.

    ``outline`` has the parts of the program without errors, for inspection: definitions with their places and empty
    handlers.
    """

    def __init__(self, diagnostics: Sequence[Diagnostic], outline: Sequence[Any] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.outline = tuple(outline)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    @classmethod
    def rendered(cls, text: str) -> SourceError:
        """Return the error of a program that another process has compiled; ``text`` is the rendered diagnostics."""
        error = cls(())
        error.message = error._shown(text)
        error.args = (error.message,)
        return error

    def _shown(self, message: str) -> str:
        return escaped_lines(message)


class FormatError(DprobesError):
    """Malformed binary data; ``offset`` is the byte position of the problem, None if it is unknown."""

    def __init__(self, message: str, *, offset: int | None = None, hint: str | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset})", hint=hint)
        self.offset = offset


class TargetError(DprobesError):
    """A module, symbol, process or debug file that is missing, ambiguous, or of the wrong kind."""


class EngineError(DprobesError):
    """A failure of an engine to insert, run or remove probepoints."""


class NotSupportedError(EngineError):
    """
    A feature that this engine, kernel or processor does not have.

    ``origin`` is the offset in the encoded program of the instruction that needs the feature; None if no single
    instruction does.
    """

    origin: int | None = None

    def of_instruction(self, origin: int) -> NotSupportedError:
        """Set ``origin``, the offset of the instruction that needs the feature, unless it is set; return the error."""
        if self.origin is None and origin >= 0:
            self.origin = origin
        return self


class PrivilegeError(EngineError):
    """A feature exists on this machine, but the user lacks the privileges for it."""


class SinkError(DprobesError):
    """
    A failure to open or write a sink.

    ``taken`` is the number of records of the batch that the sink has accepted: the first ones, unless ``left`` has the
    positions of all others. ``lost`` is the number of accepted records, of this or of earlier batches, that are known
    to be lost. ``unmarked`` maps source numbers to numbers of lost records that are still to be reported in the output,
    before the next records. ``wait`` is the number of seconds for which the receiver asks not to be retried.
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
    A refusal by the receiver of ``lost`` records, of this or of earlier batches.

    The sink still works: no record of the batch is passed again, and the next batch may follow at once.
    """


class ManagerError(DprobesError):
    """A probe manager that cannot be reached or started, or that refuses a request."""


class InternalError(DprobesError):
    """A bug in DProbes itself; the message may have several lines."""

    def _shown(self, message: str) -> str:
        return escaped_lines(message)


def reason_of(error: Exception) -> str:
    """Return the reason of an error, as part of a message: that of a failed system call, or else its text."""
    return ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()


def reason_of_number(number: int) -> str:
    """Return the reason of a failed system call by its error number, as part of a message."""
    return os.strerror(number).lower()


def system_error(number: int, call: str | None = None) -> OSError:
    """Return the exception that Python itself raises for an error number of the system call ``call``."""
    reason = os.strerror(number)
    return OSError(number, reason if call is None else f"{call}: {reason}")
