"""
Meaning of names at an instruction of a module: parameters and variables of its function and of the module.

For code without optimization, compilers describe only where a function stores its parameters. Before the function has
stored them, they are where the ABI passes them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.modules.debug_scope import NameScope, ScopedTypes, ambiguity
from dprobes.dpc.modules.debug_values import GONE, in_registers, part_of, returned_value, value_at, value_of
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import ModuleVariable, NotKnownError, Scattered
from dprobes.dpc.typedtree.value_properties import folded
from dprobes.dpc.types.argument_places import ArgumentPlace, ResultPart, argument_places, go_results
from dprobes.dpc.types.c_types import INT, UNSIGNED, VOID, Record, Void, is_scalar, size_of
from dprobes.dwarf.address_lists import covers
from dprobes.dwarf.debug_entries import ORIGINS_MAX
from dprobes.dwarf.dwarf_numbers import At, Tag
from dprobes.dwarf.entry_search import definitions_of, function_at
from dprobes.dwarf.variable_locations import frame_at, is_listed, known_ranges, location_at
from dprobes.target.unwind.dwarf_expressions import (
    FrameAddressOf,
    InMemory,
    LinkAddress,
    Loaded,
    Number,
    Operation,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dprobes.dpc.modules.debug_module import DebugModule
    from dprobes.dpc.modules.debug_values import DebugTypes, Machine
    from dprobes.dpc.types.c_types import CType, Member
    from dprobes.dwarf.debug_entries import Entry, Unit
    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.dwarf.entry_search import Scoped
    from dprobes.target.unwind.dwarf_expressions import Location

__all__ = ["ModuleNames", "ProbeNames", "names_in"]

_BLOCKS = frozenset((Tag.LEXICAL_BLOCK, Tag.INLINED_SUBROUTINE))
_VARIABLES = frozenset((Tag.FORMAL_PARAMETER, Tag.VARIABLE))
_NAMED = frozenset((Tag.VARIABLE, Tag.ENUMERATOR, Tag.MEMBER))
_NOWHERE = frame_at(None, 0, None)
"""The frame for locations that are the same at all instructions: no instruction and no frame base."""
_DEPTH_MAX = 64
_NUMBERED = 6
"""Number of arguments that have names of the form ``arg0``."""
_ARGUMENT_NAMES = tuple(f"arg{number}" for number in range(_NUMBERED))
_GO = 0x16
_ASSEMBLERS = (0x8001, 0x31)
"""Language codes (DWARF 5, 7.12) of Go, and of assemblers, which describe functions without their parameters."""
_LISTED = 3  # maximum number of ranges in a hint


class ModuleNames:
    """
    The names for code outside of any described function: a module's variables, enumerators and types.

    ``scope`` decides which of several entries with a name is meant.
    """

    def __init__(self, module: DebugModule, file: DebugFile, types: DebugTypes, scope: NameScope) -> None:
        self._module = module
        self._file = file
        self._entry_types = types
        self._scope = scope
        self.types = ScopedTypes(types.of, scope)

    def returned(self) -> ModuleVariable | None:
        """Return None: only a function has a return value."""
        return None

    def parameter_type(self, number: int) -> CType | None:  # noqa: ARG002 - no function has it
        """Return None: only a function has parameters."""
        return None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:  # noqa: ARG002 - no function has it
        """Return None: only a function has parameters."""
        return None

    def find(self, name: str) -> ModuleVariable | None:
        """Return the module's variable or enumerator of this name, else None; raise ``TargetError`` for several."""
        plain = name.removeprefix("::")
        has_symbol = self._module.symbol_address(plain) is not None
        scope = self._scope if plain == name else self._scope.outermost()
        return self._meant(plain, scope.groups(plain, _NAMED, c_declarations=has_symbol))

    def find_near(self, name: str) -> ModuleVariable | None:
        """Return a variable or enumerator of the scope's blocks and source files; None if there is none."""
        return self._meant(name, self._scope.near_groups(name, _NAMED))

    def static_variable(self, name: str) -> tuple[int, CType] | None:
        """
        Return the link address and the type of the module's variable of this name.

        Return None if there is none with a fixed address. Raise ``TargetError`` if there are several.
        """
        for found in self._candidates(self._scope.groups(name, frozenset((Tag.VARIABLE, Tag.MEMBER)))):
            place, type_ = self._one(name, found)
            if place.symbol:
                address = self._module.symbol_address(place.symbol)
                return None if address is None else (address, type_)
            match place.location:
                case InMemory(LinkAddress(address)):
                    return address, type_
            return None
        return None

    def member_of(self, scattered: Scattered, member: Member) -> typed_values.Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A structure in it is returned as its parts.
        """
        return part_of(scattered, member, self._module.machine())

    def _meant(self, name: str, groups: Iterator[Sequence[Scoped]]) -> ModuleVariable | None:
        for found in self._candidates(groups):
            place, type_ = self._one(name, found)
            return ModuleVariable(self._value(place, type_), type_)
        return None

    def _candidates(self, groups: Iterator[Sequence[Scoped]]) -> Iterator[Sequence[tuple[Scoped, _Place]]]:
        """Iterate over the entries with a place in each group that has some."""
        for group in groups:
            if found := [
                (each, place)
                for each in group
                if each.entry.tag != Tag.MEMBER or each.entry.flag(At.EXTERNAL) or each.entry.flag(At.DECLARATION)
                if (place := self._place(each)) is not None
            ]:
                yield found

    def _one(self, name: str, found: Sequence[tuple[Scoped, _Place]]) -> tuple[_Place, CType]:
        """
        Return place and type of the variable that all of the entries describe.

        Raise ``TargetError`` if they describe several.
        """
        by_place: dict[object, list[tuple[Scoped, _Place]]] = {}
        for each, place in found:
            by_place.setdefault(place.key, []).append((each, place))
        if len(by_place) > 1:
            common = [k for k, all_ in by_place.items() if any(each.entry.flag(At.EXTERNAL) for each, _ in all_)]
            if len(common) == 1:  # static variables of other source files are not visible
                by_place = {common[0]: by_place[common[0]]}
        if len(by_place) > 1:
            raise ambiguity(name, [all_[0][0] for all_ in by_place.values()])
        ((entry, place), *others) = next(iter(by_place.values()))
        type_ = self._entry_types.of_variable(entry.entry)
        for other, _ in others:  # a declaration may lack a part of its type, such as the size of an array
            if size_of(type_) is not None:
                break
            type_ = self._entry_types.of_variable(other.entry)
        return place, type_

    def _place(self, found: Scoped) -> _Place | None:
        """Return the place of a variable or the value of an enumerator; None if the entry is only a declaration."""
        entry = found.entry
        if entry.tag == Tag.ENUMERATOR:
            number = entry.number(At.CONST_VALUE)
            return None if number is None else _Place(("number", number), number=number)
        is_declared = entry.flag(At.DECLARATION) or entry.tag == Tag.MEMBER
        whole = _specified(entry) if is_declared else None
        if is_declared or entry.flag(At.EXTERNAL):
            symbol = entry.linker_name or ("" if any(each.name for each in found.scopes) else entry.name or "")
            address = self._module.symbol_address(symbol) if symbol else None
            if address is not None and not self._module.is_thread_local(symbol):
                return _Place(("address", address), symbol=symbol)
            if is_declared and whole is None and not entry.has(At.CONST_VALUE):
                return None
        entry = entry if whole is None else whole
        location = location_at(entry, _NOWHERE)
        if isinstance(location, Unavailable) and not entry.has(At.LOCATION):
            joined = definitions_of(self._file, entry)
            location = next((location_at(each, _NOWHERE) for each in joined if each.has(At.LOCATION)), location)
        match location:
            case InMemory(LinkAddress(address)):
                return _Place(("address", address), location=location)
        return _Place(("location", entry.offset, id(entry.unit)), location=location)

    def _value(self, place: _Place, type_: CType) -> typed_values.Value | Scattered:
        machine = self._module.machine()
        if place.number is not None:
            integer = INT if INT.holds(place.number) else UNSIGNED
            return typed_values.Constant(place.number, integer)
        if place.location is not None:
            return value_at(place.location, type_, machine)
        return typed_values.Memory(typed_values.Symbol(place.symbol, machine.word), type_)


class _Place(NamedTuple):
    """A variable's symbol or location, or the value of an enumerator; equal ``key`` means the same variable."""

    key: object
    symbol: str = ""
    location: Location | None = None
    number: int | None = None


