"""The names of trace files, from which writers choose format and compression. Readers ignore them."""

from __future__ import annotations

from typing import Literal

__all__ = ["compression_of", "is_trace_name"]


def is_trace_name(name: str) -> bool:
    """Return whether the name of a file that is to be written asks for a trace file."""
    return name.endswith((".dpt", ".dptz"))


def compression_of(name: str) -> Literal["zstd"] | None:
    """Return how the trace file of this name is to be compressed."""
    return "zstd" if name.endswith(".dptz") else None
