"""The command line: one module for each verb; ``main`` finds them."""

from __future__ import annotations

__all__ = ["COMPLETE_VARIABLE"]

COMPLETE_VARIABLE = "_DPROBES_COMPLETE"
"""What is in the environment when a shell asks for completions."""
