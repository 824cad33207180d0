"""What the kernel refuses, as an error for people."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.errors import EngineError, reason_of_number

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PERF_REMEDY", "TOO_MANY_FILES", "explained"]

PERF_REMEDY = "run as root, or with the capabilities CAP_BPF and CAP_PERFMON; a container must allow perf_event_open(2)"
"""What to do about an event or a tracepoint that the kernel permits to nobody here."""

TOO_MANY_FILES = "maps, handlers and links take a descriptor each: raise the limit of open files (ulimit -n)"


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise ``EngineError`` for an OSError that names no file: a system call that the kernel refuses ``what`` with."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise EngineError(
            f"the kernel refuses {what}: {reason_of_number(error.errno or 0)}",
            hint="dprobes doctor says what this machine allows",
        ) from error
