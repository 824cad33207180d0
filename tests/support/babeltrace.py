"""Reading of CTF traces with babeltrace2, an independent implementation."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NEEDS_BABELTRACE = pytest.mark.skipif(shutil.which("babeltrace2") is None, reason="needs babeltrace2 (apt-get install)")

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "'": "\\'", "\\": "\\\\"}


def read_trace(directory: Path) -> list[str]:
    """Return babeltrace2's line for each event of a trace, in order of time; fail if it reports anything."""
    result = _babeltrace("--clock-seconds", "--no-delta", directory)
    assert result.stderr == ""
    return result.stdout.splitlines()


def discarded_in(directory: Path) -> int:
    """Return the number of discarded events in a trace, as babeltrace2 reports it."""
    result = _babeltrace("-c", "sink.text.details", "--params", 'compact=true,color="never"', directory)
    assert "may have discarded" not in result.stdout
    return sum(int(count) for count in re.findall(r"Discarded events \((\d+) events?\)", result.stdout))


def event_line(time: int, name: str, *scopes: Mapping[str, str]) -> str:
    """Return the line that babeltrace2 prints for an event; each of ``scopes`` maps names of fields to their text."""
    shown = ", ".join("{ " + ", ".join(f"{name} = {value}" for name, value in s.items()) + " }" for s in scopes)
    shown = shown.replace("{  }", "{ }")
    return f"[{time // 10**9}.{time % 10**9:09}] {platform.node()} {name}: {shown}"


def text_of(value: object, base: int = 10) -> str:
    """Return a value in the notation of babeltrace2; ``base`` is that of numbers."""
    match value:
        case int():
            return f"0x{value:X}" if base == 16 else f"0{value:o}" if base == 8 else str(value)
        case str():
            return '"' + "".join(_ESCAPES.get(c, c) for c in value) + '"'
        case bytes():
            return text_of(tuple(value), 16)
        case tuple():
            values = ", ".join(f"[{n}] = {text_of(one, base)}" for n, one in enumerate(value))
            return f"[ {values} ]" if values else "[ ]"
    raise TypeError(value)


def _babeltrace(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["babeltrace2", *arguments], capture_output=True, text=True, timeout=120, check=True)
