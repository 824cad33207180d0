"""Command line, with one module for each verb, which ``main`` finds by name."""

from __future__ import annotations

__all__ = ["COMPLETE_VARIABLE"]

COMPLETE_VARIABLE = "_DPROBES_COMPLETE"
"""The environment variable that is set when a shell requests completions."""
