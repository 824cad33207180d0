"""What watches the memory of a run's modules: a ``ModuleWatch`` for each; most programs have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.engines.ebpf.attach.scope import is_in_scope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.bpf.lower.request import Filter
    from dprobes.engines.ebpf.attach.modulewatch import ModuleWatch
    from dprobes.engines.ebpf.attach.sharedmaps import SharedMaps
    from dprobes.engines.ebpf.kernel.features import Features
    from dprobes.engines.interface import Event, Scope
    from dprobes.resolve.probepoints import ResolvedModule

__all__ = ["ModuleWatches"]


class ModuleWatches:
    """Own what watches modules, one for each; see ``ModuleWatch``."""

    def __init__(self, scope: Scope, condition: Filter, shared: SharedMaps, features: Features) -> None:
        self._scope = scope
        self._filter = condition
        self._shared = shared
        self._features = features
        self._found: dict[int, ModuleWatch] = {}

    def of(self, resolved: ResolvedModule, reached: str) -> ModuleWatch:
        """Return what watches a module."""
        key = id(resolved)
        if key not in self._found:
            from dprobes.engines.ebpf.attach.modulewatch import ModuleWatch

            self._found[key] = ModuleWatch(
                resolved, reached, self._filter, self._shared, self._features, self._is_in_scope
            )
        return self._found[key]

    def _is_in_scope(self, pid: int) -> bool:
        return is_in_scope(self._scope, pid, self._shared)

    def start(self) -> None:
        """Start all that have not been."""
        for each in self._found.values():
            each.start()

    def happened(self) -> Iterator[Event]:
        """Iterate over what the user should hear of."""
        for each in self._found.values():
            yield from each.happened()

    def close(self) -> None:
        """Watch nothing any more."""
        for each in self._found.values():
            each.close()
