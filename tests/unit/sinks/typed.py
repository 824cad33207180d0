"""Random templates, the data of records that they are for, and the values in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dprobes.formatters.templates.template_directory import DIRECTORY_FILE
from dprobes.rpn.instruction_set import Token

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from dprobes.record.log_record import ByteOrder

_SIZES = {"b": 1, "w": 2, "d": 4, "q": 8, "n": 0, "": 0}
_BASES = {"d": 10, "u": 10, "x": 16, "o": 8, "p": 16, "a": 16, "c": 10}
_TEXT = "abcXYZ 0123_-+*/(){}[];:,.'%éß€😀"


@dataclass(frozen=True)
class Shown:
    """Hold a value, and how it is to be shown."""

    value: int | str | bytes | tuple[int, ...] | tuple[str, ...]
    conversion: str

    @property
    def base(self) -> int:
        return _BASES.get(self.conversion, 16)


@dataclass(frozen=True)
class TypedField:
    """Hold a place-holder, and the name that the text before it gives the field."""

    name: str
    conversion: str
    size: str
    is_item: bool

    @property
    def text(self) -> str:
        return f"{self.name}=%{'*' if self.is_item else ''}{self.size}{self.conversion} "


def random_fields(random: Random) -> list[TypedField]:
    fields = []
    for n in range(random.randrange(1, 7)):
        is_item = random.random() < 0.4
        conversion = random.choice("duxopsa" + ("hc" if is_item else "c"))
        size = "" if conversion in "sh" else random.choice("dqn" if conversion in "pa" else list(_SIZES))
        fields.append(TypedField(f"f{n}", conversion, size, is_item))
    return fields


def template_files(major: int, fields: Sequence[list[TypedField]]) -> dict[str, bytes]:
    """Return files with a template for each list of fields, whose index is the minor code."""
    text = "".join(f'minor = {n}\nfmt = "{"".join(f.text for f in each)}"\n' for n, each in enumerate(fields))
    return {DIRECTORY_FILE: f"{major} file\n".encode(), "file": f"major = {major}\n{text}".encode()}


def random_data(
    fields: list[TypedField], random: Random, word_size: Literal[4, 8], order: ByteOrder
) -> tuple[bytes, dict[str, Shown]]:
    """Return the data of a record, and its fields."""
    data = b""
    shown: dict[str, Shown] = {}
    present = fields[: random.randrange(len(fields))] if random.random() < 0.1 else fields
    for field in present:
        more, text = _random_value(field, random, word_size, order)
        data += more
        shown |= text
    if present is fields and random.random() < 0.1:
        rest = random.randbytes(random.randrange(1, 9))
        data += rest
        shown["rest"] = Shown(rest, "r")
    for field in present:  # nobody knows the names of addresses that are made up
        value = shown[field.name].value if field.conversion == "a" and field.name in shown else None
        if isinstance(value, int):
            shown[f"{field.name}_name"] = Shown(f"{value:#x}", "s")
        elif isinstance(value, tuple):
            shown[f"{field.name}_names"] = Shown(tuple(f"{each:#x}" for each in value), "s")
    return data, shown


def _random_value(
    field: TypedField, random: Random, word_size: int, order: ByteOrder
) -> tuple[bytes, dict[str, Shown]]:
    def item(token: Token, data: bytes, count: int) -> bytes:
        return bytes([token]) + count.to_bytes(2, order) + data

    def number(size: int) -> tuple[int, bytes]:
        data = random.choice([random.randbytes(size), bytes(size), b"\xff" * size])
        return int.from_bytes(data, order, signed=field.conversion == "d"), data

    if field.is_item and random.random() < 0.15:
        address = random.getrandbits(8 * word_size)
        data = item(Token.ADDRESS_FAULT, address.to_bytes(word_size, order), word_size)
        return data, {f"{field.name}_fault": Shown(address, "a")}
    if field.conversion == "s":
        # In the place of an empty string babeltrace2 2.0.4 shows an earlier one: a bug of its.
        text = "".join(random.choices(_TEXT, k=random.randrange(1, 12)))
        data = text.encode()
        return item(Token.STRING, data, len(data)) if field.is_item else data + b"\0", {field.name: Shown(text, "s")}
    if field.conversion == "h":
        data = random.randbytes(random.randrange(20))
        return item(Token.MEMORY, data, len(data)), {field.name: Shown(data, "h")}
    is_text = field.is_item and field.conversion == "c" and not field.size
    size = 1 if is_text else _SIZES[field.size] or word_size
    if not field.is_item:
        value, data = number(size)
        return data, {field.name: Shown(value, field.conversion)}
    numbers = [number(size) for _ in range(random.randrange(5))]
    data = b"".join(data for _, data in numbers)
    values = tuple(value for value, _ in numbers)
    return item(Token.MEMORY, data, len(data)), {field.name: Shown(values, field.conversion)}
