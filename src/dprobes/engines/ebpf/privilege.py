"""What this user lacks for BPF programs."""

from __future__ import annotations

import os

from dprobes.engines.linux.procfs import process_field

__all__ = ["missing_privilege"]

_CAP_SYS_ADMIN, _CAP_PERFMON, _CAP_BPF = 21, 38, 39  # capability(7)


def missing_privilege() -> str | None:
    """Return which capabilities this process lacks for BPF programs on uprobes, as a clause; None if it has them."""
    effective = int(process_field(os.getpid(), "CapEff") or "0", 16)
    if effective >> _CAP_SYS_ADMIN & 1:
        return None
    wanted = {"CAP_BPF": _CAP_BPF, "CAP_PERFMON": _CAP_PERFMON}
    missing = [name for name, bit in wanted.items() if not effective >> bit & 1]
    return f"this user lacks {' and '.join(missing)}" if missing else None
