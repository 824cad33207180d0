"""Types of a kernel's BTF as C types. The members of structures are read when they are first needed."""

from __future__ import annotations

import contextlib
import re
from functools import cached_property
from typing import TYPE_CHECKING

from dprobes.dpc.modules.debug_module import is_entry_by_name
from dprobes.dpc.modules.debug_values import (
    Machine,
    base_type,
    bit_field,
    part_of,
    plain_name,
    rank_of,
    returned_value,
)
from dprobes.dpc.modules.late_names import DescribedModule
from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import ModuleVariable, NamedTypes, NotKnownError
from dprobes.dpc.typedtree.value_properties import folded
from dprobes.dpc.types.c_types import (
    BOOL,
    CHAR,
    INT,
    UNSIGNED,
    VOID,
    Array,
    Enumeration,
    Floating,
    Integer,
    Member,
    Pointer,
    Record,
    Void,
    integer_of,
    is_same_layout,
    is_scalar,
    size_of,
)
from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import COMPOSITES, WRAPPERS, Kind
from dprobes.target.kernel.kernel_copies import bare_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from dprobes.dpc.modules.late_names import LateNames
    from dprobes.dpc.typedtree.name_scope import Scattered
    from dprobes.dpc.types.c_types import CType
    from dprobes.target.btf import Btf
    from dprobes.target.elf.elf_file import ElfFile
    from dprobes.target.kernel.tracepoints import KernelTracepoints

__all__ = ["BtfModule", "BtfTypes", "KernelModule"]

_CHAIN_MAX = 64
_WORD = 8
_COUNT_MAX = 1 << 40
_TAGGED = {"struct": (Kind.STRUCT,), "union": (Kind.UNION,), "enum": (Kind.ENUM, Kind.ENUM64)}


@contextlib.contextmanager
def damage_reported() -> Iterator[None]:
    """Raise ``TargetError`` for a ``FormatError`` in the ``with`` block, which reads the kernel's BTF."""
    try:
        yield
    except (IndexError, ValueError, FormatError, RecursionError) as error:
        raise TargetError(f"the kernel's type information is damaged: {error}") from None


