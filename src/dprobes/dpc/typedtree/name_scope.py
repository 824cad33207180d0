"""What names mean where: blocks in blocks, the program around them, and what every probe has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dprobes.dpc.typedtree import typed_values
    from dprobes.dpc.typedtree.typed_values import Value, VariableKind
    from dprobes.dpc.types.c_types import CType, Member, Record
    from dprobes.source_text import Span

__all__ = [
    "FunctionSignature",
    "GivenTypes",
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
    """The reason why a variable has no value at an instruction; ``hint`` says what to do instead."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class Part(NamedTuple):
    """``size`` bytes of a variable from ``offset`` on: a word whose low bytes they are; None if they are nowhere."""

    offset: int
    size: int
    value: typed_values.Value | None


class Scattered(NamedTuple):
    """A structure that is not in memory: its parts in order."""

    parts: tuple[Part, ...]
    type: CType


@dataclass(frozen=True, slots=True)
class SlotName:
    """A variable on the RPN stack, or a parameter of a function (negative)."""

    slot: int
    type: CType
    span: Span


@dataclass(frozen=True, slots=True)
class Named:
    """
    A parameter of a probe.

    It is the ``ordinal``-th of its function, and the ``argument``-th in registers for integers, None if it is in none.
    ``is_declared`` says that its type is written in the program.
    """

    ordinal: int
    argument: int | None
    type: CType
    span: Span
    is_declared: bool = True


@dataclass(frozen=True, slots=True)
class ProgramVariable:
    """A variable that outlives the hit: ``count`` cells from ``first`` on; ``type`` is that of an element."""

    kind: VariableKind
    first: int
    count: int
    type: CType
    is_array: bool
    span: Span


@dataclass(frozen=True, slots=True)
class ModuleSymbol:
    """A variable of the module that the program declares (``extern``)."""

    name: str
    type: CType
    span: Span


@dataclass(frozen=True, slots=True)
class ModuleVariable:
    """A variable, parameter or constant of the module that its debug information describes."""

    value: Value | Scattered
    type: CType


@dataclass(frozen=True, slots=True)
class TracedField:
    """A field of a tracepoint or system call."""

    name: str


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """A function of the program."""

    name: str
    type: CType
    parameters: tuple[CType, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    The place of an expression.

    At a return, ``at_return``, arguments are those of the entry. A tracepoint or system call, ``is_traced``, has fields
    with names; a statically defined probe, ``is_usdt``, arguments of its own. ``watched`` is what a watchpoint watches,
    ``line`` the line of the source that the probe is at.
    ``allow_write`` allows assignments to what is the target's. In a function of the program, ``is_function``, and in a
    block of the tool, ``is_tool``, there is no hit. ``names`` knows the names of the place in
    ``module``, which is empty if it is not known, ``given`` the types of what the place itself gives; ``kernel`` is
    there where a hit may be in the kernel. With
    ``is_entry_known`` the entry of a call was seen for certain.
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
    names: PlaceNames | None = None
    given: GivenTypes | None = None
    module: str = ""
    kernel: ProbedModule | None = None

    @property
    def has_hit(self) -> bool:
        """Whether what belongs to a hit is known."""
        return not self.is_function and not self.is_tool

    def refusal(self, name: str) -> tuple[str, str]:
        """Return what is wrong with a name that belongs to a hit, and what to do."""
        if self.is_tool:
            return f"'{name}' belongs to a hit, and a block of the tool has none", "keep it in a variable or a table"
        return f"'{name}' is not known in a function", "give it to the function as an argument"


class NamedTypes(Protocol):
    """The types of a module by their names; ``TargetError`` if a name means several, or the description is damaged."""

    def named(self, name: str) -> CType | None:
        """Return the type that has a name of its own: that of a ``typedef``, or in C++ a class."""

    def tagged(self, kind: str, tag: str) -> CType | None:
        """Return a structure, union or enumeration by its tag."""


class ProbedModule(Protocol):
    """A module that is probed: ``declared`` are the structures that the program itself defines, by kind and tag."""

    declared: Callable[[str, str], Record | None]

    @property
    def types(self) -> NamedTypes | None:
        """The types; None if nothing describes them."""

    def names_at(self, place: str | None, *, at_return: bool) -> PlaceNames:
        """Return what names mean at a place in the code; without one, anywhere."""

    def given_at(self, place: str, *, at_return: bool) -> GivenTypes:
        """Return the types of what a place that is no code gives: a USDT probe, a tracepoint, ``syscall:NAME``."""


class GivenTypes(Protocol):
    """The types of the arguments of a USDT probe by their numbers, or of the fields of an event of the kernel."""

    was_asked: bool
    """Whether anything was asked: then the same name may have another type at another place."""

    def type_of(self, name: str) -> CType | None:
        """Return the type of what has a name or number there; None if it is not known, or that of a word."""


class TypeListener(Protocol):
    """Hear of the types that expressions and parameters have: what editors show."""

    def __call__(self, span: Span, type_: CType) -> None:
        """Note a type; what is at several places may have several."""


class PlaceNames(Protocol):
    """What names mean at a place in a module, by its debug information; ``TargetError`` if that is damaged."""

    @property
    def was_asked(self) -> bool:
        """Whether anything was asked: then the same text may mean something else at another place."""

    @property
    def is_entry(self) -> bool:
        """Whether the place is written as a function: arguments are where the ABI has them."""

    @property
    def arguments(self) -> int:
        """How many arguments have names of registers there."""

    @property
    def types(self) -> NamedTypes | None:
        """The types by the names that they have there; None if nothing describes them."""

    def returned(self) -> ModuleVariable | None:
        """Return what the function returns; None if it is not known; ``NotKnownError`` if it is in no register."""

    def parameter_type(self, number: int) -> CType | None:
        """Return the type of a parameter of the function; None if it is not known."""

    def parameter(self, number: int, type_: CType) -> ModuleVariable | None:
        """Return a parameter, as of a type; None if there is none; ``NotKnownError`` if it has no value there."""

    def find(self, name: str) -> ModuleVariable | None:
        """Return what has a name there; None if there is nothing; ``NotKnownError`` if it has no value there."""

    def cause(self, name: str) -> str | None:
        """Return why nothing has a name there, and what to write; None if nothing describes the module."""

    def member_of(self, scattered: Scattered, member: Member) -> Value | Scattered:
        """Return a member of a structure that is not in memory; ``NotKnownError`` if it has no value there."""


Declared = SlotName | Named | ProgramVariable | ModuleSymbol
"""What a declaration gives a name."""

Meaning = Declared | TracedField | ModuleVariable


class Scope:
    """The names of a block; those of the blocks around it are seen through it."""

    def __init__(self, outer: Scope | None = None) -> None:
        self._outer = outer
        self._names: dict[str, Declared] = {}

    def add(self, name: str, meaning: Declared) -> Declared | None:
        """Give a name a meaning; return the one that it has in this very block already, and keeps."""
        if (known := self._names.get(name)) is not None:
            return known
        self._names[name] = meaning
        return None

    def find(self, name: str) -> Declared | None:
        """Return what a name means here."""
        found = self._names.get(name)
        return found if found is not None or self._outer is None else self._outer.find(name)

    def names(self) -> Iterator[str]:
        """Give all names that are seen here."""
        yield from self._names
        if self._outer is not None:
            yield from self._outer.names()
