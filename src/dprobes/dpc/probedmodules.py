"""The modules that a program probes, and what names mean at its points by their debug information."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.programtree import PointKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.debugmodule import DebugModule
    from dprobes.dpc.debugnames import LateNames
    from dprobes.dpc.programtree import Point, ProgramTree

__all__ = ["ProbedModules"]

_OF_KERNEL = (PointKind.TRACEPOINT, PointKind.SYSTEM_CALL)


class ProbedModules:
    """
    The modules of a program; ``module`` is that of points that name none.

    ``debug_module_of`` knows what the debug information of a module says.
    """

    def __init__(self, program: ProgramTree, module: str, debug_module_of: Callable[[str], DebugModule | None]) -> None:
        self._default = program.module or module
        self._debug_module_of = debug_module_of
        points = [point for probe in program.probes for point in probe.points if point.kind not in _OF_KERNEL]
        self._names = list(dict.fromkeys(point.module or self._default for point in points))

    @property
    def first(self) -> DebugModule | None:
        """The module whose types a program may name: the one that is probed first."""
        return self._of(self._names[0]) if self._names else None

    def _of(self, name: str) -> DebugModule | None:
        return self._debug_module_of(name) if name and not name.startswith(("kernel", "kmod ")) else None

    def names_at(self, point: Point) -> LateNames | None:
        """Return what names mean at a point."""
        if point.kind in _OF_KERNEL:
            return None
        module = self._of(point.module or self._default)
        place = point.place if point.kind is PointKind.CODE else None
        return None if module is None else _late_names(module, place, at_return=point.at_return)

    def names_of_all(self) -> LateNames | None:
        """Return what names mean in the functions of a program: nothing, if it probes several modules."""
        module = self.first if len(self._names) == 1 else None
        return None if module is None else _late_names(module, None, at_return=False)


def _late_names(module: DebugModule, place: str | None, *, at_return: bool) -> LateNames:
    from dprobes.dpc.debugnames import LateNames

    return LateNames(module, place, at_return=at_return)
