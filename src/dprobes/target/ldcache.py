"""
The dynamic loader's cache, ``/etc/ld.so.cache``: which file a library name stands for.

Reads the format ``glibc-ld.so.cache1.1``, also behind the older table that some systems still write before it.
Rules: glibc, ``sysdeps/generic/dl-cache.h`` and ``ldconfig.h``.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from dprobes.errors import TargetError
from dprobes.lazydataclass import dataclass
from dprobes.target.elf.contents import file_contents

__all__ = ["LD_CACHE", "CachedLibrary", "host_architecture", "parse_ld_cache", "read_ld_cache"]

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
