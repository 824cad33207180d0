"""
Processors as stubs describe them: names of registers, breakpoint instructions, and calling conventions.

There is one row for each supported architecture. Its registers are named as in GDB's descriptions (GDB manual, appendix
G.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dprobes.arch.non_x86_processors import ABI_NAMES, FLOATING_ABI_NAMES
from dprobes.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dprobes.arch import Architecture

__all__ = [
    "RegisterPlace",
    "Registers",
    "StubProcessor",
    "TargetDescription",
    "architecture_described_as",
    "check_description",
    "parse_description",
    "processor_of",
    "registers_of",
]

# The description of a target is XML (GDB manual, appendix G), in files that include others. Without a description, the
# registers are in the order that GDB has always used for the processor.


_INCLUDE = "xi:include"
"""Tag of inclusions, as all files write it. Only the DTD, which is not available, ties the prefix to XInclude."""
_DEPTH_MAX = 8
_REGISTERS_MAX = 4096
_BITS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class RegisterPlace:
    """Place of a register: its ``number``, and its ``offset`` and ``size`` in bytes in the answer to ``g``."""

    name: str
    number: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """GDB's name of a processor, and its registers by their names in lower case."""

    architecture: str
    registers: Mapping[str, RegisterPlace]

    @property
    def size(self) -> int:
        """Size in bytes of a complete answer to ``g``."""
        return max((place.offset + place.size for place in self.registers.values()), default=0)


