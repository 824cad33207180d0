"""Files of compiled programs: which files are some, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.ppdf.model import Ppdf

__all__ = ["compiled_bytes", "is_compiled", "read_compiled"]


def is_compiled(path: Path) -> bool:
    """Return whether a file is a PPDF, be it a damaged one; what is not a regular file is not looked at."""
    from dprobes.ppdf.container import MAGIC

    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix == ".ppdf"
    except OSError:
        return False  # the reader of source text says what is wrong


def read_compiled(path: Path) -> Ppdf:
    """Return a PPDF; raise ``FormatError`` if it is none."""
    return _read_compiled(path)[0]


def compiled_bytes(path: Path) -> bytes:
    """Return the bytes of a PPDF, whatever a newer version has put into it; raise ``FormatError`` if it is none."""
    return _read_compiled(path)[1]


def _read_compiled(path: Path) -> tuple[Ppdf, bytes]:
    from dprobes.ppdf.container import SIZE_MAX
    from dprobes.ppdf.reader import decode

    with path.open("rb") as file:
        data = file.read(SIZE_MAX + 1)
    try:
        return decode(data), data
    except FormatError as error:
        raise FormatError(f"'{path}': {error.message}", hint=error.hint) from None
