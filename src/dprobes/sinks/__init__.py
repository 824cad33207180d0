"""Sinks: where records go. What a log target of another package needs is here (docs/sinks.md, "Plug-ins")."""

from __future__ import annotations

from dprobes.sinks.sink_interface import Batch, Sink, SinkOptions

__all__ = ["Batch", "Sink", "SinkOptions"]
