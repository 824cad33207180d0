"""The states of a probepoint, from the file that it is found in to its removal."""

from __future__ import annotations

from enum import Enum

__all__ = ["ProbeState", "impossible_address"]


class ProbeState(Enum):
    """A state of a probepoint; the words are those of ``query`` (recovered reference 2.4)."""

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
        """Whether a probepoint in this state has never been there."""
        return self not in (ProbeState.COMPILED, ProbeState.ACTIVE, ProbeState.DISABLED, ProbeState.REMOVED)

    def line(self, reason: str, where: str = "", outcome: str = "not inserted") -> str:
        """Return the line that says why there is no probepoint: its state, ``where`` that is, and what follows."""
        return f"{self.value}{where and ' '}{where}: {reason}; {outcome}"


def impossible_address(address: int) -> str:
    """Return why a watchpoint's address, as it is in a process, is an INVALID_OFFSET."""
    return f"no program can have the address {address:#x}"
