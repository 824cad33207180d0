"""The number of random examples of a test: few by default, and very many with ``make torture``."""

from __future__ import annotations

import os

__all__ = ["IS_TORTURE", "rounds"]

IS_TORTURE = os.environ.get("DPROBES_EXAMPLES") == "torture"


def rounds(torture: int, otherwise: int = 30) -> int:
    """
    Return the number of examples: ``torture`` with ``make torture``, else ``otherwise``.

    The first examples are the same in both.
    """
    return torture if IS_TORTURE else otherwise
