"""Sinks: the code behind log targets, and the interface for those of other packages (log-targets.md, "Plug-ins")."""

from __future__ import annotations

from dprobes.sinks.sink_interface import Batch, Sink, SinkOptions

__all__ = ["Batch", "Sink", "SinkOptions"]
