"""
Where the C library of a process has the id of a thread.

glibc says so for debuggers (nptl_db): ``_thread_db_pthread_tid`` in libc.so.6 describes the member ``tid`` of
``struct pthread``: bits, number of elements, and the offset from the thread pointer, a 32-bit number each
(nptl_db/db_info.c). musl, since 1.2.2, has it where its ``gettid`` takes it from (src/linux/gettid.c). These are the
ids of the process's own PID namespace; if that is a nested one, ``native.processpage`` has those of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.engines.linux.procfs import without_waiting
from dprobes.errors import DprobesError, TargetError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from dprobes.target.location import Module
    from dprobes.target.processmaps import Mapping

__all__ = ["tid_place_in", "tid_place_of"]

_SYMBOL = "_thread_db_pthread_tid"
_FIELD = struct.Struct("<III")

_LIBRARIES = ("libc.so", "libc-", "libpthread", "ld-musl-")
_LINKER = ("ld-", "ld.so")
"""How names of dynamic linkers begin: a program without one has its C library in itself."""
_GETTID = lazy_pattern(rb"(?:\xf3\x0f\x1e\xfa)?\x64\x48\x8b\x04\x25\0{4}\x8b(?:\x40(.)|\x80(.{4}))\xc3", re.DOTALL)
"""``mov rax, fs:[0]``, ``mov eax, [rax + N]`` and ``ret``, perhaps behind an ``endbr64``."""
_GETTID_SIZE = 20


def tid_place_in(pid: int, mappings: list[Mapping]) -> int | None:
    """Return where threads of a process have their id, in bytes from the thread pointer; None if nobody knows."""
    files = {mapping.path: mapping.inode for mapping in mappings if mapping.is_file}
    libraries = [path for path in files if Path(path).name.startswith(_LIBRARIES)]
    for path in libraries:
        if (place := _place(f"/proc/{pid}/root{path}", files[path])) is not None:
            return place
    is_dynamic = libraries or any(Path(path).name.startswith(_LINKER) for path in files)
    return None if is_dynamic or not files else _place(f"/proc/{pid}/exe", _inode_of(f"/proc/{pid}/exe"))


def _inode_of(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


@lru_cache(16)
def _place(path: str, inode: int) -> int | None:  # noqa: ARG001 - another file at the same path is another answer
    with contextlib.suppress(DprobesError, OSError, struct.error):
        return tid_place_of(Path(path))
    return None


def tid_place_of(path: Path) -> int | None:
    """Return where a C library has the id of a thread; None if it does not say so; raises as ``Module.load``."""
    from dprobes.target.location import Module

    module = Module.load(path)
    with contextlib.suppress(TargetError):
        bits, _, place = _FIELD.unpack(_read(path, module, _SYMBOL, _FIELD.size))
        return int(place) if bits == 32 else None
    found = _GETTID.match(_read(path, module, "gettid", _GETTID_SIZE))
    return None if found is None else int.from_bytes(found[1] or found[2], "little", signed=True)


def _read(path: Path, module: Module, symbol: str, size: int) -> bytes:
    """Return the first bytes of what a symbol is about."""
    with open(path, "rb", opener=without_waiting) as file:
        file.seek(module.file_offset(module.address_of(symbol)))
        return file.read(size)
