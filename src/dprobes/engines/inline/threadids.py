"""
Where the C library of a process has the id of a thread: glibc says so for debuggers (nptl_db).

``_thread_db_pthread_tid`` in libc.so.6 describes the member ``tid`` of ``struct pthread``: bits, number of elements,
and the offset from the thread pointer, a 32-bit number each (nptl_db/db_info.c). These are the ids of the process's
own PID namespace; in a nested one threads have others here.
"""

from __future__ import annotations

import contextlib
import struct
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import process_field
from dprobes.errors import DprobesError

if TYPE_CHECKING:
    from dprobes.target.processmaps import Mapping

__all__ = ["tid_place_in"]

_SYMBOL = "_thread_db_pthread_tid"
_FIELD = struct.Struct("<III")


def tid_place_in(pid: int, mappings: list[Mapping]) -> int | None:
    """Return where threads of a process have their id, in bytes from the thread pointer; None if nobody knows."""
    if len(process_field(pid, "NSpid").split()) > 1:
        return None
    for mapping in mappings:
        if mapping.is_file and Path(mapping.path).name.startswith(("libc.so", "libc-", "libpthread")):
            with contextlib.suppress(DprobesError, OSError, struct.error):
                return _place(f"/proc/{pid}/root{mapping.path}", mapping.inode)
    return None


@lru_cache(16)
def _place(path: str, inode: int) -> int:  # noqa: ARG001 - another file at the same path is another answer
    from dprobes.target.location import Module

    module = Module.load(Path(path))
    offset = module.file_offset(module.address_of(_SYMBOL))
    with open(path, "rb") as file:
        file.seek(offset)
        bits, _, place = _FIELD.unpack(file.read(_FIELD.size))
    if bits != 32:
        raise DprobesError(f"{_SYMBOL} describes {bits} bits")
    return int(place)
