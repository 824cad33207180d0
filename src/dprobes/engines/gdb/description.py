"""
The description of a target: its processor, and where its registers are in the answer to ``g``.

It is XML (GDB manual, appendix G), in files that include others. What a stub does not describe has the order that GDB
has always given the registers of that processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import EngineError
from dprobes.lazydataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["RegisterPlace", "TargetDescription", "parse_description"]

_INCLUDE = "xi:include"
"""How all files write it; that the prefix stands for XInclude is said in the DTD, which nobody has."""
_DEPTH_MAX = 8
_REGISTERS_MAX = 4096
_BITS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class RegisterPlace:
    """Say where a register is: its ``number``, and its ``offset`` and ``size`` in the answer to ``g``, in bytes."""

    name: str
    number: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """Hold the name that GDB gives a processor, and its registers by their names in lower case."""

    architecture: str
    registers: Mapping[str, RegisterPlace]

    @property
    def size(self) -> int:
        """How many bytes the answer to ``g`` has, if all of it comes."""
        return max((place.offset + place.size for place in self.registers.values()), default=0)


def parse_description(read: Callable[[str], bytes | None]) -> TargetDescription | None:
    """
    Return what the files say that ``read`` returns by name, None if there is no ``target.xml``.

    Raise ``EngineError`` if they are not such a description.
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
    """Return the elements of a file in the order in which they begin, None if there is none."""
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
        raise EngineError(f"the stub's description '{name}' is no XML: {error}") from None
    return elements


def _elements(elements: Sequence[_Element], read: Callable[[str], bytes | None], depth: int) -> Iterator[_Element]:
    """Iterate over elements, those of included files in the places of these."""
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
