"""
Lists of the kernel that take long to be made, kept in the user's cache directory for the next reader.

The kernel writes ``/proc/kallsyms`` and the lists of ftrace anew, line by line, for each who reads them. What they say
changes only with the boot and the modules that are loaded, but for code that the kernel generates, which has the names
of modules that are none: that is left out here. A file is::

    64 hex digits: the digest of what the list depends on │ newline │ the list
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dprobes.cachefiles import cache_directory, read_cached, write_cached
from dprobes.lazypattern import lazy_pattern
from dprobes.record.boot import boot_id

__all__ = ["read_list"]

_PROC_MODULES = Path("/proc/modules")
_SYS_MODULE = "/sys/module"
_DIGITS = 64
_BEGINNING = 2048
"""How many bytes of a list are read to see whether it says what it said: addresses may be hidden since."""
_GENERATED = lazy_pattern(rb"[^\n]*\t\[(?:bpf|__builtin__\w+)\]\n")


def read_list(path: Path) -> bytes:
    """Return what a list says but for generated code, kept or read now; OSError if the kernel gives none."""
    directory, name = cache_directory(), path.name
    state = _state(path)
    kept = read_cached(directory, name)
    if kept is not None and kept[: _DIGITS + 1] == state + b"\n" and _begins_so(path, kept):
        return kept[_DIGITS + 1 :]
    data = _without_generated(path.read_bytes())
    if _state(path) == state:  # else a module has come or gone meanwhile
        write_cached(directory, name, state + b"\n" + data)
    return data


def _state(path: Path) -> bytes:
    """Return a digest of the boot, of the list's name, and of the modules."""
    lines = [boot_id(), str(path)]
    try:
        modules = _PROC_MODULES.read_text().splitlines()
    except FileNotFoundError:
        modules = []  # a kernel without loadable modules
    for line in modules:
        # name, size, uses, users, state, address; the number of a directory in sysfs is that of one loading
        module, size, _, _, state, address = line.split()[:6]
        try:
            number = os.stat(f"{_SYS_MODULE}/{module}").st_ino  # noqa: PTH116 - a hundred of them
        except OSError:
            number = 0
        lines.append(f"{module} {size} {state} {address} {number}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest().encode()


def _begins_so(path: Path, kept: bytes) -> bool:
    with path.open("rb", buffering=0) as file:
        beginning = file.read(_BEGINNING)
    return bool(beginning) and kept.startswith(beginning, _DIGITS + 1)


def _without_generated(data: bytes) -> bytes:
    """Return a list without the lines of generated code, which are behind those of the kernel itself."""
    first = data.find(b"\t[")
    if first < 0:
        return data
    start = data.rfind(b"\n", 0, first) + 1
    return data[:start] + _GENERATED.sub(b"", data[start:])
