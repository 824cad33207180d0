"""Meaning of names: nested blocks, the program around them, and names that every probe has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.dpc.typedtree import typed_values
    from dprobes.dpc.typedtree.process_items import ItemKind
    from dprobes.dpc.typedtree.typed_values import Value, VariableKind
    from dprobes.dpc.types.c_types import CType, Member, Record
    from dprobes.source_text import Span

__all__ = [
    "FunctionSignature",
    "GivenTypes",
    "ItemName",
    "Meaning",
    "ModuleSymbol",
    "ModuleVariable",
    "Named",
    "NamedTypes",
    "NotKnownError",
    "Part",
    "PlaceNames",
    "ProbedModule",
    "ProgramVariable",
    "Scattered",
    "Scope",
    "SlotName",
    "Surroundings",
    "TracedField",
]


class NotKnownError(Exception):
    """Error of a variable that has no value at an instruction; ``hint`` suggests an alternative."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class Part(NamedTuple):
    """``size`` bytes of a variable from ``offset`` on: the low bytes of ``value``, which is None if optimized out."""

    offset: int
    size: int
    value: typed_values.Value | None


class Scattered(NamedTuple):
    """
    A structure that is at least partly in registers or optimized out, and not in memory as a whole.

    ``parts`` are in ascending order of their offsets.
    """

    parts: tuple[Part, ...]
    type: CType


class SlotName(NamedTuple):
    """A variable in cells of the RPN stack, or, with a negative slot, a parameter of a function."""

    slot: int
    type: CType
    span: Span


class ItemName(NamedTuple):
    """
    The variable of a loop over items of the system, which has fields.

    ``number`` counts such loops in a block; the fields that are numbers are in the slots from ``slot`` on.
    """

    kind: ItemKind
    number: int
    slot: int
    span: Span


class Named(NamedTuple):
    """
    Parameter of a probe.

    ``ordinal`` is its position in the function's parameters. ``argument`` is its position among the registers for
    integer arguments, or None if it is in no register. With ``is_declared``, the program states its type.
    """

    ordinal: int
    argument: int | None
    type: CType
    span: Span
    is_declared: bool = True


@dataclass(frozen=True, slots=True)
class ProgramVariable:
    """Variable that outlives the hit: ``count`` cells from ``first`` on. ``type`` is the type of an element."""

    kind: VariableKind
    first: int
    count: int
    type: CType
    is_array: bool
    span: Span


class ModuleSymbol(NamedTuple):
    """A variable of the module that the program declares (``extern``)."""

    name: str
    type: CType
    span: Span


class ModuleVariable(NamedTuple):
    """A variable, parameter or constant of the module from its debug information."""

    value: Value | Scattered
    type: CType


class TracedField(NamedTuple):
    """A named field of the tracepoint or system call that is probed."""

    name: str


class FunctionSignature(NamedTuple):
    """A function that the program itself defines: its return type and the types of its parameters."""

    name: str
    type: CType
    parameters: tuple[CType, ...]
    span: Span


class Surroundings(NamedTuple):
    """
    Context of an expression.

    * With ``at_return``, arguments have their values at the entry of the call. With ``is_entry_known``, the probe's
      condition guarantees that the entry of the call was seen. ``has_return`` is True if there is a call, so that
      ``return`` may precede the place.
    * ``is_traced`` means a tracepoint or system call, which has named fields. ``is_usdt`` means a USDT probe, which has
      its own arguments. ``given`` has the types of these fields or arguments.
    * ``watched`` is the watched object of a watchpoint, and ``line`` the source line of the probe.
    * ``allow_write`` allows assignments to the target. ``kernel`` is set if a hit may be in the kernel.
    * In a function of the program (``is_function``) and in a block of the tool (``is_tool``), there is no hit.
    * ``names`` has the names of the place in ``module``, which is empty if it is not known.
    """

    at_return: bool = False
    is_function: bool = False
    watched: str | None = None
    line: int = 0
    is_traced: bool = False
    is_usdt: bool = False
    allow_write: bool = False
    is_tool: bool = False
    is_entry_known: bool = False
    has_return: bool = False
    names: PlaceNames | None = None
    given: GivenTypes | None = None
    module: str = ""
    kernel: ProbedModule | None = None

    @property
    def has_hit(self) -> bool:
        """True if the expression is evaluated at a hit, with registers and memory."""
        return not self.is_function and not self.is_tool

    @property
    def way_to_return(self) -> str:
        """The hint for a value that is known at a return only."""
        return "write 'return' before the place" if self.has_return else "functions and system calls have returns"

    def refusal(self, name: str) -> tuple[str, str]:
        """Return the error message and the hint for a name, such as ``arg0``, that has a value only at a hit."""
        if self.is_tool:
            return f"'{name}' belongs to a hit, and a block of the tool has none", "keep it in a variable or a table"
        return f"'{name}' is not known in a function", "give it to the function as an argument"


