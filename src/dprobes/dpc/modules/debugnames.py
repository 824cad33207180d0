"""
What names mean at an instruction of a module: the parameters and variables of its function, and the module's own.

Without optimization compilers describe where parameters are kept after the function has put them there: before, they
are where the ABI has them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

from dprobes.dpc.modules.debugvalues import part_of, value_at
from dprobes.dpc.typedtree import typed
from dprobes.dpc.typedtree.folder import folded
from dprobes.dpc.typedtree.scattered import NotKnownError, Part, Scattered
from dprobes.dpc.typedtree.scope import ModuleVariable
from dprobes.dpc.types.argumentplaces import argument_places
from dprobes.dpc.types.ctype import INT, UNSIGNED, VOID, Void, is_scalar, size_of
from dprobes.dwarf.locations import frame_at, is_listed, known_ranges, location_at
from dprobes.dwarf.locationtree import FrameAddressOf, InMemory, Operation, Unavailable
from dprobes.dwarf.numbers import At, Tag
from dprobes.dwarf.ranges import covers
from dprobes.dwarf.search import entries_in, entries_named, function_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dprobes.dpc.modules.debugmodule import DebugModule
    from dprobes.dpc.modules.debugtypes import DebugTypes
    from dprobes.dpc.modules.debugvalues import Machine
    from dprobes.dpc.types.argumentplaces import ArgumentPlace
    from dprobes.dpc.types.ctype import CType, Member
    from dprobes.dwarf.debugfile import DebugFile
    from dprobes.dwarf.entries import Entry, EntryUnit
    from dprobes.dwarf.locationtree import Location
    from dprobes.dwarf.units import Unit

__all__ = ["ModuleNames", "ProbeNames", "names_in"]

_BLOCKS = frozenset((Tag.LEXICAL_BLOCK, Tag.INLINED_SUBROUTINE))
_VARIABLES = frozenset((Tag.FORMAL_PARAMETER, Tag.VARIABLE))
_NAMED = frozenset((Tag.VARIABLE, Tag.ENUMERATOR))
_DEPTH_MAX = 64
_NUMBERED = 6
"""Arguments that have names of registers."""
_LISTED = 3  # ranges named in a hint


class ModuleNames:
    """
    The variables and enumerators of a module.

    Those of the unit ``near`` come first: a source file has its own of a name, or says which one it means.
    """

    def __init__(self, module: DebugModule, file: DebugFile, types: DebugTypes, near: EntryUnit | None = None) -> None:
        self._module = module
        self._file = file
        self._types = types
        self._near = near
        self._found: dict[str, Entry | None] = {}

    @property
    def result(self) -> CType | None:
        """None: there is no function."""
        return None

    def parameter_type(self, number: int) -> CType | None:  # noqa: ARG002 - no function has it
        """Return None: there is no function."""
        return None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:  # noqa: ARG002 - no function has it
        """Return None: there is no function."""
        return None

    def find(self, name: str) -> ModuleVariable | None:
        """Return a variable of the module, or the value of an enumerator."""
        name = name.removeprefix("::")
        return self._meant(name, self._described(name, has_symbol=self._has_symbol(name)))

    def find_near(self, name: str) -> ModuleVariable | None:
        """Return what ``find`` would, if the unit that is near has it."""
        near = () if self._near is None else self._candidates_near(self._near, name)
        return self._meant(name, self._first(near, has_symbol=self._has_symbol(name)))

    def _has_symbol(self, name: str) -> bool:
        return self._module.symbol_address(name) is not None

    def _meant(self, name: str, entry: Entry | None) -> ModuleVariable | None:
        if entry is None:
            return None
        if entry.tag == Tag.VARIABLE:
            return self._variable(name, entry, has_symbol=self._has_symbol(name))
        number = entry.number(At.CONST_VALUE)
        if number is None:
            return None
        type_ = INT if INT.holds(number) else UNSIGNED
        return ModuleVariable(typed.Constant(number, type_), type_)

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory."""
        return part_of(scattered, member, self._module.machine(at_entry=False))

    def _variable(self, name: str, entry: Entry, *, has_symbol: bool) -> ModuleVariable:
        type_ = self._types.of_variable(entry)
        machine = self._module.machine(at_entry=False)
        is_own = not entry.flag(At.DECLARATION) and not entry.flag(At.EXTERNAL)  # the symbol may be of another one
        if not has_symbol or is_own or self._module.is_thread_local(name):
            location = location_at(entry, frame_at(None, 0, None))
            return ModuleVariable(value_at(location, type_, machine), type_)
        return ModuleVariable(typed.Memory(typed.Symbol(name, machine.word), type_), type_)

    def _described(self, name: str, *, has_symbol: bool) -> Entry | None:
        if name not in self._found:
            self._found[name] = self._first(self._candidates(name, declarations=has_symbol), has_symbol=has_symbol)
        return self._found[name]

    def _first(self, candidates: Iterable[Entry], *, has_symbol: bool) -> Entry | None:
        """Return what is meant; a declaration does for one with a symbol, if it says the whole of its type."""
        found = None
        for found in candidates:
            if not found.flag(At.DECLARATION):
                break
            if has_symbol and size_of(self._types.of_variable(found)) is not None:
                break
        return found

    def _candidates(self, name: str, *, declarations: bool) -> Iterator[Entry]:
        """Give what may be meant by a name; without ``declarations`` only those of the unit that is near."""
        if self._near is not None:
            yield from self._candidates_near(self._near, name)
        for file in self._file.all_files():
            yield from entries_named(file, name, _NAMED, declarations=declarations)

    def _candidates_near(self, near: EntryUnit, name: str) -> Iterator[Entry]:
        return entries_in(cast("DebugFile", near.file), cast("Unit", near), name, _NAMED)


