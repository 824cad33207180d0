"""
Numbers about the running kernel that take long to find out, kept in a file until the next boot.

The file is a user's own, in the cache directory of the XDG Base Directory Specification. It is a text: the kernel's
boot id, and lines of a key and a number. What cannot be read or written is found out again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from dprobes.record.boot import BOOT_ID

__all__ = ["KeptAnswers"]


class KeptAnswers:
    """Look up numbers and add new ones; ``directory`` is by default the user's."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._path = (directory or _cache_directory()) / name
        self._known: dict[str, int] | None = None
        self._boot = ""

    def get(self, key: str) -> int | None:
        """Return the number kept under a key, None if there is none."""
        return self._read().get(key)

    def add(self, key: str, number: int) -> None:
        """Keep a number."""
        known = self._read()
        known[key] = number
        if not self._boot:
            return
        lines = [self._boot, *(f"{one} {value}" for one, value in known.items())]
        # Others may do the same at this moment; each writes a file of its own, and the last one stays.
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                draft.write_text("\n".join(lines) + "\n")
                draft.replace(self._path)
            finally:
                draft.unlink(missing_ok=True)

    def _read(self) -> dict[str, int]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                self._boot = BOOT_ID.read_text().strip()
                if self._path.stat().st_uid == os.geteuid():
                    boot, *lines = self._path.read_text().splitlines()
                    if boot == self._boot:
                        pairs = (line.rsplit(" ", 1) for line in lines)
                        self._known = {key: int(number) for key, number in pairs}
        return self._known


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if base.startswith("/") else os.path.expanduser("~/.cache")) / "dprobes"
