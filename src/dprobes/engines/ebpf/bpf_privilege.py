"""Privileges for BPF programs that this user lacks."""

from __future__ import annotations

import os
from pathlib import Path

from dprobes.platform.linux.procfs import process_field

__all__ = ["is_in_user_namespace", "missing_privilege"]

_USERS = Path("/proc/self/uid_map")
_ALL_USERS = ["0", "0", "4294967295"]
"""Fields of the only line of ``uid_map`` in the initial user namespace (user_namespaces(7))."""

_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39  # capability(7)


def missing_privilege() -> str | None:
    """Return a clause about the missing capabilities for BPF programs on uprobes; None if none is missing."""
    effective = int(process_field(os.getpid(), "CapEff") or "0", 16)
    if effective >> _CAP_SYS_ADMIN & 1:
        return None
    wanted = {"CAP_BPF": _CAP_BPF, "CAP_PERFMON": _CAP_PERFMON}
    missing = [name for name, bit in wanted.items() if not effective >> bit & 1]
    return f"this user lacks {' and '.join(missing)}" if missing else None


def is_in_user_namespace() -> bool:
    """Return whether this process is in a user namespace other than the initial one, where root lacks privileges."""
    try:
        return _USERS.read_text().split() != _ALL_USERS
    except OSError:
        return False  # a kernel without user namespaces