def _specified(declaration: Entry) -> Entry | None:
    """Return the entry in the same unit that defines a variable declared in a class or namespace; None without one."""
    waiting = [declaration.unit.root]
    while waiting:
        for entry in waiting.pop().children():
            if entry.tag == Tag.VARIABLE and entry.reference(At.SPECIFICATION) == declaration:
                return entry
            if entry.tag == Tag.NAMESPACE:
                waiting.append(entry)
    return None


class ProbeNames:
    """
    Names at the link address of a probepoint. With ``at_return``, the function that begins there has returned.

    The function's own names take precedence over the module's, and names of inner blocks over those of outer ones.
    """

    def __init__(
        self,
        module: DebugModule,
        types: DebugTypes,
        function: Entry,
        address: int,
        *,
        at_return: bool,
    ) -> None:
        self._module = module
        self._types = types
        self._function = function
        self._address = address
        self._at_return = at_return

    @cached_property
    def _names(self) -> ModuleNames:
        """The names in the scope of the innermost function inlined at the place, else of the function itself."""
        assert self._module.file is not None
        blocks = [self._function] if self._at_return else self._blocks()
        number = next((n for n, each in enumerate(blocks) if each.tag == Tag.INLINED_SUBROUTINE), len(blocks) - 1)
        inner = blocks[number]
        units: list[Unit] = []
        for unit in (inner.origin.unit, self._function.unit):
            if all(unit is not known for known in units):
                units.append(unit)
        scope = NameScope(self._module.file, units, inner.origin, blocks[: number + 1])
        return ModuleNames(self._module, self._module.file, self._types, scope)

    @property
    def types(self) -> ScopedTypes:
        """The types that names denote in the scope of the place."""
        return self._names.types

    @cached_property
    def _entry(self) -> int | None:
        """The link address of the function's first instruction, or None if it is unknown."""
        for each in (At.LOW_PC, At.ENTRY_PC):
            if (found := self._function.address(each)) is not None:
                return found
        from dprobes.dwarf.address_lists import ranges_of

        return next((start for start, _ in ranges_of(self._function)), None)

    @cached_property
    def _parameters(self) -> Sequence[Entry]:
        """The parameters in the order of the source, each from the function or its abstract origin."""
        own = [child for child in self._function.children() if child.tag == Tag.FORMAL_PARAMETER]
        origin = _abstract(self._function)
        if origin == self._function:
            return own
        whole = [child for child in origin.children() if child.tag == Tag.FORMAL_PARAMETER]
        if not whole or (own and not any(child.has(At.ABSTRACT_ORIGIN) for child in own)):
            return own  # the origin is only a declaration
        here = {_abstract(child): child for child in own}
        return [here.get(child, child) for child in whole] if len(whole) >= len(own) else own

    @cached_property
    def _places(self) -> Mapping[int, ArgumentPlace]:
        """
        The places where the ABI passes the parameters, by parameter number.

        Parameters without any location are not passed, as in some variants of constructors. A parameter whose location
        is a stored address is passed by address.
        """
        if self._is_go:
            return {}
        if self._module.elf.machine not in ("x86_64", "i386"):
            return self._places_of_words
        numbers: list[int] = []
        types: list[CType] = []
        for number, each in enumerate(self._parameters):
            if each.flag(At.VARIABLE_PARAMETER) or not any(it.has(At.LOCATION) for it in each.origins()):
                continue
            type_ = self._types.of_variable(each)
            location = self._location(each)
            if isinstance(type_, Record) and isinstance(location, InMemory) and isinstance(location.address, Loaded):
                type_ = Record(type_.tag, is_passed_by_address=True)
            numbers.append(number)
            types.append(type_)
        places = argument_places(types, self._returned_type or VOID, self._module.elf.word_size)
        return dict(zip(numbers, places, strict=True))

    @property
    def _places_of_words(self) -> Mapping[int, ArgumentPlace]:
        """The places of the leading parameters that fit in a word, on processors other than x86: ``arg0`` and so on."""
        words: dict[int, ArgumentPlace] = {}
        for number, each in enumerate(self._parameters[:_NUMBERED]):
            type_ = self._types.of_variable(each)
            if not is_scalar(type_) or (size_of(type_) or 0) > self._module.elf.word_size:
                break
            words[number] = ArgumentPlace((f"arg{number}",))
        return {} if isinstance(self._returned_type, Record) else words

    @property
    def _is_go(self) -> bool:
        return self._function.unit.root.number(At.LANGUAGE) == _GO

    @cached_property
    def _returned_type(self) -> CType | None:
        """The return type of the function, or None for ``void``."""
        found = self._types.of_variable(self._function)
        return None if isinstance(found, Void) else found

    def returned(self) -> ModuleVariable | None:
        """Return the function's return value, for Go its first result; raise ``NotKnownError`` if there is none."""
        if self._is_go:
            first = next((n for n, each in enumerate(self._parameters) if each.flag(At.VARIABLE_PARAMETER)), None)
            if first is None:
                raise NotKnownError("the function returns nothing")
            return self._go_result(first)
        type_ = self._returned_type
        if type_ is None:
            raise NotKnownError("the function returns nothing")
        return returned_value(type_, self._module.machine(), is_x86=self._module.elf.machine in ("x86_64", "i386"))

    def _go_result(self, number: int) -> ModuleVariable:
        """Return a result of a Go function; debug information describes results as parameters."""
        results = [each for each in self._parameters if each.flag(At.VARIABLE_PARAMETER)]
        types = [self._types.of_variable(each) for each in results]
        place = results.index(self._parameters[number])
        return in_registers(types[place], go_results(types)[place], self._module.machine())

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter, or None if the function has fewer."""
        return self._types.of_variable(self._parameters[number]) if number < len(self._parameters) else None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """
        Return a parameter, read as ``type_``, or None for a variadic one.

        Raise ``NotKnownError`` if its place is unknown.
        """
        if number < len(self._parameters):
            return ModuleVariable(self._parameter(number, type_), type_)
        if any(child.tag == Tag.UNSPECIFIED_PARAMETERS for child in self._function.origin.children()):
            return None
        count = len(self._parameters)
        raise NotKnownError(f"the function has {count or 'no'} parameter{'s' * (count != 1)}")

    def find(self, name: str) -> ModuleVariable | None:
        """
        Return the variable or parameter of this name, None without one.

        Raise ``NotKnownError`` if it has no value at the probed instruction.
        """
        if self._at_return or name.startswith("::"):
            return self._named_parameter(name) or self._names.find(name)
        blocks = self._blocks()
        for number, block in enumerate(blocks):
            if (found := self._in_block(block, name)) is not None:
                return found
            if block.tag == Tag.INLINED_SUBROUTINE and (found := self._beside_call(blocks[number + 1 :], block, name)):
                return found
        if (other := _variable_below(self._function, name, 0)) is not None:
            # A variable of this name in another source file would not be the one that the user means.
            if (found := self._names.find_near(name)) is not None:
                return found
            raise NotKnownError("outside of its block", self._where_known(other, is_at_entry=False))
        return self._names.find(name)

    def known(self) -> list[str]:
        """Return the names of the parameters and variables in scope, those of inner blocks first."""
        blocks = [self._function] if self._at_return else self._blocks()
        names = [each.name for block in blocks for each in block.children() if each.tag in _VARIABLES]
        return list(dict.fromkeys(name for name in names if name))

    def _in_block(self, block: Entry, name: str) -> ModuleVariable | None:
        """Return the variable of a block, or of its abstract origin, which has more variables; None without one."""
        for entry in block.children():
            if entry.tag in _VARIABLES and entry.name == name and not entry.flag(At.DECLARATION):
                if block is self._function and entry in self._parameters:
                    return self.parameter(self._parameters.index(entry), self._types.of_variable(entry))
                type_ = self._types.of_variable(entry)
                return ModuleVariable(self._value(entry, type_), type_)
        if block is self._function and (found := self._named_parameter(name)) is not None:
            return found
        for entry in block.origin.children():
            if entry.tag in _VARIABLES and entry.name == name:
                if entry.flag(At.DECLARATION):
                    return self._names.find(name)
                type_ = self._types.of_variable(entry)
                return ModuleVariable(self._value(entry, type_), type_)
        return None

    def _beside_call(self, around: Sequence[Entry], call: Entry, name: str) -> ModuleVariable | None:
        """
        Return the file-scope variable that a name means in an inlined function, or None if there is none.

        The inlined function cannot access its caller's variables. At its first instruction, however, the user may mean
        a variable of the caller: if both exist, raise ``NotKnownError``.
        """
        if (found := self._names.find_near(name)) is None:
            return None
        is_first = self._address in (call.address(At.LOW_PC), call.address(At.ENTRY_PC))
        callers = [each for each in around if any(entry.name == name for entry in each.origin.children())]
        if is_first and callers and callers[0].tag in _BLOCKS | {Tag.SUBPROGRAM}:
            caller = self._function.name or "the function"
            reason = f"'{caller}' has one, and the source file another, and here a call was inlined"
            raise NotKnownError(reason, f"write ::{name} for that of the file, or probe another instruction")
        return found

    def _named_parameter(self, name: str) -> ModuleVariable | None:
        """Return a parameter by its name, even if only the function's abstract origin describes it, else None."""
        for number, parameter in enumerate(self._parameters):
            if parameter.name == name:
                return self.parameter(number, self._types.of_variable(parameter))
        return None

    def member_of(self, scattered: Scattered, member: Member) -> typed_values.Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A structure in it is returned as its parts.
        """
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

    def _parameter(self, number: int, type_: CType) -> typed_values.Value | Scattered:
        entry = self._parameters[number]
        if self._at_return and self._is_go and entry.flag(At.VARIABLE_PARAMETER):
            return self._go_result(number).value
        location = self._location(entry)
        if self._is_before_it_is_kept(entry, location):
            place = self._places.get(number)
            assert self._entry is not None
            if place is None or not self._module.are_untouched(place.registers, self._entry, self._address):
                name = self._module.function_symbol(self._entry) or "the function"
                hint = f"it is known at {name} and from +{self._prologue_end - self._entry:#x} on"
                raise NotKnownError("not yet where the function keeps it", hint)
            return self._argument(place, type_)
        if not self._at_return:
            return self._value(entry, type_, location)
        if isinstance(location, InMemory) and (argument := self._argument_on_stack(location)) is not None:
            return folded(typed_values.Convert(self._at_entry(argument), type_))
        if isinstance(location, Unavailable):
            raise NotKnownError(location.reason)
        return value_at(location, type_, self._module.machine(at_return=True))

    def _argument(self, place: ArgumentPlace, type_: CType) -> typed_values.Value | Scattered:
        """Return an argument at the place where the ABI passes it."""
        if self._at_return:
            return self._argument_at_entry(place, type_)
        word = self._machine.word
        if place.offset is not None:
            # At the entry the frame address is that of the first stack argument; the return address is below it.
            frame = value_of(FrameAddressOf(self._address), self._machine)
            above = typed_values.Constant(place.offset - word.size, word)
            address: typed_values.Value = folded(typed_values.Arithmetic("+", frame, above, word))
            if place.is_address:
                address = folded(typed_values.Memory(address, word))
            return typed_values.Memory(address, type_)
        if place.is_address:
            return typed_values.Memory(typed_values.Register(place.registers[0], word), type_)
        return in_registers(type_, _parts_of(place), self._machine).value

    def _argument_at_entry(self, place: ArgumentPlace, type_: CType) -> typed_values.Value | Scattered:
        """
        Return an argument's value at the entry of the call that has returned.

        Raise ``NotKnownError`` if no register or stack word at the entry contained it.
        """
        registers = place.registers
        if place.offset is not None and self._module.elf.word_size == 4 and not place.is_address:
            registers = (f"arg{place.offset // 4 - 1}",)  # 32-bit arguments are numbered by their place on the stack
        is_known = all(name in _ARGUMENT_NAMES for name in registers) and registers and not place.is_address
        if not is_known or (is_scalar(type_) and len(registers) * self._machine.word.size < (size_of(type_) or 0)):
            raise NotKnownError(*GONE)
        return in_registers(type_, _parts_of(ArgumentPlace(registers)), self._module.machine(at_return=True)).value

    def _argument_on_stack(self, location: InMemory) -> int | None:
        """Return the number of an argument on the stack of a 32-bit program, or None for other locations."""
        match location.address:
            case FrameAddressOf():
                distance = 0
            case Operation("+", FrameAddressOf(), Number(distance)):
                pass
            case _:
                return None
        is_argument = self._module.elf.word_size == 4 and not distance % 4 and distance // 4 < _NUMBERED
        return distance // 4 if is_argument else None

    def _at_entry(self, number: int) -> typed_values.Value:
        return typed_values.Register(f"arg{number}", self._machine.word, at_entry=True)

    def _is_before_it_is_kept(self, entry: Entry, location: Location) -> bool:
        """Return whether a parameter's only location is in the frame, where the prologue has not yet stored it."""
        if is_listed(entry) or self._entry is None or not isinstance(location, InMemory):
            return False
        address = location.address.address if isinstance(location.address, Loaded) else location.address
        match address:
            case LinkAddress():
                return False
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

    def _value(self, entry: Entry, type_: CType, location: Location | None = None) -> typed_values.Value | Scattered:
        location = self._location(entry) if location is None else location
        if isinstance(location, Unavailable):
            raise NotKnownError(location.reason, self._where_known(entry, is_at_entry=location.is_at_entry))
        return value_at(location, type_, self._machine)

    def _where_known(self, entry: Entry, *, is_at_entry: bool) -> str | None:
        """
        Return a hint for a variable without a location at the instruction: the addresses where it has one.

        If there are none, and with ``is_at_entry`` the variable has a value at the function's entry, the hint names
        that. Return None if nothing helps.
        """
        if self._entry is None:
            return None
        name = self._module.function_symbol(self._entry) or "the function"
        listed = [f"{name}+{start - self._entry:#x} to +{end - self._entry:#x}" for each in entry.origins()
                  for start, end in known_ranges(each) if start >= self._entry]  # fmt: skip
        more = ", …" if len(listed) > _LISTED else ""
        if listed:
            return f"it is known from {', '.join(listed[:_LISTED])}{more}"
        return f"probe the entry of '{name}'" if is_at_entry else None


