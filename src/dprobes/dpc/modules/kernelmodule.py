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
from dprobes.dpc.types.ctype import CHAR, Array, Pointer, integer_of
from dprobes.errors import TargetError
from dprobes.lazypattern import lazy_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from dprobes.dpc.modules.btfnames import BtfModule, BtfNames
    from dprobes.dpc.modules.latenames import LateNames
    from dprobes.dpc.typedtree import typed
    from dprobes.dpc.typedtree.scattered import Scattered
    from dprobes.dpc.typedtree.scope import ModuleVariable, NamedTypes
    from dprobes.dpc.types.ctype import CType, Member, Record
    from dprobes.target.elf.file import ElfFile
    from dprobes.target.kernel.tracepoints import KernelTracepoints

__all__ = ["EventTypes", "KernelModule", "KernelNames"]

_CHARACTERS = lazy_pattern(r"(?:const )?(?:(?:un)?signed )?char ?\[(\w*)\]")


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

    def given_at(self, place: str, *, at_return: bool) -> EventTypes:
        """Return the types of the fields of a tracepoint, ``SUBSYSTEM:NAME``, or of ``syscall:NAME``."""
        return EventTypes(place, at_return=at_return)


class EventTypes:
    """The types of the fields of a tracepoint or system call of the running kernel."""

    def __init__(self, place: str, *, at_return: bool) -> None:
        self._subsystem, _, self._name = place.partition(":")
        self._at_return = at_return
        self.was_asked = False

    @cached_property
    def _tracepoints(self) -> KernelTracepoints:
        from dprobes.target.kernel.tracepoints import KernelTracepoints

        return KernelTracepoints()

    def type_of(self, name: str) -> CType | None:
        """Return the type of a field: a number, a string, an array of characters; None of others, or if it depends."""
        from dprobes.target.kernel.tracedfields import Form

        self.was_asked = True
        try:
            if self._subsystem == "syscall":
                event = self._tracepoints.find_system_call(self._name, [name], at_return=self._at_return)
                ways = [event.fields[name]]
            else:
                ways = self._tracepoints.ways_to(self._subsystem, self._name, name)
        except (OSError, TargetError):
            return None  # whoever resolves the program says what is wrong
        if not ways or len({(way.size, way.is_signed, way.form) for way in ways}) != 1:
            return None
        if ways[0].form is not Form.NUMBER:
            found = [match for way in ways if (match := _CHARACTERS.fullmatch(way.type_name)) is not None]
            counts = {int(match[1]) if match[1].isdecimal() else None for match in found}
            # A string whose place the record says has no length that is known beforehand.
            return Array(CHAR, counts.pop()) if len(found) == len(ways) and len(counts) == 1 else None
        if all(way.type_name.replace("const ", "").replace(" ", "") == "char*" for way in ways):
            return Pointer(CHAR, ways[0].size)
        return integer_of(ways[0].size, is_signed=ways[0].is_signed)


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
    def arguments(self) -> int:
        """How many arguments have names of registers."""
        return self._btf.arguments

    @property
    def types(self) -> NamedTypes | None:
        """The types: those of BTF, or else of debug information, as the place sees them."""
        if self._btf.types is not None or self._debug is None:
            return self._btf.types
        return self._debug.types

    def returned(self) -> ModuleVariable | None:
        """Return what the function returns; None if it is not known."""
        if self._btf.is_known or self._debug is None:
            return self._btf.returned()
        return self._debug.returned()

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

    def cause(self, name: str) -> str | None:
        """Return why nothing has a name there, and what to write; None where nothing describes the kernel."""
        if self._place is None or self.types is None:
            return None
        declared = f"for a variable without debug information, declare it: extern int {name};"
        names = self._btf.names()
        return f"known at this place: {', '.join(names)}; {declared}" if names else None

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory."""
        return self._btf.member_of(scattered, member)
