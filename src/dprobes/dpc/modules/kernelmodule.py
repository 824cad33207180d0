"""
The kernel and its modules as what is compiled for them sees them: by their types (BTF), and by debug information.

BTF is small, and there wherever the kernel is. It knows the parameters of functions, but no variable of theirs: what it
does not know is asked of debug information, if that is installed. Only then it is opened.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.modules.debugmodule import is_entry_by_name
from dprobes.dpc.modules.latenames import DescribedModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.modules.btfnames import BtfModule, BtfNames
    from dprobes.dpc.modules.latenames import LateNames
    from dprobes.dpc.typedtree import typed
    from dprobes.dpc.typedtree.scattered import Scattered
    from dprobes.dpc.typedtree.scope import ModuleVariable, NamedTypes
    from dprobes.dpc.types.ctype import CType, Member, Record
    from dprobes.target.elf.file import ElfFile

__all__ = ["KernelModule", "KernelNames"]


class KernelModule:
    """
    The kernel or a module of it (``ProbedModule``).

    ``described`` gives its file, of which the debug information may be elsewhere; None if there is none.
    """

    def __init__(self, types: BtfModule, described: Callable[[], ElfFile | None]) -> None:
        self._btf = types
        self._described = described
        self.declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
        """What the program itself declares."""
        types.declared = self._declared

    def _declared(self, kind: str, tag: str) -> Record | None:
        return self.declared(kind, tag)

    @cached_property
    def debug(self) -> DescribedModule | None:
        """The module by its debug information; None if none is installed."""
        elf = self._described()
        if elf is None:
            return None
        found = DescribedModule(elf)
        found.declared = self._declared
        return None if found.file is None else found

    @property
    def types(self) -> NamedTypes | None:
        """The types, for a kernel without BTF those of debug information; None if nothing describes them."""
        if self._btf.types is not None:
            return self._btf.types
        return None if self.debug is None else self.debug.types

    def names_at(self, place: str | None, *, at_return: bool) -> KernelNames:
        """Return what names mean at a place: a function, or a function and a distance."""
        return KernelNames(self, self._btf.names_at(place, at_return=at_return), place, at_return=at_return)


class KernelNames:
    """What names mean at a place in the kernel (``PlaceNames``): first by ``btf``, which knows entries and returns."""

    def __init__(self, module: KernelModule, btf: BtfNames, place: str | None, *, at_return: bool) -> None:
        self._module = module
        self._btf = btf
        self._place = place
        self._at_return = at_return
        self.is_entry = place is None or is_entry_by_name(place)

    @property
    def was_asked(self) -> bool:
        """Whether anything was asked."""
        return self._btf.was_asked

    @cached_property
    def _debug(self) -> LateNames | None:
        """The names by debug information; those at a number, whose section is not known, are those of the module."""
        debug = self._module.debug
        if debug is None:
            return None
        place = self._place if self._place is None or not self._place[:1].isdigit() else None
        return debug.names_at(place, at_return=self._at_return)

    @property
    def result(self) -> CType | None:
        """The type of what the function returns; None if it is not known, or none."""
        if self._btf.is_known or self._debug is None:
            return self._btf.result
        return self._debug.result

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter; None if it is not known."""
        found = self._btf.parameter_type(number)
        return found if found is not None or self._debug is None else self._debug.parameter_type(number)

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, as of a type; None if there is none that is known."""
        found = self._btf.parameter(number, type_)
        return found if found is not None or self._debug is None else self._debug.parameter(number, type_)

    def find(self, name: str) -> ModuleVariable | None:
        """Return the parameter, variable or enumerator that has a name."""
        if (found := self._btf.named_parameter(name)) is not None:
            return found
        if self._place is not None and self._debug is not None and (found := self._debug.find(name)) is not None:
            return found
        found = self._btf.elsewhere(name)
        return found if found is not None or self._debug is None else self._debug.find(name)

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory: only debug information knows such."""
        assert self._debug is not None
        return self._debug.member_of(scattered, member)
