"""
Names from the debug information of a module, and arguments of its USDT probes, with lazy look-up.

The reader of debug information is imported only for a program that looks up a name.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.modules.debug_module import DebugModule, is_entry_by_name
from dprobes.dpc.types.c_types import integer_of
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dprobes.dpc.modules.debug_names import ModuleNames, ProbeNames
    from dprobes.dpc.typedtree import typed_values
    from dprobes.dpc.typedtree.name_scope import ModuleVariable, NamedTypes, Scattered
    from dprobes.dpc.types.c_types import CType, Member
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.usdt import UsdtSite

__all__ = ["DescribedModule", "LateNames", "UsdtTypes"]

_LISTED = 6
"""Maximum number of names in a hint."""


class LateNames:
    """
    The names that code at a place may use, read from debug information at the first request (``names_in``).

    ``place`` has the syntax of ``DebugModule.address_of``. Without debug information there are no names.
    """

    def __init__(self, module: DebugModule, place: str | None, *, at_return: bool) -> None:
        self._module = module
        self._place = place
        self._at_return = at_return
        self.was_asked = False
        self.is_entry = place is not None and is_entry_by_name(place)

    @cached_property
    def _names(self) -> ModuleNames | ProbeNames | None:
        self.was_asked = True
        if self._module.file is None:
            return None
        from dprobes.dpc.modules.debug_names import names_in

        return names_in(self._module, self._place, at_return=self._at_return)

    @cached_property
    def arguments(self) -> int:
        """The number of arguments that have names of the form ``arg0`` at the place."""
        return self._module.arguments_at(self._place)

    @property
    def types(self) -> NamedTypes | None:
        """The types that names denote in the scope of the place, or None without debug information."""
        return None if self._names is None else self._names.types

    def returned(self) -> ModuleVariable | None:
        """Return the return value of the function, or None if it is not known."""
        return None if self._names is None else self._names.returned()

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter, or None if it is not known."""
        return None if self._names is None else self._names.parameter_type(number)

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, read as ``type_``, or None if it is not known."""
        return None if self._names is None else self._names.parameter(number, type_)

    def find(self, name: str) -> ModuleVariable | None:
        """Return the variable or parameter with a name, or None if it is not known."""
        return None if self._names is None else self._names.find(name)

    def cause(self, name: str) -> str | None:
        """
        Return a hint for an unknown name: the reason, and a declaration to write, or None outside of code.

        For a module without debug information, the hint names the debug file of another build, or is None without such
        a file.
        """
        from dprobes.dpc.modules.debug_names import ProbeNames

        module = self._module
        has_symbol = module.symbol_address(name) is not None
        declared = f"for a variable without debug information, declare it: extern int {name};"
        elsewhere = declared if has_symbol else "no symbol of the module has it, either"
        if self._names is None:
            from dprobes.target.elf.symbol_sources import foreign_debug_file

            return foreign_debug_file(module.elf)
        if self._place is None:
            return None
        if module.is_chooser(self._place):
            return f"'{self._place}' chooses a function at run time (IFUNC): probe one that it can choose"
        if module.address_of(self._place) is None:
            return f"what has a name depends on the place, and '{self._place}' is none"
        if not isinstance(self._names, ProbeNames):
            return (
                "no debug information describes the code at this place, as in assembly: parameters are named there, "
                f"FUNCTION(a, b), or are arg0, arg1; {elsewhere}"
            )
        known = self._names.known()
        if not known:
            return f"nothing of this function has a name there; {elsewhere}"
        return f"known at this place: {', '.join(known[:_LISTED])}{', …' * (len(known) > _LISTED)}; {elsewhere}"

    def member_of(self, scattered: Scattered, member: Member) -> typed_values.Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A structure in it is returned as its parts.
        """
        assert self._names is not None
        return self._names.member_of(scattered, member)


class DescribedModule(DebugModule):
    """A probed module with the names of its debug information."""

    @cached_property
    def types(self) -> NamedTypes | None:
        """The types, or None if there is no debug information."""
        return self.names_at(None, at_return=False).types

    def names_at(self, place: str | None, *, at_return: bool) -> LateNames:
        """
        Return the names that a probe's code at ``place`` may use.

        If it is None, return variables and types of the module. With ``at_return``, the place is a function of which
        the return is probed.
        """
        return LateNames(self, place, at_return=at_return)

    def given_at(self, place: str, *, at_return: bool) -> UsdtTypes:  # noqa: ARG002 - which a USDT probe has not
        """Return the types of the arguments of a USDT probe, ``PROVIDER:NAME``."""
        return UsdtTypes(self.elf, place)


class UsdtTypes:
    """The types of a USDT probe's arguments, by its ELF notes; the probe has one note for each of its sites."""

    def __init__(self, elf: ElfFile, place: str) -> None:
        self._elf = elf
        self._provider, _, self._name = place.partition(":")
        self.was_asked = False

    @cached_property
    def _sites(self) -> Sequence[UsdtSite]:
        from dprobes.target.usdt import matching_sites

        return matching_sites(self._elf, self._provider, self._name)

    def type_of(self, name: str) -> CType | None:
        """
        Return a type that can represent the argument with a number, from 0, at all sites that have it.

        Return None if no site has the argument, or no type up to the word size can represent all of its values.
        """
        self.was_asked = True
        number = int(name)
        try:
            found = [site.arguments[number] for site in self._sites if number < len(site.arguments)]
        except TargetError:
            return None  # the resolution of the program reports the error
        signed = [each.size for each in found if each.signed]
        unsigned = [each.size for each in found if not each.signed]
        size = max((*signed, *unsigned), default=0)
        if signed and unsigned and max(unsigned) >= max(signed):
            size = 2 * max(unsigned)
        return integer_of(size, is_signed=bool(signed)) if 0 < size <= self._elf.word_size else None
