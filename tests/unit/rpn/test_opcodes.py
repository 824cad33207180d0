"""The numbers of instructions: which are taken, reserved and free, and the version of the set that they make."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from dprobes.rpn import instruction_set

LANGUAGE = (Path(__file__).parents[3] / "docs" / "reference" / "rpn.md").read_text()

VERSIONS = {1: 0xC3565CD9, 2: 0x98E66636, 3: 0x945A6966, 4: 0x73D77BB9, 5: 0xE5B8A3A3, 6: 0x8F0F8D1B, 7: 0x2F78530B}
"""The versions of the instruction set, each with the checksum of its table."""


def checksum() -> int:
    """Return the checksum of all that the encoding of instructions and what they take from the stack depend on."""
    rows = sorted((row.opcode, row.syntax, row.effect) for row in instruction_set.ROWS)
    kinds = [(kind.value, kind.width, kind.is_signed) for kind in instruction_set.OperandKind]
    return zlib.crc32(repr((rows, kinds)).encode())


def test_an_instruction_that_is_added_or_changed_makes_a_new_version() -> None:
    # Compiled programs carry the version: raise isa.VERSION, and add it here with the checksum of the new table.
    assert max(VERSIONS) == instruction_set.VERSION
    assert VERSIONS[instruction_set.VERSION] == checksum()


def test_every_code_is_taken_reserved_or_free() -> None:
    taken = [row.opcode for row in instruction_set.ROWS]
    reserved = [opcode for opcodes, _ in instruction_set.RESERVED for opcode in opcodes]
    assert sorted([*taken, *reserved, *instruction_set.free_opcodes()]) == list(range(256))


def test_the_reference_lists_the_free_codes() -> None:
    (line,) = re.findall(r"^Codes that are free: (.*)\. Of these", LANGUAGE, re.MULTILINE)
    free: list[int] = []
    for part in line.split(", "):
        first, _, last = part.replace("`", "").partition(" to ")
        free += range(int(first, 16), int(last or first, 16) + 1)
    assert free == instruction_set.free_opcodes()
    assert f"version {instruction_set.VERSION} of the instruction set" in LANGUAGE
