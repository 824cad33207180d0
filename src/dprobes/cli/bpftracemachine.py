"""What a conversion of a script of bpftrace asks about this machine."""

from __future__ import annotations

import contextlib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from dprobes.errors import DprobesError
from dprobes.lazypattern import lazy_pattern
from dprobes.target.kernel.tracepoints import KernelTracepoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ThisMachine"]

_EMPTY = frozenset({"libpthread", "libdl", "librt", "libutil"})
"""Libraries whose functions are in the C library since glibc 2.34; what is left of them is small."""

_SMALL = 32 << 10


_STRUCTURE = lazy_pattern(r"(struct|union) \w+ ?\*")


class ThisMachine:
    """This machine (``bpftrace.machine.Machine``)."""

    def __init__(self) -> None:
        self._tracepoints = KernelTracepoints()

    def library(self, name: str) -> str:
        """Return the name of the library of a short name, as the dynamic linker knows it."""
        from dprobes.target.ldcache import host_architecture, read_ld_cache

        libraries = {
            each.name: each.path
            for each in read_ld_cache()
            if each.name.startswith(f"{name}.so") and each.architecture == host_architecture()
        }
        if not libraries:
            return name
        found = min(libraries, key=lambda each: (len(each), each))
        with contextlib.suppress(OSError):
            if name in _EMPTY and Path(libraries[found]).stat().st_size < _SMALL:
                return "libc.so.6"
        return found

    def tracepoints(self, subsystem: str, pattern: str) -> Sequence[str]:
        """Return the names of tracepoints that match a pattern."""
        with contextlib.suppress(DprobesError, OSError):
            return sorted(name for name in self._tracepoints.names(subsystem) if fnmatchcase(name, pattern))
        return ()

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:
        """Return the fields of a tracepoint that are arrays, with their sizes."""
        with contextlib.suppress(DprobesError, OSError):
            fields = self._tracepoints.record_fields(subsystem, name).values()
            return {each.name: 0 if each.place else each.size for each in fields if each.is_array}
        return {}

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:
        """Return the fields of a tracepoint that are pointers to structures, with their types."""
        with contextlib.suppress(DprobesError, OSError):
            fields = self._tracepoints.record_fields(subsystem, name).values()
            types = {each.name: each.type_name.removeprefix("const ") for each in fields}
            return {field: type_ for field, type_ in types.items() if _STRUCTURE.fullmatch(type_)}
        return {}
