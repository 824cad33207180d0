"""A Python in a program that is linked with libpython, as a process in which all of four libraries are at work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from integration.support import Builder

__all__ = ["LIBRARIES", "library", "python_program"]

LIBRARIES = ("libc.so.6", "libpython3.11.so.1.0", "libcrypto.so.3", "libsqlite3.so.0")
_DIRECTORY = Path("/usr/lib/x86_64-linux-gnu")


def library(name: str) -> Path:
    """Return the file of a library."""
    path = _DIRECTORY / name
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return path.resolve()


def python_program(build: Builder) -> Path:
    """Return the program."""
    return build("embedding.c", str(library("libpython3.11.so.1.0")))
