"""The modules that a program probes, and what names mean at its points by what describes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.dpc.syntax.programtree import PointKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.dpc.syntax.programtree import Point, ProgramTree
    from dprobes.dpc.typedtree.scope import GivenTypes, PlaceNames, ProbedModule

__all__ = ["KERNEL", "KERNEL_MODULE", "ProbedModules"]

KERNEL = "kernel"
"""What the kernel is called before the colon of a place."""

KERNEL_MODULE = "kmod "
"""The prefix of a kernel module's name there."""

_OF_KERNEL = (PointKind.TRACEPOINT, PointKind.SYSTEM_CALL)


class ProbedModules:
    """
    The modules of a program; ``module`` is that of points that name none.

    ``module_of`` knows what describes a module: debug information, or the kernel's BTF.
    """

    def __init__(self, program: ProgramTree, module: str, module_of: Callable[[str], ProbedModule | None]) -> None:
        self._written = program.module
        self._default = program.module or module
        self._module_of = module_of
        points = [point for probe in program.probes for point in probe.points]
        self.names = list(dict.fromkeys(map(self._name_of, points)))

    def _name_of(self, point: Point) -> str:
        if point.kind is PointKind.SAMPLE:
            return point.module or self._written  # else whatever runs, also where there is a module of a process
        return KERNEL if point.kind in _OF_KERNEL else point.module or self._default

    def name_at(self, point: Point | None) -> str:
        """Return the name of the module of a point, or of the only one; empty if there are several."""
        if point is not None:
            return self._name_of(point)
        return self.names[0] if len(self.names) == 1 else ""

    @property
    def first(self) -> ProbedModule | None:
        """The module whose types a program may name: the one that is probed first, the kernel where anything is."""
        return self._of(self.names[0] or KERNEL) if self.names else None

    @property
    def all(self) -> Iterator[ProbedModule]:
        """All modules that something describes."""
        for name in self.names:
            if (module := self._of(name or KERNEL)) is not None:
                yield module

    def _of(self, name: str) -> ProbedModule | None:
        return self._module_of(name) if name else None

    def kernel_at(self, point: Point | None) -> ProbedModule | None:
        """Return the kernel where a point is hit in it, or may be: also in functions, which several points may call."""
        name = self.name_at(point)
        return self._of(KERNEL) if name in ("", KERNEL) or name.startswith(KERNEL_MODULE) else None

    def names_at(self, point: Point) -> PlaceNames | None:
        """Return what names mean at a point."""
        module = self._of(self._name_of(point))
        place = point.place if point.kind is PointKind.CODE else None
        return None if module is None else module.names_at(place, at_return=point.at_return)

    def given_at(self, point: Point) -> GivenTypes | None:
        """Return the types of what a point gives that is no code; None of others, and of modules that are not here."""
        if point.kind is not PointKind.USDT and point.kind not in _OF_KERNEL:
            return None
        module = self._of(self._name_of(point))
        place = f"syscall:{point.place}" if point.kind is PointKind.SYSTEM_CALL else str(point.place)
        return None if module is None else module.given_at(place, at_return=point.at_return)

    def names_of_all(self) -> PlaceNames | None:
        """Return what names mean in the functions of a program: nothing, if it probes several modules."""
        module = self.first if len(self.names) == 1 else None
        return None if module is None else module.names_at(None, at_return=False)