class NamedTypes(Protocol):
    """The types of a module by name; ``TargetError`` is raised for an ambiguous name or malformed description."""

    def named(self, name: str) -> CType | None:
        """Return the ``typedef`` or C++ class with a plain name, or None if there is none."""

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return the structure, union or enumeration (``kind``) with a tag; None if there is none."""


class ProbedModule(Protocol):
    """A probed module; ``declared(kind, tag)`` returns a structure that the program itself defines, or None."""

    declared: Callable[[str, str], Record | None]

    @property
    def types(self) -> NamedTypes | None:
        """The types, or None without a description."""

    def names_at(self, place: str | None, *, at_return: bool) -> PlaceNames:
        """
        Return the names that a probe's code at ``place`` may use.

        If it is None, return variables and types of the module. With ``at_return``, the place is a function of which
        the return is probed.
        """

    def given_at(self, place: str, *, at_return: bool) -> GivenTypes:
        """
        Return the types of the values that a place without code gives: arguments of a USDT probe, or fields.

        ``place`` is ``PROVIDER:NAME`` of a USDT probe, ``SUBSYSTEM:NAME`` of a tracepoint, or ``syscall:NAME``.
        """


class GivenTypes(Protocol):
    """The types of the arguments of a USDT probe by number, or of the fields of a kernel event."""

    was_asked: bool
    """True if any type was looked up. The name may then have another type at another place."""

    def type_of(self, name: str) -> CType | None:
        """Return the C type of a field or argument, or None if it is not known, or is a machine word."""


class TypeListener(Protocol):
    """A listener for the types of expressions and parameters, which editors show."""

    def __call__(self, span: Span, type_: CType) -> None:
        """
        Receive the type of the expression or parameter at ``span``.

        A span may have several types, one for each probepoint.
        """


class PlaceNames(Protocol):
    """Names that code at a place may use, from debug information. If that is malformed, ``TargetError`` is raised."""

    @property
    def was_asked(self) -> bool:
        """True if any name was looked up: the same text may then mean something else at another place."""

    @property
    def is_entry(self) -> bool:
        """True if the place is the name of a function alone: arguments are where the ABI passes them."""

    @property
    def arguments(self) -> int:
        """The number of arguments that have names of the form ``arg0`` at the place."""

    @property
    def types(self) -> NamedTypes | None:
        """The types by their names at the place, or None without a description."""

    def returned(self) -> ModuleVariable | None:
        """
        Return the return value of the probed function, or None if its type is not known.

        Raise ``NotKnownError`` if it is in no register.
        """

    def parameter_type(self, number: int) -> CType | None:
        """Return the C type of the function's parameter ``number``, from 0, or None if it is not known."""

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """
        Return the function's parameter ``number``, from 0, read as ``type_``; None if there is none.

        Raise ``NotKnownError`` if it has no value at the place.
        """

    def find(self, name: str) -> ModuleVariable | None:
        """
        Return the variable or constant of a name, None without one.

        Raise ``NotKnownError`` if it has no value here.
        """

    def cause(self, name: str) -> str | None:
        """Return a hint for an unknown name, or None if the module has no description."""

    def member_of(self, scattered: Scattered, member: Member) -> Value | Scattered:
        """
        Return a member of a structure that is at least partly in registers.

        A nested structure is returned as its parts. Raise ``NotKnownError`` if the member has no value.
        """


Declared = SlotName | Named | ProgramVariable | ModuleSymbol | ItemName
"""Meanings that a declaration can give to a name."""

Meaning = Declared | TracedField | ModuleVariable


class Scope:
    """Names that are visible in a block of the program: its own, and those of the enclosing blocks."""

    def __init__(self, outer: Scope | None = None) -> None:
        self._outer = outer
        self._names: dict[str, Declared] = {}

    def add(self, name: str, meaning: Declared) -> Declared | None:
        """Add a name, unless this block has it; return its previous meaning in this block, None if it was added."""
        if (known := self._names.get(name)) is not None:
            return known
        self._names[name] = meaning
        return None

    def find(self, name: str) -> Declared | None:
        """Return the meaning of a name here, or None if it has none."""
        found = self._names.get(name)
        return found if found is not None or self._outer is None else self._outer.find(name)

    def names(self) -> Iterator[str]:
        """Iterate over all names that are visible here."""
        yield from self._names
        if self._outer is not None:
            yield from self._outer.names()