def _abstract(entry: Entry) -> Entry:
    """Return the abstract origin of an entry, or the entry itself; a declaration in a class is not followed."""
    for _ in range(ORIGINS_MAX):
        origin = entry.reference(At.ABSTRACT_ORIGIN)
        if origin is None:
            break
        entry = origin
    return entry


def _parts_of(place: ArgumentPlace) -> tuple[ResultPart, ...]:
    """Return the parts of an argument in registers, one word each."""
    return tuple(ResultPart(8 * number, 8, register) for number, register in enumerate(place.registers))


def _variable_below(block: Entry, name: str, depth: int) -> Entry | None:
    """
    Return the variable ``name`` of a block or of blocks in it, to a limited depth; None if there is none.

    Blocks of inlined functions are not searched. ``depth`` is the number of blocks around it so far.
    """
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
    Return the names that code at a place may use, or None without debug information.

    ``place`` has the syntax of ``DebugModule.address_of``. If ``place`` is None, or no function is described there,
    these are the names of the module.
    """
    file, types = module.file, module.entry_types
    if file is None or types is None:
        return None
    address = module.address_of(place) if place is not None else None
    function = function_at(file, address) if address is not None else None
    if function is None or address is None or function.unit.root.number(At.LANGUAGE) in _ASSEMBLERS:
        return ModuleNames(module, file, types, NameScope(file))
    return ProbeNames(module, types, function, address, at_return=at_return)
