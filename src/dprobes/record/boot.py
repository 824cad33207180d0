"""What tells this start of the machine from others."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["BOOT_ID", "boot_id"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The file with the number that the kernel makes up at each start (random(4))."""


def boot_id() -> str:
    """Return the number of this start; nothing if the kernel does not say."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""