class ProbeNames:
    """
    The names at the link address of a probepoint; ``at_return`` when the function that begins there has returned.

    Names of the function come first, those of inner blocks before those of outer ones.
    """

    def __init__(
        self,
        module: DebugModule,
        names: ModuleNames,
        types: DebugTypes,
        function: Entry,
        address: int,
        *,
        at_return: bool,
    ) -> None:
        self._module = module
        self._names = names
        self._types = types
        self._function = function
        self._address = address
        self._at_return = at_return

    @cached_property
    def _entry(self) -> int | None:
        """The first instruction of the function."""
        for each in (At.LOW_PC, At.ENTRY_PC):
            if (found := self._function.address(each)) is not None:
                return found
        from dprobes.dwarf.ranges import ranges_of

        return next((start for start, _ in ranges_of(self._function)), None)

    @cached_property
    def _parameters(self) -> Sequence[Entry]:
        """The parameters in the order of the source; each is described here, or where the function is described."""
        own = [child for child in self._function.children() if child.tag == Tag.FORMAL_PARAMETER]
        origin = self._function.origin
        if origin == self._function:
            return own
        whole = [child for child in origin.children() if child.tag == Tag.FORMAL_PARAMETER]
        if not whole or (own and not any(child.has(At.ABSTRACT_ORIGIN) for child in own)):
            return own  # the origin only declares it
        here = {child.origin: child for child in own}
        return [here.get(child.origin, child) for child in whole] if len(whole) >= len(own) else own

    @cached_property
    def _places(self) -> Sequence[ArgumentPlace]:
        types = [self._types.of_variable(each) for each in self._parameters]
        return argument_places(types, self.result or VOID, self._module.elf.word_size)

    @cached_property
    def result(self) -> CType | None:
        """The type of what the function returns; None for ``void``."""
        found = self._types.of_variable(self._function)
        return None if isinstance(found, Void) else found

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter."""
        return self._types.of_variable(self._parameters[number]) if number < len(self._parameters) else None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, as of a type."""
        if number >= len(self._parameters):
            return None
        return ModuleVariable(self._parameter(number, type_), type_)

    def find(self, name: str) -> ModuleVariable | None:
        """Return what has a name."""
        if self._at_return or name.startswith("::"):
            return self._named_parameter(name) or self._names.find(name)
        for block in self._blocks():
            for entry in block.children():
                if entry.tag in _VARIABLES and entry.name == name and not entry.flag(At.DECLARATION):
                    if block is self._function and entry in self._parameters:
                        return self.parameter(self._parameters.index(entry), self._types.of_variable(entry))
                    type_ = self._types.of_variable(entry)
                    return ModuleVariable(self._value(entry, type_), type_)
        if (found := self._named_parameter(name)) is not None:
            return found
        for block in self._blocks():  # what is nowhere is described with the function only
            if any(entry.tag in _VARIABLES and entry.name == name for entry in block.origin.children()):
                raise NotKnownError("optimized out")
        if (other := _variable_below(self._function, name, 0)) is not None:
            # What other source files have of this name is not meant.
            if (found := self._names.find_near(name)) is not None:
                return found
            raise NotKnownError("outside of its block", self._where_known(other, is_at_entry=False))
        return self._names.find(name)

    def _named_parameter(self, name: str) -> ModuleVariable | None:
        """Return a parameter of the function, which may be described with it, and not in its blocks."""
        for number, parameter in enumerate(self._parameters):
            if parameter.name == name:
                return self.parameter(number, self._types.of_variable(parameter))
        return None

    def member_of(self, scattered: Scattered, member: Member) -> typed.Value | Scattered:
        """Return a member of a structure that is not in memory."""
        return part_of(scattered, member, self._machine)

    # Places

    @cached_property
    def _machine(self) -> Machine:
        return self._module.machine(at_entry=self._address == self._entry)

    def _blocks(self) -> list[Entry]:
        """Return the blocks around the instruction, the innermost first; the last one is the function."""
        found = [self._function]
        while len(found) < _DEPTH_MAX:
            inner = next(
                (child for child in found[-1].children() if child.tag in _BLOCKS and covers(child, self._address)), None
            )
            if inner is None:
                break
            found.append(inner)
        return found[::-1]

    def _location(self, variable: Entry) -> Location:
        return location_at(variable, frame_at(self._function, self._address, self._entry))

    def _parameter(self, number: int, type_: CType) -> typed.Value | Scattered:
        entry, place = self._parameters[number], self._places[number]
        if self._at_return:
            return self._at_entry(place, type_)
        location = self._location(entry)
        argument: typed.Value | Scattered | None = None
        if isinstance(location, Unavailable):
            if self._address == self._entry and not self._is_special:
                argument = self._argument(place, type_)
        elif self._is_before_it_is_kept(entry, location):
            argument = self._argument(place, type_)
        return self._value(entry, type_, location) if argument is None else argument

    def _argument(self, place: ArgumentPlace, type_: CType) -> typed.Value | Scattered | None:
        """Return an argument that is where the ABI has it; None if that is not in registers for integers."""
        word = self._machine.word
        values = [typed.Register(f"arg{n}", word) for n in place.registers if n is not None]
        if not values or len(values) < len(place.registers):
            return None
        if is_scalar(type_):
            return folded(typed.Convert(values[0], type_)) if len(values) == 1 else None
        return Scattered(tuple(Part(8 * n, 8, value) for n, value in enumerate(values)), type_)

    def _at_entry(self, place: ArgumentPlace, type_: CType) -> typed.Value:
        """Return what an argument was at the entry of the call that has returned."""
        number = place.registers[0] if len(place.registers) == 1 else None
        if place.offset is not None and self._module.elf.word_size == 4:
            number = place.offset // 4 - 1  # arguments of 32 bits have their numbers on the stack
        if (
            number is None
            or number >= _NUMBERED
            or not is_scalar(type_)
            or (size_of(type_) or 0) > self._machine.word.size
        ):
            hint = "keep it at the entry, in a thread variable"
            raise NotKnownError("not known any more at the return: at the entry it is in no register", hint)
        register = typed.Register(f"arg{number}", self._machine.word, at_entry=True)
        return folded(typed.Convert(register, type_))

    @cached_property
    def _is_special(self) -> bool:
        """Whether the function is a variant that a compiler made, whose arguments are where the compiler likes."""
        symbol = self._module.function_symbol(self._address)
        return symbol is None or "." in symbol

    def _is_before_it_is_kept(self, entry: Entry, location: Location) -> bool:
        """Return whether a parameter is described by its only place, in the frame, and is not yet there."""
        if is_listed(entry) or self._entry is None or not isinstance(location, InMemory):
            return False
        match location.address:
            case FrameAddressOf():
                return False  # an argument on the stack
            case Operation("+", FrameAddressOf(), right):
                distance = getattr(right, "value", 0)
                if not distance >> (8 * self._module.elf.word_size - 1):
                    return False
        return self._entry <= self._address < self._prologue_end

    @cached_property
    def _prologue_end(self) -> int:
        assert self._entry is not None
        return self._module.prologue_end(self._function, self._entry)

    def _value(self, entry: Entry, type_: CType, location: Location | None = None) -> typed.Value | Scattered:
        location = self._location(entry) if location is None else location
        if isinstance(location, Unavailable):
            raise NotKnownError(location.reason, self._where_known(entry, is_at_entry=location.is_at_entry))
        return value_at(location, type_, self._machine)

    def _where_known(self, entry: Entry, *, is_at_entry: bool) -> str | None:
        """Say at which instructions of the function a variable has a place."""
        if self._entry is None:
            return None
        name = self._module.function_symbol(self._entry) or "the function"
        listed = [f"{name}+{start - self._entry:#x} to +{end - self._entry:#x}" for each in entry.origins()
                  for start, end in known_ranges(each) if start >= self._entry]  # fmt: skip
        more = ", …" if len(listed) > _LISTED else ""
        if listed:
            return f"it is known from {', '.join(listed[:_LISTED])}{more}"
        return f"probe the entry of '{name}'" if is_at_entry else None


def _variable_below(block: Entry, name: str, depth: int) -> Entry | None:
    """Return the variable of a name in a block or those in it, without functions that were inlined."""
    for entry in block.children():
        if entry.tag == Tag.VARIABLE and entry.name == name and not entry.flag(At.DECLARATION):
            return entry
        if entry.tag == Tag.LEXICAL_BLOCK and depth < _DEPTH_MAX:
            found = _variable_below(entry, name, depth + 1)
            if found is not None:
                return found
    return None


def names_in(module: DebugModule, place: str | None, *, at_return: bool) -> ModuleNames | ProbeNames | None:
    """
    Return the names at a place that is written as in ``DebugModule.address_of``; None without debug information.

    Where no function is described there, they are those of the module.
    """
    file, types = module.file, module.types
    if file is None or types is None:
        return None
    address = module.address_of(place) if place is not None else None
    function = function_at(file, address) if address is not None else None
    names = ModuleNames(module, file, types, None if function is None else function.unit)
    if function is None or address is None:
        return names
    return ProbeNames(module, names, types, function, address, at_return=at_return)