class BtfTypes:
    """The types of a kernel; ``declared`` looks up the structures that the program itself defines."""

    def __init__(self, btf: Btf, declared: Callable[[str, str], Record | None]) -> None:
        self._btf = btf
        self.declared = declared
        self._types: dict[int, CType] = {}

    # By names

    def named(self, name: str, near: Collection[int] = ()) -> CType | None:
        """
        Return the ``typedef`` or integer of this name, preferably one with a number in ``near``; None without one.

        Raise ``TargetError`` if several types with different layouts have the name.
        """
        return self._found(name, (Kind.TYPEDEF, Kind.INT), near, name)

    def tagged(self, kind: str, tag: str, near: Collection[int] = ()) -> CType | None:
        """
        Return a structure, union or enumeration by its tag, preferably one with a number in ``near``; None without one.

        Raise ``TargetError`` if several types with different layouts have the tag.
        """
        return self._found(tag, _TAGGED[kind], near, f"{kind} {tag}")

    def enumerator(self, name: str) -> int | None:
        """Return the value of an enumerator, or None if there is none."""
        with damage_reported():
            return self._btf.enumerator(name)

    def _found(self, name: str, kinds: tuple[Kind, ...], near: Collection[int], written: str) -> CType | None:
        with damage_reported():
            numbers = [number for kind in kinds for number in self._btf.all_of(kind, name)]
            if len(numbers) > 1:
                numbers = [number for number in numbers if number in near] or numbers
            different: list[CType] = []
            for type_ in map(self.of, numbers):
                if not any(is_same_layout(type_, known) for known in different):
                    different.append(type_)
        if len(different) > 1:
            sizes = ", ".join(str(size_of(type_) or 0) for type_ in different)
            raise TargetError(
                f"the kernel has {len(different)} types '{written}', of {sizes} bytes",
                hint="a parameter or member of it means its own; or declare the intended one",
            )
        return different[0] if different else None

    def reached_from(self, numbers: Iterable[int]) -> frozenset[int]:
        """
        Return ``numbers`` and the numbers of the types that they lead to by pointers, qualifiers and type names.

        Members of structures are not followed.
        """
        found: set[int] = set()
        with damage_reported():
            for number in numbers:
                each = number
                for _ in range(_CHAIN_MAX):
                    if not each or each in found:
                        break
                    found.add(each)
                    if self._btf.kind(each) not in (*WRAPPERS, Kind.PTR):
                        break
                    each = self._btf.target(each)
        return frozenset(found)

    # By numbers

    def of(self, number: int) -> CType:
        """Return the type with a number; 0 is ``void``. Raise ``TargetError`` if BTF is malformed."""
        with damage_reported():
            return self._of(number, 0)

    def _of(self, number: int, depth: int) -> CType:
        if not number:
            return VOID
        if depth > _CHAIN_MAX:
            raise ValueError(f"type {number} does not end")
        if (known := self._types.get(number)) is None:
            known = self._types[number] = self._made(number, depth)
        return known

    def _made(self, number: int, depth: int) -> CType:
        btf, kind = self._btf, self._btf.kind(number)
        if kind in WRAPPERS:
            return self._of(btf.target(number), depth + 1)
        if kind in COMPOSITES:
            return self._record(number, kind)
        match kind:
            case Kind.PTR:
                return Pointer(self._of(btf.target(number), depth + 1), _WORD)
            case Kind.INT:
                return self._integer(number)
            case Kind.FLOAT:
                return Floating(btf.name(number), btf.target(number))
            case Kind.ENUM | Kind.ENUM64:
                return self._enumeration(number)
            case Kind.ARRAY:
                element, count = btf.array(number)
                type_ = self._of(element, depth + 1)
                if isinstance(type_, Void):
                    raise ValueError(f"array {number} has elements without a type")  # noqa: TRY004 - of the kernel
                return Array(type_, count if 0 < count <= _COUNT_MAX else None)  # 0: number not fixed
            case Kind.FWD:
                return self._forward(number)
        return VOID  # functions

    def _integer(self, number: int) -> CType:
        value, name = self._btf.value_type(number), plain_name(self._btf.name(number))
        if name in ("_Bool", "bool") and value.size == 1:
            return BOOL
        return base_type(name, value.size, _WORD, is_signed=value.is_signed or name == "char")

    def _enumeration(self, number: int) -> Enumeration:
        value = self._btf.value_type(number)
        size = value.size if value.size in (1, 2, 4, 8) else INT.size
        name, rank = "int" if value.is_signed else "unsigned int", rank_of("", size, _WORD)
        base = Integer(name, size, is_signed=value.is_signed, rank=rank)
        values = {name: base.cut(each) for name, each in self._btf.enumerators(number)}
        return Enumeration(self._btf.name(number), base, values)

    # Structures

    def _record(self, number: int, kind: Kind) -> Record:
        tag, is_union = self._btf.name(number), kind is Kind.UNION
        if tag and (declared := self.declared("union" if is_union else "struct", tag)) is not None:
            return declared
        return Record(tag, is_union=is_union, definition=lambda record: self._define(record, number))

    def _forward(self, number: int) -> Record:
        """Return a structure that is only declared here, with the members of its definition elsewhere."""
        tag = self._btf.name(number)
        if (declared := self.declared("struct", tag)) is not None:
            return declared

        def define(record: Record) -> None:
            for kind in ("struct", "union"):
                found = self.tagged(kind, tag)
                if isinstance(found, Record) and (members := found.members) is not None:
                    record.define(members, found.size, found.alignment)
                    return

        return Record(tag, definition=define)

    def _define(self, record: Record, number: int) -> None:
        with damage_reported():
            members = [self._member(*each) for each in self._btf.members(number)]
            record.define([each for each in members if each is not None], self._btf.target(number), 1)

    def _member(self, name: str, type_number: int, first: int, width: int) -> Member | None:
        """Return a member that begins at bit ``first``; ``width`` is a bit field's width or 0. None if no unit fits."""
        type_ = self._of(type_number, 0)
        if not width and first % 8 == 0:
            return Member(name, type_, first // 8)
        size = size_of(type_) or 0
        if not 0 < width <= 8 * size:
            return None
        return bit_field(name, type_, first, width, _WORD)


_LONG = Integer("unsigned long", _WORD, is_signed=False, rank=4)
_ARGUMENTS = 6
"""Number of argument words that are passed in registers."""
_MACHINE = Machine(_LONG, "little", {}, lambda _address: None, lambda _address: None)


class BtfModule:
    """Running kernel or one of its modules, with the names and types of its BTF."""

    def __init__(self, btf: Callable[[], Btf | None]) -> None:
        """Read the types with ``btf`` at the first request; it returns None if the kernel exposes none."""
        self._read = btf
        self.declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
        """Look-up of structures that the program itself declares, by kind and tag; it returns None if there is none."""

    @cached_property
    def btf(self) -> Btf | None:
        """The type information, or None if the kernel exposes none."""
        return self._read()

    @cached_property
    def types(self) -> BtfTypes | None:
        """The types, or None if the kernel exposes none."""
        return None if self.btf is None else BtfTypes(self.btf, self._declared)

    def _declared(self, kind: str, tag: str) -> Record | None:
        return self.declared(kind, tag)

    def names_at(self, place: str | None, *, at_return: bool) -> BtfNames:
        """
        Return the names that BTF has for a probe's code: parameters and return value of ``place``, variables and types.

        Only the name of a function has parameters: at its first instruction or, with ``at_return``, at its return.
        Another place, and None, have only variables and types. If functions of several files have one name,
        ``FILE:NAME`` or ``NAME,NUMBER``, BTF describes them only if their parameters are the same.
        """
        name = None if place is None else bare_name(place.strip('"'))
        function = name if name is not None and name.isidentifier() else None
        return BtfNames(self, function, at_return=at_return)


class _TypesNear:
    """The types of a kernel by name (``NamedTypes``), preferably those whose number is in ``near``."""

    def __init__(self, types: BtfTypes, near: frozenset[int]) -> None:
        self._types = types
        self._near = near

    def named(self, name: str) -> CType | None:
        """Return the ``typedef`` or integer of this name; None if there is none."""
        return self._types.named(name, self._near)

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return the structure, union or enumeration (``kind``) with a tag; None if there is none."""
        return self._types.tagged(kind, tag, self._near)


class BtfNames:
    """
    The parameters and return value of a kernel function by BTF, and the kernel's variables and types.

    ``function`` is None at a place that is not the entry or, ``at_return``, the return of one: only variables and
    types.
    """

    def __init__(self, module: BtfModule, function: str | None, *, at_return: bool) -> None:
        self._module = module
        self._function = function
        self._at_return = at_return
        self.was_asked = False

    @cached_property
    def _signature(self) -> tuple[Sequence[tuple[str, int]], int] | None:
        """The parameters, and the number of the return type, or None without such a function."""
        self.was_asked = True
        btf = self._module.btf
        if btf is None or self._function is None:
            return None
        try:
            with damage_reported():
                return btf.parameters(self._function), btf.result(self._function)
        except TargetError:
            return None  # the kernel has no such function, or no types for it

    @cached_property
    def _parameters(self) -> Sequence[tuple[str, CType, int | None]]:
        """Name, type and argument number of each parameter; the number is None if it is not in one register."""
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
    """Number of arguments that have names of the form ``arg0``."""

    @cached_property
    def types(self) -> NamedTypes | None:
        """The types, preferably those that the function's parameters and result use, or None if there are none."""
        signature, types = self._signature, self._module.types
        if types is None or signature is None:
            return types
        return _TypesNear(types, types.reached_from([number for _, number in signature[0]] + [signature[1]]))

    def returned(self) -> ModuleVariable | None:
        """
        Return the function's return value, or None if it is unknown.

        Raise ``NotKnownError`` if it returns nothing.
        """
        signature, types = self._signature, self._module.types
        if signature is None or types is None:
            return None
        type_ = types.of(signature[1])
        if isinstance(type_, Void):
            raise NotKnownError("the function returns nothing")
        return returned_value(type_, _MACHINE, is_x86=True)

    def names(self) -> list[str]:
        """Return the names of the function's parameters, in their order; empty without a function."""
        return [name for name, _, _ in self._parameters if name]

    def member_of(self, scattered: Scattered, member: Member) -> typed_values.Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A structure in it is returned as its parts.
        """
        return part_of(scattered, member, _MACHINE)

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter, or None if it is not known, or not alone in a register."""
        if number >= len(self._parameters):
            return None
        _, type_, argument = self._parameters[number]
        return type_ if argument is not None else None

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, read as ``type_``, or None if it is not alone in a register."""
        if number >= len(self._parameters) or (argument := self._parameters[number][2]) is None:
            return None
        return self._argument(argument, type_)

    @property
    def is_known(self) -> bool:
        """True if the kernel's types include the function."""
        return self._signature is not None

    def named_parameter(self, name: str) -> ModuleVariable | None:
        """Return the parameter of this name, or None if it is not alone in a register."""
        for found, type_, argument in self._parameters:
            if found == name and argument is not None:
                return self._argument(argument, type_)
        return None

    def _argument(self, number: int, type_: CType) -> ModuleVariable:
        register = typed_values.Register(f"arg{number}", _LONG, at_entry=self._at_return)
        return ModuleVariable(folded(typed_values.Convert(register, type_)), type_)

    def elsewhere(self, name: str) -> ModuleVariable | None:
        """Return the variable or enumerator of the kernel with this name; None if there is none."""
        name = name.removeprefix("::")
        btf, types = self._module.btf, self._module.types
        if btf is None or types is None:
            return None
        if (value := types.enumerator(name)) is not None:
            integer = INT if INT.holds(value) else UNSIGNED if UNSIGNED.holds(value) else _LONG
            return ModuleVariable(typed_values.Constant(integer.cut(value), integer), integer)
        try:
            with damage_reported():
                type_ = types.of(btf.target(btf.find(Kind.VAR, name)))
        except TargetError:
            return None
        return ModuleVariable(typed_values.Memory(typed_values.Symbol(name, _LONG), type_), type_)


# BTF describes the parameters of functions, but not their local variables. Debug information is opened on request only.

_CHARACTERS = re.compile(r"(?:const )?(?:(?:un)?signed )?char ?\[(\w*)\]")


class KernelModule:
    """
    The kernel or one of its modules, with BTF and debug information.

    ``described`` returns the file with debug information, None if this machine has none.
    """

    def __init__(self, types: BtfModule, described: Callable[[], ElfFile | None]) -> None:
        self._btf = types
        self._described = described
        self.declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
        """Look-up of structures that the program itself declares, by kind and tag; it returns None if there is none."""
        types.declared = self._declared

    def _declared(self, kind: str, tag: str) -> Record | None:
        return self.declared(kind, tag)

    @cached_property
    def debug(self) -> DescribedModule | None:
        """The module with its debug information, or None if none is installed."""
        elf = self._described()
        if elf is None:
            return None
        found = DescribedModule(elf)
        found.declared = self._declared
        return None if found.file is None else found

    @property
    def types(self) -> NamedTypes | None:
        """Types from BTF, or from debug information for a kernel without BTF, or None without either."""
        if self._btf.types is not None:
            return self._btf.types
        return None if self.debug is None else self.debug.types

    def names_at(self, place: str | None, *, at_return: bool) -> KernelNames:
        """
        Return the names that a probe's code at ``place``, ``FUNCTION`` or ``FUNCTION+8``, may use.

        With ``at_return`` the return of the function is probed. For None these are the variables and types of the whole
        kernel.
        """
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
        """Return the type of a field that is a number, string or character array; None for others, or if it varies."""
        from dprobes.target.kernel.traced_fields import Form

        self.was_asked = True
        try:
            if self._subsystem == "syscall":
                event = self._tracepoints.find_system_call(self._name, [name], at_return=self._at_return)
                ways = [event.fields[name]]
            else:
                ways = self._tracepoints.ways_to(self._subsystem, self._name, name)
        except (OSError, TargetError):
            return None  # the resolution of the program reports the error
        if not ways or len({(way.size, way.is_signed, way.form) for way in ways}) != 1:
            return None
        if ways[0].form is not Form.NUMBER:
            found = [match for way in ways if (match := _CHARACTERS.fullmatch(way.type_name)) is not None]
            counts = {int(match[1]) if match[1].isdecimal() else None for match in found}
            # The record contains the position of such a string, whose length is known only at the hit.
            return Array(CHAR, counts.pop()) if len(found) == len(ways) and len(counts) == 1 else None
        if all(way.type_name.replace("const ", "").replace(" ", "") == "char*" for way in ways):
            return Pointer(CHAR, ways[0].size)
        return integer_of(ways[0].size, is_signed=ways[0].is_signed)


class KernelNames:
    """Names of the kernel at a place (``PlaceNames``). Those of ``btf``, for entries and returns, come first."""

    def __init__(self, module: KernelModule, btf: BtfNames, place: str | None, *, at_return: bool) -> None:
        self._module = module
        self._btf = btf
        self._place = place
        self._at_return = at_return
        self.is_entry = place is None or is_entry_by_name(place)

    @property
    def was_asked(self) -> bool:
        """True if any name was looked up."""
        return self._btf.was_asked

    @cached_property
    def _debug(self) -> LateNames | None:
        """
        The names of debug information at the place, or None without debug information.

        For a numeric place, whose section is not known, they are the names of the module.
        """
        debug = self._module.debug
        if debug is None:
            return None
        place = self._place if self._place is None or not self._place[:1].isdigit() else None
        return debug.names_at(place, at_return=self._at_return)

    @property
    def arguments(self) -> int:
        """The number of arguments that have names of the form ``arg0``."""
        return self._btf.arguments

    @property
    def types(self) -> NamedTypes | None:
        """The types of BTF, else of debug information, in the scope of the place."""
        if self._btf.types is not None or self._debug is None:
            return self._btf.types
        return self._debug.types

    def returned(self) -> ModuleVariable | None:
        """Return the return value of the function, or None if it is not known."""
        if self._btf.is_known or self._debug is None:
            return self._btf.returned()
        return self._debug.returned()

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter, or None if it is not known."""
        found = self._btf.parameter_type(number)
        return found if found is not None or self._debug is None else self._debug.parameter_type(number)

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, read as ``type_``, or None if it is not known."""
        found = self._btf.parameter(number, type_)
        return found if found is not None or self._debug is None else self._debug.parameter(number, type_)

    def find(self, name: str) -> ModuleVariable | None:
        """Return the parameter, variable or enumerator of this name; None if there is none."""
        if (found := self._btf.named_parameter(name)) is not None:
            return found
        if self._place is not None and self._debug is not None and (found := self._debug.find(name)) is not None:
            return found
        found = self._btf.elsewhere(name)
        return found if found is not None or self._debug is None else self._debug.find(name)

    def cause(self, name: str) -> str | None:
        """Return a hint for an unknown name: the names known at the place, or None if nothing describes the kernel."""
        if self._place is None or self.types is None:
            return None
        declared = f"for a variable without debug information, declare it: extern int {name};"
        names = self._btf.names()
        return f"known at this place: {', '.join(names)}; {declared}" if names else None

    def member_of(self, scattered: Scattered, member: Member) -> typed_values.Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A structure in it is returned as its parts.
        """
        return self._btf.member_of(scattered, member)