def parse_description(read: Callable[[str], bytes | None]) -> TargetDescription | None:
    """
    Return the description in files, which ``read`` returns by name, or None if there is no ``target.xml``.

    Raise ``EngineError`` if the files are no such description.
    """
    if (root := _parsed("target.xml", read)) is None:
        return None
    architecture, number, offset = "", 0, 0
    numbered: list[tuple[int, str, int]] = []
    for element in _elements(root, read, _DEPTH_MAX):
        match element.tag:
            case "architecture":
                architecture = element.text.strip()
            case "reg":
                number = _number(element, "regnum", number, _REGISTERS_MAX)
                bits = _number(element, "bitsize", None, _BITS_MAX)
                numbered.append((number, element.attributes.get("name", "").lower(), -(-bits // 8)))
                number += 1
    places: dict[str, RegisterPlace] = {}
    for position, name, size in sorted(numbered):
        places.setdefault(name, RegisterPlace(name, position, offset, size))
        offset += size
    return TargetDescription(architecture, places)


@dataclass(slots=True)
class _Element:
    tag: str
    attributes: Mapping[str, str]
    text: str = ""


def _parsed(name: str, read: Callable[[str], bytes | None]) -> list[_Element] | None:
    """
    Return the elements of the stub's XML file ``name`` in document order, or None if the file does not exist.

    Raise ``EngineError`` if it is malformed or defines entities.
    """
    from xml.parsers import expat

    data = read(name)
    if data is None:
        return None
    elements: list[_Element] = []
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        elements.append(_Element(tag, attributes))

    def add_text(text: str) -> None:
        if elements:
            elements[-1].text += text

    def refuse(*_: object) -> None:
        raise EngineError(f"the stub's description '{name}' defines entities, which could be endless")

    parser.StartElementHandler, parser.CharacterDataHandler, parser.EntityDeclHandler = start, add_text, refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError) as error:
        raise EngineError(f"the stub's description '{name}' is not XML: {error}") from None
    return elements


def _elements(elements: Sequence[_Element], read: Callable[[str], bytes | None], depth: int) -> Iterator[_Element]:
    """Iterate over elements, with those of included files in place of the inclusions."""
    if not depth:
        raise EngineError("the stub's description includes itself")
    for element in elements:
        if element.tag != _INCLUDE:
            yield element
            continue
        name = element.attributes.get("href", "")
        if (included := _parsed(name, read)) is None:
            raise EngineError(f"the stub's description includes '{name}', which there is not")
        yield from _elements(included, read, depth - 1)


def _number(element: _Element, key: str, default: int | None, most: int) -> int:
    text = element.attributes.get(key)
    if text is None and default is not None:
        return default
    try:
        value = int(text or "", 0)
    except ValueError:
        value = -1
    if not 0 <= value < most:
        raise EngineError(
            f"the stub's description has a register '{element.attributes.get('name')}' with {key} '{text}'"
        )
    return value


class Registers:
    """
    Registers of a stopped thread, from the answer to ``g``. Registers to be written back are in ``changed``.

    A stub may omit the last registers in that answer; they are requested one by one with ``read``.
    """

    def __init__(
        self,
        description: TargetDescription,
        data: bytes,
        order: Literal["little", "big"],
        read: Callable[[int], bytes | None] | None = None,
    ) -> None:
        self.description = description
        self._places = description.registers
        self._data = bytearray(data)
        self._order = order
        self._read = read
        self._single: dict[str, bytes | None] = {}
        """Registers that were requested one by one, None for a register that does not exist."""
        self.changed: set[str] = set()

    def copy(self) -> Registers:
        """Return a copy with the current values."""
        made = Registers(self.description, bytes(self._data), self._order, self._read)
        made._single = dict(self._single)
        return made

    def __contains__(self, name: str) -> bool:
        place = self._places.get(name)
        return place is not None and (place.offset + place.size <= len(self._data) or self._alone(place) is not None)

    def _alone(self, place: RegisterPlace) -> bytes | None:
        """
        Return the bytes of a register that the answer to ``g`` lacks, or None if the stub has no such register.

        It is read by ``p`` when it is first needed.
        """
        if place.name not in self._single:
            data = None if self._read is None else self._read(place.number)
            self._single[place.name] = data if data is not None and len(data) == place.size else None
        return self._single[place.name]

    def __getitem__(self, name: str) -> int:
        place = self._places[name]
        if place.offset + place.size > len(self._data):
            return int.from_bytes(self._alone(place) or b"", self._order)
        return int.from_bytes(self._data[place.offset : place.offset + place.size], self._order)

    def value(self, name: str) -> int:
        """Return a register, 0 if no register has that name."""
        return self[name] if name in self else 0  # noqa: SIM401 - it has no get

    def __setitem__(self, name: str, value: int) -> None:
        place = self._places[name]
        value &= (1 << 8 * place.size) - 1
        self._data[place.offset : place.offset + place.size] = value.to_bytes(place.size, self._order)
        self.changed.add(name)

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of a register in the target's byte order."""
        place = self._places[name]
        return bytes(self._data[place.offset : place.offset + place.size])

    def all_bytes(self) -> bytes:
        """Return the bytes of all registers, in the form of an answer to ``g``."""
        return bytes(self._data)


@dataclass(frozen=True, slots=True)
class StubProcessor:
    """
    Processor as stubs describe it.

    * ``descriptions`` has its names in descriptions.
    * ``names`` maps registers to the names that stubs use instead. A stub uses one of them.
    * ``pc`` and ``sp`` are the stubs' names of program counter and stack pointer.
    * ``link`` is the register with the return address when a function begins, or "" if it is on top of the stack.
    * ``dropped`` is the maximum number of bytes of arguments that a function pops when it returns.
    * ``breakpoint`` is the shortest breakpoint instruction. After its execution, the pc is ``moved`` bytes further,
      unless a stub corrects that.
    * ``order`` has the registers that GDB presumes without a description, with their sizes in bytes.
    """

    descriptions: frozenset[str]
    names: Mapping[str, Sequence[str]]
    pc: str
    sp: str
    breakpoint: bytes
    order: Sequence[tuple[str, int]]
    moved: int = 0
    link: str = ""
    dropped: int = 0

    def registers(self, name: str) -> Sequence[str]:
        """Return the names that stubs may have for a register."""
        return self.names.get(name, (name,))

    def default_description(self) -> TargetDescription:
        """Return the registers, in GDB's order, for stubs that send no target description."""
        places, offset = {}, 0
        for number, (name, size) in enumerate(self.order):
            places[name] = RegisterPlace(name, number, offset, size)
            offset += size
        return TargetDescription("", places)


def _numbered(ours: str, theirs: Sequence[str], count: int) -> dict[str, Sequence[str]]:
    """Return the stubs' names of numbered registers, for which they use another prefix."""
    return {f"{ours}{n}": tuple(f"{each}{n}" for each in theirs) for n in range(count)}


_SEGMENTS = ("cs", "ss", "ds", "es", "fs", "gs")
_I386 = ("eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", "eip", "eflags", *_SEGMENTS)
_AMD64 = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16)), "rip")
_INT3 = b"\xcc"
_X87: dict[str, Sequence[str]] = {
    **_numbered("fr", ("st",), 8),
    "fcw": ("fctrl",),
    "fsw": ("fstat",),
    "ftw": ("ftag",),
    "fip": ("fioff",),
    "fcs": ("fiseg",),
    "fdp": ("fooff",),
    "fds": ("foseg",),
}

_ZSERIES: dict[str, Sequence[str]] = {
    "pswmask": ("pswm",),
    "pswaddr": ("pswa",),
    **_numbered("gpr", ("r",), 16),
    **_numbered("fpr", ("f",), 16),
    **_numbered("cr_", ("cr",), 16),
}
_ZSERIES_REGISTERS = ("pswm", "pswa", *(f"r{n}" for n in range(16)))
_ZSERIES_TRAP = b"\x00\x01"  # an invalid instruction; the kernel makes SIGTRAP of it

