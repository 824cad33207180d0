"""Types that a probe program names: words, tags, names of ``typedef``, pointers and arrays."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from dprobes.diagnostics import did_you_mean
from dprobes.dpc.syntax.statement_parser import NAMED_TYPES
from dprobes.dpc.types.c_types import (
    BOOL,
    CHAR,
    INT,
    LONG_LONG,
    LONG_RANK,
    UNSIGNED,
    UNSIGNED_LONG_LONG,
    VOID,
    Array,
    Enumeration,
    Floating,
    Integer,
    Pointer,
    Record,
    Void,
    laid_out,
    size_of,
)
from dprobes.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dprobes.diagnostics import Diagnostics
    from dprobes.dpc.syntax import syntax_tree
    from dprobes.dpc.typedtree.name_scope import PlaceNames, ProbedModule
    from dprobes.dpc.types.c_types import CType
    from dprobes.source_text import Span

__all__ = ["STRING_LIMIT", "TypeTable", "UnknownTypeError"]

STRING_LIMIT = 200
"""Default limit of a string in bytes (``max_strlen``)."""

_ELEMENTS_MAX = 1 << 32


class UnknownTypeError(Exception):
    """Raised for a construct that depends on an unknown type, after the error has been added to the diagnostics."""


class TypeTable:
    """
    The types of a program, for a word of 4 or 8 bytes.

    ``constant`` evaluates dimensions and enumerators; it reports an expression that is not constant and returns None.
    Names that the program does not declare are looked up in ``module``.
    """

    def __init__(
        self,
        word_size: int,
        diagnostics: Diagnostics,
        constant: Callable[[syntax_tree.Expression], int | None],
        module: ProbedModule | None = None,
    ) -> None:
        self.word_size = word_size
        self._module = module
        self._names: PlaceNames | None = None
        self._of_program: dict[tuple[str, str], Record] = {}
        """The structures and unions whose members the program defines."""
        self._diagnostics = diagnostics
        self._constant = constant
        self._records: dict[tuple[str, str], Record] = {}
        self._enumerations: dict[str, Enumeration] = {}
        self._typedefs: dict[str, CType] = {}
        self.enumerators: dict[str, int] = {}
        """The values of all enumerators by their names."""
        self.string_limit = STRING_LIMIT
        """The default limit in bytes of a string that is printed or is a key field."""

    def seen_from(self, names: PlaceNames | None) -> TypeTable:
        """Return a table for the place that ``names`` describes, with the program's declarations so far."""
        table = copy(self)
        table._names = names  # noqa: SLF001 - of the same class
        table._records = {}  # noqa: SLF001
        return table

    def tell_module(self, module: ProbedModule) -> None:
        """Register the program's structures with a module. They take precedence over those of its debug information."""
        module.declared = self._declared_record

    @property
    def word(self) -> Integer:
        """An unsigned word, the type of a register."""
        return Integer("unsigned long", self.word_size, is_signed=False, rank=LONG_RANK)

    @property
    def long(self) -> Integer:
        """``long``."""
        return Integer("long", self.word_size, is_signed=True, rank=LONG_RANK)

    def pointer_to(self, target: CType) -> Pointer:
        """Return the type ``target *``, a pointer of the program's word size."""
        return Pointer(target, self.word_size)

    def of(self, name: syntax_tree.TypeName) -> CType:
        """Return the type that ``name`` denotes; raise ``UnknownTypeError`` if there is none, after reporting it."""
        return self.declared(self.base(name.specifier), name.declarator)

    def declared(self, base: CType, declarator: syntax_tree.Declarator) -> CType:
        """Return the type of a declarator; raise ``UnknownTypeError`` for an invalid array, after reporting it."""
        type_ = base
        for _ in range(declarator.pointers):
            type_ = self.pointer_to(type_)
        for dimension in reversed(declarator.dimensions):
            count = None if dimension is None else self._constant(dimension)
            if dimension is not None and (count is None or not 0 <= count < _ELEMENTS_MAX):
                if count is not None:
                    self._diagnostics.error(dimension.span, f"an array cannot have {count} elements")
                raise UnknownTypeError
            if isinstance(type_, Void):
                self._diagnostics.error(declarator.span, "there are no arrays of 'void'")
                raise UnknownTypeError
            type_ = Array(type_, count)
        return type_

    def define(self, name: str, type_: CType) -> None:
        """Make ``name``, declared by ``typedef``, stand for a type from here on."""
        self._typedefs[name] = type_

    def base(self, specifier: syntax_tree.Specifier) -> CType:
        """Return the type by which a declaration begins, and define it if its members or enumerators follow."""
        match specifier.kind:
            case "struct" | "union":
                return self._record(specifier)
            case "enum":
                return self._enumeration(specifier)
        if len(specifier.words) == 1 and (known := self._named(specifier.words[0])) is not None:
            return known
        return self._basic(specifier)

    def _named(self, name: str) -> CType | None:
        if (known := self._typedefs.get(name)) is not None:
            return known
        if (size := NAMED_TYPES.get(name)) is None:
            return None
        rank = {0: LONG_RANK, 1: CHAR.rank, 2: 2, 4: INT.rank, 8: LONG_LONG.rank}[size[0]]
        return Integer(name, size[0] or self.word_size, is_signed=size[1], rank=rank)

    def _basic(self, specifier: syntax_tree.Specifier) -> CType:
        written = " ".join(specifier.words)
        if len(specifier.words) > 1 and not _go_together(specifier.words):
            self._diagnostics.error(
                specifier.span,
                f"'{written}' is not a type: these words exclude each other",
                hint="C has char, short, int, long and long long, each with 'signed' or 'unsigned', _Bool, and void",
            )
            raise UnknownTypeError
        is_unsigned = "unsigned" in specifier.words
        rest = [word for word in specifier.words if word not in ("signed", "unsigned", "int")]
        match rest:
            case ["void"]:
                return VOID
            case ["_Bool" | "bool"]:
                return BOOL
            case ["float"]:
                return Floating("float", 4)
            case ["double"]:
                return Floating("double", 8)
            case ["long", "double"] | ["double", "long"]:
                return Floating("long double", 16 if self.word_size == 8 else 12)
            case ["char"]:
                return Integer("unsigned char", 1, is_signed=False, rank=1) if is_unsigned else CHAR
            case ["short"]:
                return Integer("unsigned short" if is_unsigned else "short", 2, is_signed=not is_unsigned, rank=2)
            case []:
                return UNSIGNED if is_unsigned else INT
            case ["long"]:
                return self.word if is_unsigned else self.long
            case ["long", "long"]:
                return UNSIGNED_LONG_LONG if is_unsigned else LONG_LONG
        if len(specifier.words) == 1 and (known := self._of_module("", written, specifier.span)) is not None:
            return known
        from dprobes.dpc.tracer_words import type_hint

        hint = type_hint(written) or did_you_mean(written, [*self._typedefs, *NAMED_TYPES])
        self._diagnostics.error(
            specifier.span, f"there is no type '{written}'", hint=hint or "declare it with 'typedef'"
        )
        raise UnknownTypeError

    def kernel_task(self, kernel: ProbedModule | None, span: Span) -> CType | None:
        """Return the type of pointers to the kernel's ``task_struct``, or None if it is not known."""
        known: CType | None = self._declared_record("struct", "task_struct")
        try:
            if known is None and kernel is not None and (types := kernel.types) is not None:
                known = types.tagged("struct", "task_struct")
        except TargetError as error:
            self._diagnostics.error(span, error.message, hint=error.hint)
            raise UnknownTypeError from None
        return None if known is None else self.pointer_to(known)

    def _declared_record(self, kind: str, tag: str) -> Record | None:
        """Return a structure or union whose members the program has defined, or None if it has not."""
        found = self._of_program.get((kind, tag))
        return found if found is not None and found.is_defined else None

    def named_in_module(self, name: str, span: Span) -> CType | None:
        """Return the type of a name that the program does not declare, or None if there is none."""
        return self._named(name) or self._of_module("", name, span)

    def _of_module(self, kind: str, name: str, span: Span) -> CType | None:
        """Return a type of the module by its name, or by ``struct``, ``union`` or ``enum`` and its tag, or None."""
        try:
            return self._looked_up(kind, name)
        except TargetError as error:
            self._diagnostics.error(span, error.message, hint=error.hint)
            raise UnknownTypeError from None

    def _looked_up(self, kind: str, name: str) -> CType | None:
        """Return a type in the scope of the place, else in the module that the program probes first, else None."""
        for described in (self._names, self._module):
            types = None if described is None else described.types
            found = None if types is None else types.tagged(kind, name) if kind else types.named(name)
            if found is not None:
                return found
        return None

    def _record(self, specifier: syntax_tree.Specifier) -> Record:
        key = (specifier.kind, specifier.tag)
        record = self._of_program.get(key) or self._records.get(key) if specifier.tag else None
        if record is None:
            definition = self._define_as_in_module if specifier.tag else None
            record = Record(specifier.tag, is_union=specifier.kind == "union", definition=definition)
            if specifier.tag:
                self._records[key] = record
        if specifier.members is None:
            return record
        if key in self._of_program:
            self._diagnostics.error(specifier.span, f"'{record}' is defined twice")
            raise UnknownTypeError
        if specifier.tag:
            self._of_program[key] = record
        laid_out(record, list(self._members(specifier.members)), self.word_size)
        return record

    def _define_as_in_module(self, record: Record) -> None:
        """Define a structure with its members in the module, if it exists there."""
        found = self._looked_up("union" if record.is_union else "struct", record.tag)
        if isinstance(found, Record) and found is not record and (members := found.members) is not None:
            record.define(members, found.size, found.alignment)

    def _members(self, declarations: tuple[syntax_tree.Declaration, ...]) -> list[tuple[str, CType, int | None]]:
        found: list[tuple[str, CType, int | None]] = []
        names: set[str] = set()
        for declaration in declarations:
            base = self.base(declaration.specifier)
            if not declaration.declarators:
                found.append(("", base, None))  # an unnamed structure or union
            for declarator in declaration.declarators:
                type_ = self.declared(base, declarator)
                if declarator.name and declarator.name in names:
                    self._diagnostics.error(declarator.span, f"there are two members '{declarator.name}'")
                    raise UnknownTypeError
                names.add(declarator.name)
                self.check_size(type_, declarator.span)
                found.append((declarator.name, type_, self._bits(type_, declarator)))
        return found

    def _bits(self, type_: CType, declarator: syntax_tree.Declarator) -> int | None:
        if declarator.bits is None:
            return None
        integer = type_.base if isinstance(type_, Enumeration) else type_
        bits = self._constant(declarator.bits)
        if bits is None:
            raise UnknownTypeError
        if not isinstance(integer, Integer) or not 0 <= bits <= integer.bits:
            self._diagnostics.error(declarator.bits.span, f"'{type_}' has no bit fields of {bits} bits")
            raise UnknownTypeError
        return bits

    def check_size(self, type_: CType, span: Span) -> int:
        """Return the size of a type in bytes; if it has none, report that and raise ``UnknownTypeError``."""
        size = size_of(type_)
        if size is None:
            hint = None
            if isinstance(type_, Record):
                hint = f"only its name is known: define its members, {type_} {{ … }};"
            self._diagnostics.error(span, f"the size of '{type_}' is not known", hint=hint)
            raise UnknownTypeError
        return size

    def _enumeration(self, specifier: syntax_tree.Specifier) -> Enumeration:
        if specifier.enumerators is None:
            known = self._enumerations.get(specifier.tag)
            if known is None:
                found = self._of_module("enum", specifier.tag, specifier.span)
                if isinstance(found, Enumeration):
                    return found
                self._diagnostics.error(specifier.span, f"there is no 'enum {specifier.tag}'")
                raise UnknownTypeError
            return known
        values: dict[str, int] = {}
        following = 0
        for each in specifier.enumerators:
            if each.value is not None:
                value = self._constant(each.value)
                if value is None:
                    raise UnknownTypeError
                following = value
            values[each.name] = self.enumerators[each.name] = following
            following += 1
        base = INT if any(value < 0 for value in values.values()) else UNSIGNED
        made = Enumeration(specifier.tag, base, values)
        if specifier.tag:
            self._enumerations[specifier.tag] = made
        return made


def _go_together(words: Sequence[str]) -> bool:
    """Return whether keywords, in any order, form an integer type of C, such as ``long unsigned`` (C17 6.7.2)."""
    signs = words.count("signed") + words.count("unsigned")
    rest = sorted(word for word in words if word not in ("signed", "unsigned", "int"))
    if signs > 1 or words.count("int") > 1:
        return False
    if "double" in rest:
        return rest == ["double", "long"] and not signs and "int" not in words
    if rest in ([], ["short"], ["long"], ["long", "long"]):
        return True
    return rest == ["char"] and "int" not in words
