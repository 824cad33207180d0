"""
What names mean in functions of the kernel, by its BTF: parameters with their types, and what is returned.

``KernelNames`` adds what debug information knows.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.modules.btftypes import BtfTypes, damage_reported
from dprobes.dpc.modules.debugvalues import Machine, part_of, returned_value
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typedtree.scattered import NotKnownError
from dprobes.dpc.typedtree.scope import ModuleVariable, NamedTypes
from dprobes.dpc.types.ctype import INT, UNSIGNED, Integer, Void, is_scalar, size_of
from dprobes.errors import TargetError
from dprobes.target.btf import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.dpc.typedtree.scattered import Scattered
    from dprobes.dpc.types.ctype import CType, Member, Record
    from dprobes.target.btf import Btf

__all__ = ["BtfModule", "BtfNames"]

_WORD = 8
_LONG = Integer("unsigned long", _WORD, is_signed=False, rank=4)
_ARGUMENTS = 6
"""Words that are passed in registers."""
_MACHINE = Machine(_LONG, "little", {}, lambda _address: None, lambda _address: None)


class BtfModule:
    """The running kernel, or a module of it, by its types."""

    def __init__(self, btf: Callable[[], Btf | None]) -> None:
        """``btf`` reads the type information when somebody asks; None if the kernel shows none."""
        self._read = btf
        self.declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
        """What the program itself declares."""

    @cached_property
    def btf(self) -> Btf | None:
        """The type information; None if the kernel shows none."""
        return self._read()

    @cached_property
    def types(self) -> BtfTypes | None:
        """The types; None if the kernel shows none."""
        return None if self.btf is None else BtfTypes(self.btf, self._declared)

    def _declared(self, kind: str, tag: str) -> Record | None:
        return self.declared(kind, tag)

    def names_at(self, place: str | None, *, at_return: bool) -> BtfNames:
        """Return what names mean at a function; behind its first instruction arguments may be elsewhere."""
        name = None if place is None else place.strip('"')
        function = name if name is not None and name.isidentifier() else None
        return BtfNames(self, function, at_return=at_return)


class _TypesNear:
    """The types of a kernel by their names (``NamedTypes``): of several of a name that with a number in ``near``."""

    def __init__(self, types: BtfTypes, near: frozenset[int]) -> None:
        self._types = types
        self._near = near

    def named(self, name: str) -> CType | None:
        """Return the type that ``typedef`` gives a name."""
        return self._types.named(name, self._near)

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return a structure, union or enumeration by its tag."""
        return self._types.tagged(kind, tag, self._near)


class BtfNames:
    """
    What names mean at the entry or return of a function of the kernel; ``function`` is None elsewhere.

    At a return, ``at_return``, parameters have the values of the entry.
    """

    def __init__(self, module: BtfModule, function: str | None, *, at_return: bool) -> None:
        self._module = module
        self._function = function
        self._at_return = at_return
        self.was_asked = False

    @cached_property
    def _signature(self) -> tuple[Sequence[tuple[str, int]], int] | None:
        """The parameters, and the number of the type that is returned; None without such a function."""
        self.was_asked = True
        btf = self._module.btf
        if btf is None or self._function is None:
            return None
        try:
            with damage_reported():
                return btf.parameters(self._function), btf.result(self._function)
        except TargetError:
            return None  # it has no such function, or not with its types

    @cached_property
    def _parameters(self) -> Sequence[tuple[str, CType, int | None]]:
        """Name, type, and number of the argument, of each parameter; None for one that is not in one register."""
        signature, types = self._signature, self._module.types
        if signature is None or types is None:
            return ()
        found: list[tuple[str, CType, int | None]] = []
        word = 0
        for name, number in signature[0]:
            type_ = types.of(number)
            words = -(-(size_of(type_) or _WORD) // _WORD)
            is_word = words == 1 and is_scalar(type_) and word < _ARGUMENTS
            found.append((name, type_, word if is_word else None))
            word += words
        return found

    arguments = _ARGUMENTS
    """How many arguments have names of registers."""

    @cached_property
    def types(self) -> NamedTypes | None:
        """The types, of several with one name that of a parameter; None if the kernel shows none."""
        signature, types = self._signature, self._module.types
        if types is None or signature is None:
            return types
        return _TypesNear(types, types.reached_from([number for _, number in signature[0]] + [signature[1]]))

    def returned(self) -> ModuleVariable | None:
        """Return what the function returns; None if it is not known."""
        signature, types = self._signature, self._module.types
        if signature is None or types is None:
            return None
        type_ = types.of(signature[1])
        if isinstance(type_, Void):
            raise NotKnownError("the function returns nothing")
        return returned_value(type_, _MACHINE, is_x86=True)

    def names(self) -> list[str]:
        """Return the names of the parameters."""
        return [name for name, _, _ in self._parameters if name]

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory."""
        return part_of(scattered, member, _MACHINE)

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter; None if it is not known, or not in a register of its own."""
        if number >= len(self._parameters):
            return None
        _, type_, argument = self._parameters[number]
        return type_ if argument is not None else None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, as of a type; None if there is none that is in a register of its own."""
        if number >= len(self._parameters) or (argument := self._parameters[number][2]) is None:
            return None
        return self._argument(argument, type_)

    @property
    def is_known(self) -> bool:
        """Whether the kernel's types have the function."""
        return self._signature is not None

    def named_parameter(self, name: str) -> ModuleVariable | None:
        """Return the parameter that has a name, if it is in a register of its own."""
        for found, type_, argument in self._parameters:
            if found == name and argument is not None:
                return self._argument(argument, type_)
        return None

    def _argument(self, number: int, type_: CType) -> ModuleVariable:
        register = typed.Register(f"arg{number}", _LONG, at_entry=self._at_return)
        return ModuleVariable(folded(typed.Convert(register, type_)), type_)

    def elsewhere(self, name: str) -> ModuleVariable | None:
        """Return the variable or enumerator of the kernel that has a name."""
        name = name.removeprefix("::")
        btf, types = self._module.btf, self._module.types
        if btf is None or types is None:
            return None
        if (value := types.enumerator(name)) is not None:
            integer = INT if INT.holds(value) else UNSIGNED if UNSIGNED.holds(value) else _LONG
            return ModuleVariable(typed.Constant(integer.cut(value), integer), integer)
        try:
            with damage_reported():
                type_ = types.of(btf.target(btf.find(Kind.VAR, name)))
        except TargetError:
            return None
        return ModuleVariable(typed.Memory(typed.Symbol(name, _LONG), type_), type_)
