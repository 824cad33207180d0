"""
Numbers about the running kernel that take long to find out, kept in a file until the next boot.

The file is one in the user's cache directory (``cachefiles``). It is a text: the kernel's boot id, and lines of a key
and a number. What cannot be read or written is found out again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dprobes.cachefiles import cache_directory, read_cached, write_cached
from dprobes.record.boot import BOOT_ID

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KeptAnswers"]


class KeptAnswers:
    """Look up numbers and add new ones; ``directory`` is by default the user's."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._directory = cache_directory() if directory is None else str(directory)
        self._name = name
        self._known: dict[str, int] | None = None
        self._boot = ""

    def get(self, key: str) -> int | None:
        """Return the number kept under a key, None if there is none."""
        return self._read().get(key)

    def add(self, key: str, number: int) -> None:
        """Keep a number."""
        known = self._read()
        known[key] = number
        if self._boot:
            lines = [self._boot, *(f"{one} {value}" for one, value in known.items())]
            write_cached(self._directory, self._name, ("\n".join(lines) + "\n").encode())

    def _read(self) -> dict[str, int]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                self._boot = BOOT_ID.read_text().strip()
                boot, *lines = (read_cached(self._directory, self._name) or b"").decode().splitlines()
                if boot == self._boot:
                    pairs = (line.rsplit(" ", 1) for line in lines)
                    self._known = {key: int(number) for key, number in pairs}
        return self._known
