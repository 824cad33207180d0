"""Conversion of variables' locations to C values that the hit computes from registers and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.dpc.typedtree import typed_values
from dprobes.dpc.typedtree.name_scope import ModuleVariable, NotKnownError, Part, Scattered
from dprobes.dpc.typedtree.value_properties import folded
from dprobes.dpc.types.argument_places import ResultPart, result_parts
from dprobes.dpc.types.c_types import (
    BOOL,
    CHAR,
    INT,
    LONG_LONG,
    UNSIGNED_LONG_LONG,
    VOID,
    Array,
    Enumeration,
    Floating,
    Integer,
    Member,
    Pointer,
    Record,
    Void,
    is_scalar,
    size_of,
)
from dprobes.dwarf.dwarf_numbers import At, Encoding, Tag
from dprobes.target.unwind.dwarf_expressions import (
    Choice,
    Computed,
    Extended,
    FrameAddressOf,
    InMemory,
    InRegister,
    Known,
    LinkAddress,
    Loaded,
    Number,
    Operation,
    Pieces,
    RegisterContent,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dprobes.arch import ByteOrder
    from dprobes.dpc.types.c_types import CType
    from dprobes.dwarf.debug_entries import Entry
    from dprobes.dwarf.debug_file import DebugFile
    from dprobes.target.unwind.dwarf_expressions import Location, Node

__all__ = [
    "GONE",
    "DebugTypes",
    "Machine",
    "base_type",
    "bit_field",
    "in_registers",
    "part_of",
    "plain_name",
    "rank_of",
    "returned_value",
    "value_at",
    "value_of",
]

# Members are read at the first request: by pointers, a type may refer to a large part of the program's types.

_CHAIN_MAX = 64
"""Maximum length of a chain of types that contains no structure, such as pointers to arrays of pointers."""

_MEMBERS_MAX = 1 << 16
_COUNT_MAX = 1 << 40
_NO_ELEMENTS = (-1, (1 << 32) - 1, (1 << 64) - 1)
"""Upper bounds that compilers write for arrays without elements."""

_PLUS_CONSTANT = 0x23

_PASS_BY_REFERENCE = 4
_CPP_LANGUAGES = frozenset((0x04, 0x1A, 0x21, 0x2B, 0x3A))
_NESTED_MAX = 64
"""Maximum depth of nested members that is examined."""

_RECORDS = {Tag.STRUCTURE_TYPE: "struct", Tag.CLASS_TYPE: "struct", Tag.UNION_TYPE: "union"}
_QUALIFIERS = frozenset((Tag.CONST_TYPE, Tag.VOLATILE_TYPE, Tag.RESTRICT_TYPE, Tag.ATOMIC_TYPE, Tag.IMMUTABLE_TYPE))
_POINTERS = frozenset((Tag.POINTER_TYPE, Tag.REFERENCE_TYPE, Tag.RVALUE_REFERENCE_TYPE))
_SIGNED = frozenset((Encoding.SIGNED, Encoding.SIGNED_CHAR))
_FLOATS = frozenset((Encoding.FLOAT, Encoding.COMPLEX_FLOAT))


class DebugTypes:
    """The types of a module; ``declared`` looks up the structures that the program itself defines."""

    def __init__(
        self, file: DebugFile, word_size: int, declared: Callable[[str, str], Record | None] = lambda _kind, _tag: None
    ) -> None:
        self._file = file
        self._word_size = word_size
        self.declared = declared
        self._types: dict[Entry, CType] = {}
        self._records: dict[Entry, Record] = {}

    # By entries

    def of(self, entry: Entry | None) -> CType:
        """Return the type that an entry describes; ``void`` for None."""
        return self._of(entry, 0)

    def of_variable(self, entry: Entry) -> CType:
        """Return the type of a variable or parameter, or the return type of a function."""
        return self.of(entry.type)

    def _of(self, entry: Entry | None, depth: int) -> CType:
        if entry is None:
            return VOID
        if depth > _CHAIN_MAX:
            entry.unit.file.malformed(f"the type at {entry.offset:#x} does not end")
        if (known := self._types.get(entry)) is None:
            known = self._types[entry] = self._made(entry, depth)
        return known

    def _made(self, entry: Entry, depth: int) -> CType:
        if entry.has(At.SIGNATURE) and (whole := entry.reference(At.SIGNATURE)) is not None:
            return self._of(whole, depth + 1)  # the type is in a type unit
        tag = entry.tag
        if tag in _QUALIFIERS or tag == Tag.TYPEDEF:
            return self._of(entry.type, depth + 1)
        if tag in _POINTERS:
            return Pointer(self._of(entry.type, depth + 1), self._word_size)
        if tag in _RECORDS:
            return self._record(entry)
        match tag:
            case Tag.BASE_TYPE:
                return self._base(entry)
            case Tag.ENUMERATION_TYPE:
                return self._enumeration(entry, depth)
            case Tag.ARRAY_TYPE:
                return self._array(entry, depth)
            case Tag.PTR_TO_MEMBER_TYPE:
                return self._word()
        return VOID  # functions, and entries without a type

    def _word(self) -> Integer:
        return Integer("unsigned long", self._word_size, is_signed=False, rank=4)

    def _base(self, entry: Entry) -> CType:
        size, encoding = entry.number(At.BYTE_SIZE) or 0, entry.number(At.ENCODING)
        name = plain_name(entry.name or "")
        if encoding in _FLOATS:
            return Floating(name, size)
        if encoding == Encoding.BOOLEAN and size == 1:
            return BOOL
        return base_type(name, size, self._word_size, is_signed=encoding in _SIGNED)

    def _enumeration(self, entry: Entry, depth: int) -> CType:
        values: dict[str, int] = {}
        for child in entry.children():
            if child.tag == Tag.ENUMERATOR and (value := child.number(At.CONST_VALUE)) is not None:
                values[child.text(At.NAME) or ""] = value
        size = entry.number(At.BYTE_SIZE)
        base = self._of(entry.type, depth + 1) if entry.has(At.TYPE) else VOID
        if not isinstance(base, Integer) or (size is not None and size != base.size):
            size = size if size in (1, 2, 4, 8) else 4
            is_signed = any(value < 0 for value in values.values())
            name = f"{'' if is_signed else 'unsigned '}int"
            base = Integer(name, size, is_signed=is_signed, rank=rank_of("", size, self._word_size))
        return Enumeration(entry.name or "", base, {name: base.cut(value) for name, value in values.items()})

    def _array(self, entry: Entry, depth: int) -> CType:
        counts = [_count(child) for child in entry.children() if child.tag == Tag.SUBRANGE_TYPE]
        type_ = self._of(entry.type, depth + 1)
        if isinstance(type_, Void):
            entry.unit.file.malformed(f"the array at {entry.offset:#x} has elements without a type")
        for count in reversed(counts[:_CHAIN_MAX] or [None]):
            type_ = Array(type_, count)
        return type_

    # Structures

    def _record(self, entry: Entry) -> Record:
        kind, tag = _RECORDS[entry.tag], entry.text(At.NAME) or ""
        if tag and (declared := self.declared(kind, tag)) is not None:
            return declared
        return Record(
            tag,
            is_union=kind == "union",
            definition=lambda record: self._define(record, entry),
            is_passed_by_address=_is_passed_by_address(entry, 0),
        )

    def _define(self, record: Record, entry: Entry) -> None:
        whole: Entry | None = entry
        if entry.flag(At.DECLARATION):
            from dprobes.dpc.modules.debug_scope import definition_of

            whole = definition_of(entry, self._file, self.of)
        if whole is None:
            return
        members: list[Member] = []
        for child in whole.children():
            if child.tag in (Tag.MEMBER, Tag.INHERITANCE) and (member := self._member(child)) is not None:
                members.append(member)
                if len(members) > _MEMBERS_MAX:
                    whole.unit.file.malformed(f"the structure at {whole.offset:#x} has too many members")
        record.define(members, whole.number(At.BYTE_SIZE) or 0, 1)

    def _member(self, entry: Entry) -> Member | None:
        if entry.flag(At.EXTERNAL) or entry.flag(At.DECLARATION):
            return None  # a static member belongs to the class, not to each object
        type_ = self.of_variable(entry)
        name = (entry.text(At.NAME) or "") if entry.tag == Tag.MEMBER else ""
        offset = entry.number(At.DATA_MEMBER_LOCATION) or 0
        if (expression := entry.block(At.DATA_MEMBER_LOCATION)) is not None:
            if expression[:1] != bytes([_PLUS_CONSTANT]):
                # The offset of a virtual base is in a table of each object, so its members have no fixed offsets.
                return Member("", Record(type_.tag), 0) if isinstance(type_, Record) else None
            from dprobes.target.elf.byte_reader import unsigned_at

            try:
                offset, _ = unsigned_at(expression, 1)
            except (IndexError, ValueError):
                entry.unit.file.malformed(f"the member at {entry.offset:#x} is nowhere")
        bits = entry.number(At.BIT_SIZE)
        if bits is None:
            return Member(name, type_, offset)
        return self._bit_field(entry, name, type_, offset, bits)

    def _bit_field(self, entry: Entry, name: str, type_: CType, offset: int, bits: int) -> Member | None:
        size = size_of(type_) or 0
        if not 0 < bits <= 8 * size:
            return None
        first = entry.number(At.DATA_BIT_OFFSET)
        if first is None:
            # Before DWARF 4, this attribute counts the bits above the field in its unit; the byte order decides their
            # meaning.
            unit = entry.number(At.BYTE_SIZE) or size
            above = entry.number(At.BIT_OFFSET) or 0
            first = 8 * offset + (8 * unit - above - bits if entry.unit.sizes.order == "little" else above)
        if first < 0:
            return None
        return bit_field(name, type_, first, bits, self._word_size, is_big_endian=entry.unit.sizes.order == "big")


def bit_field(
    name: str, type_: CType, first: int, bits: int, word_size: int, *, is_big_endian: bool = False
) -> Member | None:
    """Return a bit field that begins at bit ``first`` of a structure, or None if no unit contains all of it."""
    size = size_of(type_) or 0
    for start, unit in ((first // (8 * size) * size, size), (first // 8, size), (first // 8, word_size)):
        shift = first - 8 * start
        if shift + bits <= 8 * unit:
            wider = Integer("unit", unit, is_signed=False, rank=4) if unit != size else None
            return Member(name, type_, start, bits, 8 * unit - shift - bits if is_big_endian else shift, wider)
    return None


def base_type(name: str, size: int, word_size: int, *, is_signed: bool) -> Integer | Floating:
    """Return the type of a C name: ``char``, another integer, or a type without arithmetic for unusual sizes."""
    if name == "char" and is_signed and size == 1:
        return CHAR
    if size not in (1, 2, 4, 8):
        return Floating(name, size)  # such as __int128: only its bytes are available
    return Integer(name, size, is_signed=is_signed, rank=rank_of(name, size, word_size))


def rank_of(name: str, size: int, word_size: int) -> int:
    """
    Return the conversion rank of the integer type called ``name``; ``size`` and ``word_size`` are in bytes.

    The common type of two types is the one with the higher rank (C17 6.3.1.1).
    """
    if size == 8:
        return LONG_LONG.rank if "long long" in name or word_size < 8 else 4
    if size == 4:
        return 4 if "long" in name else INT.rank
    return size  # 1 for characters, 2 for short


def _count(subrange: Entry) -> int | None:
    """
    Return the number of elements by a DW_TAG_subrange_type.

    Return None if it is missing, invalid, or known only at run time.
    """
    count = subrange.number(At.COUNT)
    if count is None:
        upper = subrange.number(At.UPPER_BOUND)
        if upper is None:
            return None
        count = 0 if upper in _NO_ELEMENTS else upper + 1 - (subrange.number(At.LOWER_BOUND) or 0)
    return count if 0 <= count <= _COUNT_MAX else None


def _is_passed_by_address(entry: Entry, depth: int) -> bool:
    """
    Return True if C++ functions receive an object of the class ``entry`` by its address instead of its bytes.

    Some compilers record this. Otherwise it applies to a class with its own destructor, copy or move constructor,
    virtual function or virtual base. It also applies to a class with a base or member of such a class (Itanium C++ ABI,
    1.1, "non-trivial for the purposes of calls"). ``depth`` is the number of classes around it.
    """
    whole = entry.reference(At.SIGNATURE) if entry.has(At.SIGNATURE) else entry
    if whole is None or depth > _NESTED_MAX:
        return False
    if (convention := whole.number(At.CALLING_CONVENTION)) is not None:
        return convention == _PASS_BY_REFERENCE
    if whole.unit.root.number(At.LANGUAGE) not in _CPP_LANGUAGES:
        return False
    name = (whole.text(At.NAME) or "").partition("<")[0]
    for child in whole.children():
        if child.tag == Tag.SUBPROGRAM and _makes_non_trivial(child, name, whole):
            return True
        if child.tag in (Tag.MEMBER, Tag.INHERITANCE) and not (child.flag(At.EXTERNAL) or child.flag(At.DECLARATION)):
            type_ = child.type
            while type_ is not None and type_.tag in (*_QUALIFIERS, Tag.TYPEDEF, Tag.ARRAY_TYPE):
                type_, depth = type_.type, depth + 1
                if depth > _CHAIN_MAX:
                    return False
            if child.number(At.VIRTUALITY) or (
                type_ is not None and type_.tag in _RECORDS and _is_passed_by_address(type_, depth + 1)
            ):
                return True
    return False


def _makes_non_trivial(function: Entry, name: str, whole: Entry) -> bool:
    """Return whether a member function is virtual, or a user-provided destructor or copy or move constructor."""
    if function.number(At.VIRTUALITY):
        return True
    own = function.text(At.NAME) or ""
    if own == f"~{name}":
        return not function.flag(At.ARTIFICIAL)
    if own != name:
        return False
    parameters = [child for child in function.children() if child.tag == Tag.FORMAL_PARAMETER]
    if len(parameters) < 2 or function.flag(At.ARTIFICIAL):  # the first parameter is the object
        return False
    type_ = parameters[1].type
    if type_ is None or type_.tag not in (Tag.REFERENCE_TYPE, Tag.RVALUE_REFERENCE_TYPE):
        return False
    target = type_.type
    while target is not None and target.tag in _QUALIFIERS:
        target = target.type
    return target == whole


def plain_name(name: str) -> str:
    """Return the usual spelling of a C type name: ``unsigned long`` for ``long unsigned int``."""
    words = name.split()
    if "unsigned" in words:
        words = ["unsigned", *(word for word in words if word != "unsigned")]
    if len(words) > 1 and words[-1] == "int" and words[-2] in ("long", "short"):
        words.pop()
    return " ".join(words)


GONE = (
    "not known at the return: at the entry it is not in a register",
    "keep it at the entry, in a thread variable",
)
"""The reason why a parameter is not known at a return, and a remedy."""

_COMPARISONS = {"==": ("==", False), "!=": ("==", True), "<s": ("<", False), ">=s": ("<", True)}


class Machine(NamedTuple):
    """
    The facts about a processor and a module that the computation of values needs.

    ``registers`` maps DWARF's register numbers to names. ``symbol_near`` returns a symbol for a link address, and the
    distance of the address from it. ``frame`` returns the register and the offset that give the canonical frame address
    at an instruction. Both return None without a result. ``at_return`` means that registers have the values of the
    entry of the function that has returned.
    """

    word: Integer
    byte_order: ByteOrder
    registers: Mapping[int, str]
    symbol_near: Callable[[int], tuple[str, int] | None]
    frame: Callable[[int], tuple[int, int] | None]
    at_return: bool = False

    @property
    def long(self) -> Integer:
        """The signed integer type of a word."""
        return LONG_LONG if self.word.size == 8 else Integer("long", 4, is_signed=True, rank=4)


def value_at(location: Location, type_: CType, machine: Machine) -> typed_values.Value | Scattered:
    """
    Return the value of a variable at a location from debug information; raise ``NotKnownError`` if it has none.

    A structure that is not in memory is returned as ``Scattered``.
    """
    match location:
        case Unavailable(reason):
            raise NotKnownError(reason)
        case InMemory(address):
            if machine.at_return and not isinstance(address, LinkAddress):
                raise NotKnownError(*GONE)
            return typed_values.Memory(value_of(address, machine), type_)
    parts = tuple(_parts(location, 0, size_of(type_) or machine.word.size, machine))
    if not is_scalar(type_):
        return Scattered(parts, type_)
    return _scalar(parts, type_, machine)


def in_registers(type_: CType, parts: Sequence[ResultPart], machine: Machine) -> ModuleVariable:
    """
    Return an argument or a result whose ``parts`` are in registers, in the order of their offsets.

    Raise ``NotKnownError`` if ``parts`` is empty: handlers cannot read its registers.
    """
    if not parts:
        raise NotKnownError("in no register that a handler can read")
    made = tuple(
        Part(part.offset, part.size, typed_values.Register(part.register, machine.word, at_entry=machine.at_return))
        for part in parts
    )
    if not is_scalar(type_):
        return ModuleVariable(Scattered(made, type_), type_)
    if len(made) > 1:
        wide = UNSIGNED_LONG_LONG
        low, high = (folded(typed_values.Convert(part.value, wide)) for part in made[:2] if part.value is not None)
        above = typed_values.Arithmetic("<<", high, typed_values.Constant(32, INT), wide)
        return ModuleVariable(
            folded(typed_values.Convert(typed_values.Arithmetic("|", low, above, wide), type_)), type_
        )
    return ModuleVariable(_scalar(made, type_, machine), type_)


def returned_value(type_: CType, machine: Machine, *, is_x86: bool) -> ModuleVariable:
    """
    Return the return value of a function; raise ``NotKnownError`` if its place is not known.

    It is known for all types on x86, and for scalar types of at most a word on other processors.
    """
    if not is_x86 and (not is_scalar(type_) or (size_of(type_) or 0) > machine.word.size):
        raise NotKnownError(f"where a function returns '{type_}' is known of x86 only")
    parts = result_parts(type_, machine.word.size) if is_x86 else (ResultPart(0, size_of(type_) or 8, "retval"),)
    if parts is None:
        return ModuleVariable(typed_values.Memory(typed_values.Register("retval", machine.word), type_), type_)
    return in_registers(type_, parts, machine)


def part_of(scattered: Scattered, member: Member, machine: Machine) -> typed_values.Value | Scattered:
    """
    Return a member of a structure that is at least partly in registers.

    Raise ``NotKnownError`` if it has no value.
    """
    size = size_of(member.unit or member.type) or 1
    start, end = member.offset, member.offset + size
    found = tuple(
        Part(part.offset - start, part.size, part.value)
        for part in scattered.parts
        if part.offset < end and start < part.offset + part.size
    )
    if not is_scalar(member.type):
        return Scattered(found, member.type)
    if member.bits is None:
        return _scalar(found, member.type, machine)
    integer = member.unit or UNSIGNED_LONG_LONG
    unit = _scalar(found, Integer("unit", size, is_signed=False, rank=integer.rank), machine)
    return _bits(unit, member, machine)


def _bits(unit: typed_values.Value, member: Member, machine: Machine) -> typed_values.Value:
    """
    Return the value of a bit field in ``unit``, the loaded integer that contains it.

    The unit is shifted left to drop higher bits, then right, which extends the sign.
    """
    assert member.bits is not None
    integer = member.type.base if hasattr(member.type, "base") else member.type
    is_signed = isinstance(integer, Integer) and integer.is_signed
    type_ = machine.long if is_signed else machine.word
    bits = 8 * machine.word.size
    value = folded(typed_values.Convert(unit, machine.word))
    high = _operation("<<", value, typed_values.Constant(bits - member.bits - member.shift, machine.word), machine.word)
    low = _operation(
        ">>", folded(typed_values.Convert(high, type_)), typed_values.Constant(bits - member.bits, machine.word), type_
    )
    return folded(typed_values.Convert(low, member.type))


def _scalar(parts: tuple[Part, ...], type_: CType, machine: Machine) -> typed_values.Value:
    """Return a number assembled from the parts that hold its bytes; raise ``NotKnownError`` if a byte has no value."""
    size = size_of(type_) or machine.word.size
    whole: typed_values.Value | None = None
    known = 0  # number of leading bytes that are known
    for part in parts:
        if part.value is None or part.offset > known:
            raise NotKnownError("optimized out, at least in part")
        known = part.offset + part.size
        piece: typed_values.Value = folded(typed_values.Convert(part.value, machine.word))
        if part.offset < 0:
            piece = _shifted(">>", piece, -8 * part.offset, machine)
        if known < size:
            mask = (1 << 8 * (known if part.offset < 0 else part.size)) - 1
            piece = _operation("&", piece, typed_values.Constant(mask, machine.word), machine.word)
        if part.offset > 0:
            piece = _shifted("<<", piece, 8 * part.offset, machine)
        whole = piece if whole is None else _operation("|", whole, piece, machine.word)
    if whole is None or known < size:
        raise NotKnownError("optimized out")
    return folded(typed_values.Convert(whole, type_))


def _shifted(operator: str, value: typed_values.Value, bits: int, machine: Machine) -> typed_values.Value:
    return _operation(operator, value, typed_values.Constant(bits, machine.word), machine.word)


def _operation(
    operator: str, left: typed_values.Value, right: typed_values.Value, type_: Integer
) -> typed_values.Value:
    return folded(typed_values.Arithmetic(operator, left, right, type_))


def _parts(location: Location, offset: int, size: int, machine: Machine) -> list[Part]:
    """Return the parts of a location that hold ``size`` bytes from ``offset`` on, each no larger than a word."""
    word = machine.word.size
    match location:
        case Unavailable():
            return [Part(offset, size, None)]
        case InRegister(number):
            return [Part(offset, min(size, word), _register(number, machine))]
        case Computed(node):
            return [Part(offset, min(size, word), value_of(node, machine))]
        case Known(data):
            return [
                Part(offset + at, min(word, size - at), typed_values.Constant(_number(data, at, machine), machine.word))
                for at in range(0, min(size, len(data)), word)
            ]
        case InMemory() if machine.at_return:
            return [Part(offset, size, None)]
        case InMemory(address):
            return list(_memory_parts(value_of(address, machine), offset, size, machine))
        case Pieces(pieces):
            found: list[Part] = []
            for piece in pieces:
                found += _parts(piece.location, offset, piece.size, machine)
                offset += piece.size
            return found


def _memory_parts(address: typed_values.Value, offset: int, size: int, machine: Machine) -> list[Part]:
    found = []
    at = 0
    while at < size:
        width = next(each for each in (8, 4, 2, 1) if each <= min(size - at, machine.word.size))
        place = _operation("+", address, typed_values.Constant(at, machine.word), machine.word)
        found.append(
            Part(offset + at, width, typed_values.Memory(place, Integer("unit", width, is_signed=False, rank=4)))
        )
        at += width
    return found


def _number(data: bytes, at: int, machine: Machine) -> int:
    return int.from_bytes(data[at : at + machine.word.size], machine.byte_order)


def _register(number: int, machine: Machine) -> typed_values.Value:
    name = machine.registers.get(number)
    if name is None:
        if machine.at_return:
            raise NotKnownError(*GONE)
        raise NotKnownError("in a register that is not for integers")
    return typed_values.Register(name, machine.word, at_entry=machine.at_return)


def value_of(node: Node, machine: Machine) -> typed_values.Value:
    """
    Return the value that a location expression computes at the hit.

    Raise ``NotKnownError`` if RPN cannot compute it.
    """
    word = machine.word
    match node:
        case Number(number):
            return typed_values.Constant(word.cut(number), word)
        case RegisterContent(number):
            return _register(number, machine)
        case LinkAddress(address):
            return _address(address, machine)
        case FrameAddressOf() | Loaded() if machine.at_return:
            raise NotKnownError(*GONE)
        case FrameAddressOf(address):
            frame = machine.frame(address)
            if frame is None:
                raise NotKnownError("in a frame that no unwind table describes")
            return _operation("+", _register(frame[0], machine), typed_values.Constant(word.cut(frame[1]), word), word)
        case Loaded(address, size):
            integer = Integer("unit", size, is_signed=False, rank=4)
            return folded(typed_values.Convert(typed_values.Memory(value_of(address, machine), integer), word))
        case Extended(inner, size, is_signed):
            narrow = Integer("unit", size, is_signed=is_signed, rank=3)
            return folded(typed_values.Convert(folded(typed_values.Convert(value_of(inner, machine), narrow)), word))
        case Choice(condition, chosen, otherwise):
            test = folded(typed_values.Convert(value_of(condition, machine), word))
            return folded(typed_values.Choice(test, value_of(chosen, machine), value_of(otherwise, machine), word))
        case Operation(operator, left, right):
            return _calculated(operator, value_of(left, machine), right, machine)


def _address(address: int, machine: Machine) -> typed_values.Value:
    near = machine.symbol_near(address)
    if near is None:
        raise NotKnownError(f"at link address {address:#x}, which no symbol is near to")
    name, distance = near
    symbol = typed_values.Symbol(name, machine.word)
    return symbol if not distance else _shifted_symbol(symbol, distance, machine)


def _shifted_symbol(symbol: typed_values.Symbol, distance: int, machine: Machine) -> typed_values.Value:
    return typed_values.Arithmetic(
        "+", symbol, typed_values.Constant(machine.word.cut(distance), machine.word), machine.word
    )


def _calculated(operator: str, left: typed_values.Value, right: Node | None, machine: Machine) -> typed_values.Value:
    word, long = machine.word, machine.long
    if right is None:
        match operator:
            case "abs":
                signed = folded(typed_values.Convert(left, long))
                minus = folded(typed_values.Negation(signed, long))
                zero = typed_values.Constant(0, long)
                test = folded(typed_values.Comparison("<", signed, zero, True, word))
                return folded(typed_values.Convert(typed_values.Choice(test, minus, signed, long), word))
            case _:
                return folded(typed_values.Negation(left, word, is_complement=operator == "~"))
    if operator in ("<<", ">>", ">>s") and isinstance(right, Number) and right.value >= 8 * word.size:
        if operator != ">>s":
            return typed_values.Constant(0, word)  # compilers emit such counts, and debuggers interpret them so
        right = Number(8 * word.size - 1)
    other = value_of(right, machine)
    if operator in _COMPARISONS or operator in (">s", "<=s"):
        if operator in (">s", "<=s"):
            left, other, operator = other, left, {">s": "<s", "<=s": ">=s"}[operator]
        name, is_not = _COMPARISONS[operator]
        a, b = folded(typed_values.Convert(left, long)), folded(typed_values.Convert(other, long))
        test = folded(typed_values.Comparison(name, a, b, True, word))
        return folded(typed_values.Not(test, word)) if is_not else test
    if operator in ("/s", ">>s"):
        signed = folded(typed_values.Convert(left, long))
        count = folded(typed_values.Convert(other, long)) if operator == "/s" else other
        return folded(typed_values.Convert(_operation(operator[:-1], signed, count, long), word))
    return _operation(operator, left, other, word)
