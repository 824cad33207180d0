"""The states of a probepoint, from its resolution to its removal."""

from __future__ import annotations

from enum import Enum

__all__ = ["ProbeState", "impossible_address"]


class ProbeState(Enum):
    """A state of a probepoint; the values are the words that ``query`` prints (recovered reference 2.4)."""

    COMPILED = "COMPILED"
    ACTIVE = "ACTIVE"
    MISMATCH = "MISMATCH"
    CONFLICT = "CONFLICT"
    DISABLED = "DISABLED"
    REMOVED = "REMOVED"
    INVALID_OFFSET = "INVALID_OFFSET"
    EXCLUDED = "EXCLUDED"
    DEBUGREG_UNAVAIL = "DEBUGREG_UNAVAIL"
    WATCHPOINT_LEN_INVALID = "WATCHPOINT_LEN_INVALID"

    @property
    def is_obstacle(self) -> bool:
        """True if a probepoint in this state was never inserted."""
        return self not in (ProbeState.COMPILED, ProbeState.ACTIVE, ProbeState.DISABLED, ProbeState.REMOVED)

    def line(self, reason: str, where: str = "", outcome: str = "not inserted") -> str:
        """Return "STATE WHERE: REASON; OUTCOME", a line about a probepoint that is missing."""
        return f"{self.value}{where and ' '}{where}: {reason}; {outcome}"


def impossible_address(address: int) -> str:
    """Return the reason why a watchpoint's run-time address is an INVALID_OFFSET."""
    return f"no program can have the address {address:#x}"
