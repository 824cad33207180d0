"""The watch on faults of a run: begun as soon as one of its probepoints depends on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dprobes.engines.ebpf.kernel.features import Feature
from dprobes.engines.interface import Notice
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from dprobes.engines.ebpf.attach.installation import Installation
    from dprobes.engines.ebpf.kernel.features import Features

__all__ = ["FaultWatch"]

_CONSEQUENCE = "records are emitted also where the instruction faults"


class FaultWatch:
    """What tells the reader of faults; with ``in_scope`` of those of processes in SCOPE only."""

    def __init__(self, installed: Installation, features: Features, *, in_scope: bool) -> None:
        self._installed = installed
        self._features = features
        self._in_scope = in_scope
        self._has_begun = False
        self._link = -1

    def begin(self) -> Notice | None:
        """Begin, once; return what is to be said if the kernel does not let us."""
        if self._has_begun:
            return None
        self._has_begun = True
        if Feature.TYPED_TRACEPOINT not in self._features:
            return Notice(f"this kernel shows no type information (BTF): {_CONSEQUENCE}")
        from dprobes.engines.ebpf.attach.programs.signalprograms import watch_signals

        installed = self._installed
        entries = installed.entries if installed.notes_tickets else None
        try:
            self._link = watch_signals(
                installed.maps.descriptors, self._features.types, in_scope=self._in_scope, entries=entries
            )
        except (OSError, TargetError):
            return Notice(f"this kernel does not let programs look at signals: {_CONSEQUENCE}")
        return None

    def close(self) -> None:
        """End the watch."""
        if self._link >= 0:
            os.close(self._link)
            self._link = -1
