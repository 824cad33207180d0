"""
The names that the debug information of a module has, for programs that may never ask for one.

Who does not ask does not even import what reads debug information.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.modules.debugmodule import DebugModule, is_entry_by_name

if TYPE_CHECKING:
    from dprobes.dpc.modules.debugnames import ModuleNames, ProbeNames
    from dprobes.dpc.typedtree import typed
    from dprobes.dpc.typedtree.scattered import Scattered
    from dprobes.dpc.typedtree.scope import ModuleVariable
    from dprobes.dpc.types.ctype import CType, Member

__all__ = ["DescribedModule", "LateNames"]


class LateNames:
    """
    The names at a place that is written as in ``DebugModule.address_of``; it is looked for when somebody asks.

    Those are what ``names_in`` returns; without debug information there are none.
    """

    def __init__(self, module: DebugModule, place: str | None, *, at_return: bool) -> None:
        self._module = module
        self._place = place
        self._at_return = at_return
        self.was_asked = False
        self.is_entry = place is not None and is_entry_by_name(place)

    @cached_property
    def _names(self) -> ModuleNames | ProbeNames | None:
        from dprobes.dpc.modules.debugnames import names_in

        self.was_asked = True
        return names_in(self._module, self._place, at_return=self._at_return)

    @property
    def result(self) -> CType | None:
        """The type of what the function returns; None if it is not known, or none."""
        return None if self._names is None else self._names.result

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter; None if it is not known."""
        return None if self._names is None else self._names.parameter_type(number)

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, as of a type; None if it is not known."""
        return None if self._names is None else self._names.parameter(number, type_)

    def find(self, name: str) -> ModuleVariable | None:
        """Return what has a name; None if it is not known."""
        return None if self._names is None else self._names.find(name)

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory."""
        assert self._names is not None
        return self._names.member_of(scattered, member)


class DescribedModule(DebugModule):
    """A module that is probed, with the names that its debug information has."""

    def names_at(self, place: str | None, *, at_return: bool) -> LateNames:
        """Return what names mean at a place that is written as for ``address_of``; without one, anywhere."""
        return LateNames(self, place, at_return=at_return)
