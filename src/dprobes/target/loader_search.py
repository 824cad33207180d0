"""
From a command to the file that it runs, as ``execve`` and the shell find it: ``PATH``, then ``#!`` lines.

Knows nothing of what is inside a program. Rules: execve(2), "Interpreter scripts"; env(1) for ``#!/usr/bin/env NAME``.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from dprobes.errors import TargetError
from dprobes.target.elf.file_contents import file_contents, file_head

__all__ = ["CachedLibrary", "executable_of", "host_architecture", "parse_ld_cache", "read_ld_cache"]

# The dynamic loader's cache, ``/etc/ld.so.cache``: which file a library name stands for.
#
# Reads the format ``glibc-ld.so.cache1.1``, also behind the older table that some systems still write before it.
# Rules: glibc, ``sysdeps/generic/dl-cache.h`` and ``ldconfig.h``.


LD_CACHE = Path("/etc/ld.so.cache")
"""Where ldconfig writes the cache."""

_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("=20sII20x")  # magic, number of entries, size of strings, flags and extensions
_ENTRY = struct.Struct("=iIIIQ")  # flags, offset of name, offset of path, OS version, hardware capabilities
_FLAG_ELF = 0xFF  # the low byte says which libc: 3 for glibc 2
_ELF_LIBC6 = 3
_ARCHITECTURES = {0x0000: "i386", 0x0300: "x86_64", 0x0400: "s390x", 0x0500: "ppc64", 0x0A00: "aarch64"}
_HOSTS = {"i486": "i386", "i586": "i386", "i686": "i386", "ppc64le": "ppc64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class CachedLibrary:
    """Say that programs for ``architecture`` get the file ``path`` when they need ``name``."""

    name: str
    path: str
    architecture: str
    hardware_specific: bool


def host_architecture() -> str:
    """Return the architecture of this machine, named as in ``ElfFile.machine``."""
    machine = os.uname().machine
    return _HOSTS.get(machine, machine)


def parse_ld_cache(data: bytes) -> list[CachedLibrary]:
    """Return the libraries in the bytes of a cache file, in its order; empty if it has another format."""
    start = data.find(_MAGIC)
    if start < 0 or len(data) < start + _HEADER.size:
        return []
    _, count, _ = _HEADER.unpack_from(data, start)
    entries = data[start + _HEADER.size : start + _HEADER.size + count * _ENTRY.size]
    whole = memoryview(entries)[: len(entries) - len(entries) % _ENTRY.size]
    found = []
    for flags, name, path, _, hardware in _ENTRY.iter_unpack(whole):
        # On i386 the entries of 32-bit glibc have no architecture bits at all; foreign ones are left out.
        architecture = _ARCHITECTURES.get(flags & 0xFF00)
        if flags & _FLAG_ELF == _ELF_LIBC6 and architecture is not None:
            library = CachedLibrary(
                _string(data, start + name), _string(data, start + path), architecture, hardware != 0
            )
            if library.name and library.path.startswith("/"):
                found.append(library)
    return found


def read_ld_cache(path: Path = LD_CACHE) -> list[CachedLibrary]:
    """Return the libraries in the cache file ``path``; empty if there is none."""
    try:
        return parse_ld_cache(file_contents(path, "the dynamic loader's cache")[:])
    except TargetError:
        return []


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset)
    return data[offset:end].decode("utf-8", "surrogateescape") if end >= 0 else ""


_SCRIPT_LINE = 256  # bytes: BINPRM_BUF_SIZE
_MAX_SCRIPTS = 5  # scripts that are each other's interpreters


def executable_of(command: str | os.PathLike[str]) -> Path:
    """
    Return the file that runs when ``command`` is started, with symbolic links followed.

    For a script that is its interpreter; for ``#!/usr/bin/env NAME`` it is the program that ``env`` starts.
    """
    name = os.fspath(command)
    path = _find(name)
    for _ in range(_MAX_SCRIPTS):
        interpreter = _interpreter(path)
        if interpreter is None:
            return path.resolve()
        try:
            path = _find(interpreter)
        except TargetError as e:
            raise TargetError(f"the interpreter of '{path}' cannot be run: {e.message}", hint=e.hint) from e
    raise TargetError(f"'{name}' cannot be run: its interpreters are scripts, more than {_MAX_SCRIPTS} deep")


def _find(name: str) -> Path:
    if not name or "\0" in name:
        raise TargetError(f"command {name!r} is not a file name")
    if "/" not in name:
        import shutil

        found = shutil.which(name)
        if found is None:
            raise TargetError(f"command '{name}' is not found", hint="write its path, or add its directory to PATH")
        return Path(found)
    path = Path(name)
    try:
        if path.is_dir():
            raise TargetError(f"'{name}' is a directory, expected a program")
        if not path.exists():
            raise TargetError(f"'{name}' does not exist")
    except PermissionError as e:
        raise TargetError(f"'{name}' cannot be run: permission denied") from e
    if not os.access(path, os.X_OK):
        raise TargetError(f"'{name}' is not executable", hint=f"allow it with chmod +x {name}")
    return path


def _interpreter(path: Path) -> str | None:
    """Return what the ``#!`` line of a script starts, or None for a file that is no script."""
    try:
        head = file_head(path, _SCRIPT_LINE)
    except TargetError:
        return None  # a program may be executable without being readable
    if not head.startswith(b"#!"):
        return None
    words = os.fsdecode(head[2:].partition(b"\n")[0]).strip(" \t").split(None, 1)
    if not words:
        raise TargetError(f"'{path}' names no interpreter after '#!'")
    if os.path.basename(words[0]) != "env" or len(words) == 1:  # noqa: PTH119 - text, not a path to look at
        return words[0]
    return _started_by_env(words[1]) or words[0]


def _started_by_env(arguments: str) -> str | None:
    """Return the program in the argument of ``env``; the kernel passes all of it as one word, ``-S`` splits it."""
    words = arguments.split()
    if words[0].startswith(("-S", "--split-string")):
        words[0] = words[0].removeprefix("-S").removeprefix("--split-string").removeprefix("=")
        return next((word for word in words if word and not word.startswith("-") and "=" not in word), None)
    return arguments.strip()
