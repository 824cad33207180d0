"""
What the kernel has made of kprobes: calls of ftrace, jumps, or breakpoints, by its list of them in debugfs.

It makes jumps some time after kprobes were registered, and takes them back where somebody else comes near.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

__all__ = ["KprobeList", "parse_kprobes"]

_LIST = Path("/sys/kernel/debug/kprobes/list")
_INTERVAL = 1.0
"""Seconds for which a list is good: there may be thousands of lines in it."""
_ENDBR = 4
_WAYS = {"FTRACE": "ftrace", "OPTIMIZED": "jump"}


class KprobeList:
    """The list, as it was when somebody last looked."""

    def __init__(self, path: Path = _LIST) -> None:
        self._path = path
        self._ways: dict[int, str] = {}
        self._read = float("-inf")
        self._is_last = False

    def look(self, *, is_last: bool = False) -> None:
        """Read the list, if that was not done a moment ago; what was found when it was ``is_last`` stays."""
        now = time.monotonic()
        if self._is_last or (now - self._read < _INTERVAL and not is_last):
            return
        self._read, self._is_last = now, is_last
        try:
            self._ways = parse_kprobes(self._path.read_text())
        except OSError:
            self._ways = {}  # without debugfs nobody tells

    def way(self, address: int) -> str | None:
        """Return what became of the kprobe at an address, or behind the landing pad there; None if not known."""
        return self._ways.get(address) or self._ways.get(address + _ENDBR)


def parse_kprobes(text: str) -> dict[int, str]:
    """
    Return what became of kprobes, by their addresses.

    A line is ``ADDRESS  k|r  NAME+DISTANCE  MODULE  [FLAG]...`` (``report_probe`` in kernel/kprobes.c).
    """
    found = {}
    for line in text.splitlines():
        address, _, rest = line.partition(" ")
        flags = re.findall(r"\[(\w+)\]", rest)
        if "GONE" not in flags and "DISABLED" not in flags:
            found[int(address, 16)] = next((_WAYS[flag] for flag in flags if flag in _WAYS), "breakpoint")
    return found