_POWER: dict[str, Sequence[str]] = {
    "nip": ("pc",),
    "lnk": ("lr",),
    "ccr": ("cr",),
    "fpc": ("fpscr",),
    **_numbered("fpr", ("f",), 32),
}
_POWER_TRAP = b"\x7f\xe0\x00\x08"  # tw 31, r0, r0


def _power_order(word: int) -> list[tuple[str, int]]:
    general = [(f"r{n}", word) for n in range(32)]
    floating = [(f"f{n}", 8) for n in range(32)]
    special = [("pc", word), ("msr", word), ("cr", 4), ("lr", word), ("ctr", word), ("xer", 4), ("fpscr", 4)]
    return [*general, *floating, *special]


_PROCESSORS = {
    "i386": StubProcessor(
        frozenset({"i386", "i386:intel"}), _X87, "eip", "esp", _INT3, [(name, 4) for name in _I386], 1, dropped=255
    ),
    "x86_64": StubProcessor(
        frozenset({"i386:x86-64", "i386:x86-64:intel"}),
        _X87
        | {
            f"e{name[1:]}": (name,) for name in _AMD64 if not name[1:].isdecimal() and name[0] == "r" and len(name) == 3
        },
        "rip",
        "rsp",
        _INT3,
        [*((name, 8) for name in _AMD64), ("eflags", 4), *((name, 4) for name in _SEGMENTS)],
        1,
    ),
    "aarch64": StubProcessor(
        frozenset({"aarch64"}),
        {"pstate": ("cpsr",), **_numbered("v", ("v", "z"), 32)},  # a vector of SVE begins with the shorter one
        "pc",
        "sp",
        bytes.fromhex("000020d4"),  # brk #0
        [*((f"x{n}", 8) for n in range(31)), ("sp", 8), ("pc", 8), ("cpsr", 4)],
        link="x30",
    ),
    "riscv64": StubProcessor(
        frozenset({"riscv:rv64", "riscv"}),
        {f"x{n}": (name, f"x{n}") for n, name in enumerate(ABI_NAMES)}
        | {f"f{n}": (name, f"f{n}") for n, name in enumerate(FLOATING_ABI_NAMES)}
        | {"x8": ("fp", "s0", "x8")},
        "pc",
        "sp",
        bytes.fromhex("0290"),  # c.ebreak
        [*((name if name != "s0" else "fp", 8) for name in ABI_NAMES), ("pc", 8)],
        link="ra",
    ),
    "s390": StubProcessor(
        frozenset({"s390:31-bit"}),
        _ZSERIES,
        "pswa",
        "r15",
        _ZSERIES_TRAP,
        [(name, 4) for name in _ZSERIES_REGISTERS],
        2,
        link="r14",
    ),
    "s390x": StubProcessor(
        frozenset({"s390:64-bit"}),
        _ZSERIES,
        "pswa",
        "r15",
        _ZSERIES_TRAP,
        [(name, 8) for name in _ZSERIES_REGISTERS],
        2,
        link="r14",
    ),
    "ppc": StubProcessor(frozenset({"powerpc:common"}), _POWER, "pc", "r1", _POWER_TRAP, _power_order(4), link="lr"),
    "ppc64": StubProcessor(
        frozenset({"powerpc:common64"}), _POWER, "pc", "r1", _POWER_TRAP, _power_order(8), link="lr"
    ),
}


def check_description(description: TargetDescription, processor: StubProcessor, stub: str) -> None:
    """Raise ``EngineError`` if the description of the stub called ``stub`` lacks an indispensable register."""
    for name in (processor.pc, processor.sp):
        if name not in description.registers:
            raise EngineError(f"the stub {stub} describes no register '{name}'")


def registers_of(
    architecture: Architecture, processor: StubProcessor, description: TargetDescription
) -> dict[int, str]:
    """Return the names in a stub's description by register index, of those registers that it has."""
    found: dict[int, str] = {}
    for register in architecture.registers:
        names = [name for name in processor.registers(register.name) if name in description.registers]
        found |= {register.index: names[0]} if names else {}
    return found


def processor_of(architecture: Architecture) -> StubProcessor | None:
    """Return the row of an architecture, None if there is none."""
    return _PROCESSORS.get(architecture.name)


def architecture_described_as(description: str) -> Architecture | None:
    """Return the architecture with a name in stubs' descriptions, None if there is none."""
    from dprobes.arch import architecture

    return next((architecture(name) for name, row in _PROCESSORS.items() if description in row.descriptions), None)
