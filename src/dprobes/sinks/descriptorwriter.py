"""Write records to a descriptor that may take its time: a line, a pipe, a file."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from dprobes.errors import reason_of
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Written", "write_parts"]


@dataclass(frozen=True, slots=True)
class Written:
    """Say how many parts were written as a whole, how many bytes of the next one, and what the problem was, if any."""

    parts: int
    extra: int
    problem: str | None


def write_parts(descriptor: int, parts: Sequence[bytes], patience: float) -> Written:
    """Write parts to a descriptor that does not block; it is a problem if it takes nothing for ``patience`` seconds."""
    data = memoryview(b"".join(parts))
    written = 0
    while written < len(data):
        try:
            written += os.write(descriptor, data[written:])
        except BlockingIOError:
            if not _has_room(descriptor, patience):
                return _written(parts, written, f"nothing was taken for {patience:.0f} s")
        except OSError as error:
            return _written(parts, written, reason_of(error))
    return Written(len(parts), 0, None)


def _has_room(descriptor: int, patience: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(patience * 1000))  # also if nobody is at the other end any more: writing says so


def _written(parts: Sequence[bytes], written: int, problem: str) -> Written:
    taken = whole = 0
    while whole + len(parts[taken]) <= written:
        whole += len(parts[taken])
        taken += 1
    return Written(taken, written - whole, problem)
