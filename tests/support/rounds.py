"""How many random examples a test tries: some each time, and very many with ``make torture``."""

from __future__ import annotations

import os

__all__ = ["IS_TORTURE", "rounds"]

IS_TORTURE = os.environ.get("DPROBES_EXAMPLES") == "torture"


def rounds(torture: int, otherwise: int = 30) -> int:
    """Return how many examples to try; the first ones are always the same."""
    return torture if IS_TORTURE else otherwise
