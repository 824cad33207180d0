"""The verb ``convert``, and the converter's queries about this machine."""

from __future__ import annotations

import contextlib
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dprobes.cli import console
from dprobes.cli.console import print_lines
from dprobes.errors import DprobesError, reason_of
from dprobes.target.kernel.tracepoints import KernelTracepoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ThisMachine"]

_EMPTY = frozenset({"libpthread", "libdl", "librt", "libutil"})
"""Libraries whose functions are in the C library since glibc 2.34. The remaining files are small."""

_SMALL = 32 << 10


_STRUCTURE = re.compile(r"(struct|union) \w+ ?\*")


class ThisMachine:
    """The tracepoints of this machine, as the converter queries them (``bpftrace.script_place.Machine``)."""

    def __init__(self) -> None:
        self._tracepoints = KernelTracepoints()

    def library(self, name: str) -> str:
        """Return the full name of a library with a short name, as found by the dynamic linker."""
        from dprobes.target.module_lookup import host_architecture, read_ld_cache

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
        """Return the names of the tracepoints of a subsystem that match a shell pattern."""
        with contextlib.suppress(DprobesError, OSError):
            return sorted(name for name in self._tracepoints.names(subsystem) if fnmatchcase(name, pattern))
        return ()

    def arrays(self, subsystem: str, name: str) -> Mapping[str, int]:
        """Return the array fields of tracepoint ``SUBSYSTEM:NAME`` in tracefs: field name to size in bytes."""
        with contextlib.suppress(DprobesError, OSError):
            fields = self._tracepoints.record_fields(subsystem, name).values()
            return {each.name: 0 if each.place else each.size for each in fields if each.is_array}
        return {}

    def pointers(self, subsystem: str, name: str) -> Mapping[str, str]:
        """Return the pointer fields of tracepoint ``SUBSYSTEM:NAME`` in tracefs: field name to structure type."""
        with contextlib.suppress(DprobesError, OSError):
            fields = self._tracepoints.record_fields(subsystem, name).values()
            types = {each.name: each.type_name.removeprefix("const ") for each in fields}
            return {field: type_ for field, type_ in types.items() if _STRUCTURE.fullmatch(type_)}
        return {}


# The verb ``convert``: a script of bpftrace as a program in DProbes C.


@click.command("convert")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True), required=False)
@click.option("-e", "text", metavar="TEXT", help="Convert this script instead of a file.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the program to FILE.")
def convert_command(file: Path | None, text: str | None, output: Path | None) -> int:
    """
    Convert FILE, a script of bpftrace, to DProbes C, and print the program.

    Differences are noted. A construct without an equivalent is an error with its position, and no program is printed.
    A comment at the top of the program shows the command that runs it.
    """
    from dprobes.bpftrace.script_conversion import convert
    from dprobes.diagnostics import Diagnostics
    from dprobes.source_text import SourceFile

    if (text is None) == (file is None):
        raise click.UsageError("name the file of a script, or give its text with -e TEXT")
    source = SourceFile("-e", text) if text is not None else SourceFile(str(file), _read(file or Path("-")))
    diagnostics = Diagnostics()
    converted = convert(source, ThisMachine(), diagnostics)
    if len(diagnostics):
        console.write(diagnostics.render())
    name = output.name if output is not None else "FILE.dpc"
    head = f"//   {' '.join(('dprobes run', name, *converted.options))}"
    program = (
        f"// Converted from {'a script' if text is not None else source.name} of bpftrace\n{head}\n{converted.text}"
    )
    if output is None:
        print_lines(program.splitlines())
        return 0
    try:
        output.write_text(program, encoding="utf-8")
    except OSError as error:
        raise DprobesError(f"cannot write '{output}': {reason_of(error)}") from error
    return 0


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode()
    except OSError as error:
        raise DprobesError(f"cannot read '{file}': {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise DprobesError(f"'{file}' is not text: byte {error.start} is not UTF-8") from error
