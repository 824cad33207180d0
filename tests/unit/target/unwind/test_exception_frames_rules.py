"""Where the caller's registers are, compared with what pyelftools reads from the same bytes."""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path
from typing import Any

import pytest
from elftools.dwarf.callframe import FDE, CallFrameInfo
from elftools.dwarf.structs import DWARFStructs
from hypothesis import given, settings
from hypothesis import strategies as st

from dprobes.errors import TargetError
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.unwind.exception_frames import RegisterRule, Row, RuleKind, read_description, rows_of
from support.rounds import rounds

LIBRARIES = ("/lib/x86_64-linux-gnu/libc.so.6", "/usr/i686-linux-gnu/lib/libc.so.6")
EVERY = 5
"""One of so many descriptions is compared: the other reader takes its time."""

KINDS = {
    "UNDEFINED": RuleKind.UNDEFINED,
    "SAME_VALUE": RuleKind.SAME,
    "OFFSET": RuleKind.AT,
    "VAL_OFFSET": RuleKind.OFFSET,
    "REGISTER": RuleKind.REGISTER,
    "EXPRESSION": RuleKind.AT_EXPRESSION,
    "VAL_EXPRESSION": RuleKind.EXPRESSION,
}


def expected_rule(rule: Any) -> RegisterRule:
    kind = KINDS[rule.type]
    if kind in (RuleKind.AT_EXPRESSION, RuleKind.EXPRESSION):
        return RegisterRule(kind, 0, bytes(rule.arg))
    return RegisterRule(kind, rule.arg or 0)


def rules_at(rows: list[Row], address: int) -> dict[int, RegisterRule]:
    return dict([row for row in rows if row.start <= address][-1].rules)


@pytest.mark.parametrize("path", LIBRARIES)
def test_the_rules_of_a_c_library_are_those_that_another_reader_finds(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    elf = ElfFile.open(path)
    section = next(s for s in elf.sections if s.name == ".eh_frame")
    structs = DWARFStructs(little_endian=True, dwarf_format=32, address_size=elf.word_size)
    stream = io.BytesIO(elf.bytes_at(section.offset, section.size, "the table"))
    info = CallFrameInfo(stream, section.size, section.address, structs, for_eh_frame=True)
    compared = 0
    for entry in info.get_entries()[::EVERY]:
        if not isinstance(entry, FDE):
            continue
        try:
            table = entry.get_decoded().table
        except ValueError:
            continue  # DW_CFA_GNU_args_size, which it cannot even name
        description = read_description(elf, section.address + entry.offset)
        assert (description.start, description.end) == (
            entry["initial_location"],
            entry["initial_location"] + entry["address_range"],
        )
        rows = rows_of(description, elf.word_size)
        last = {row["pc"]: row for row in table}  # of several rows for one address the last one holds
        for address, row in last.items():
            rules = {number: expected_rule(rule) for number, rule in row.items() if isinstance(number, int)}
            assert rules_at(rows, address) == rules, hex(address)
            compared += 1
    assert compared > 1000


@settings(max_examples=rounds(50))
@given(data=st.data())
def test_damaged_descriptions_raise_what_is_announced(data: st.DataObject) -> None:
    elf = ElfFile.open(LIBRARIES[0])
    section = next(s for s in elf.sections if s.name == ".eh_frame")
    contents = bytearray(elf.data[: section.offset + section.size])
    for _ in range(data.draw(st.integers(1, 200))):
        contents[section.offset + data.draw(st.integers(0, section.size - 1))] = data.draw(st.integers(0, 255))
    damaged = ElfFile.of_bytes(elf.path, bytes(contents) + bytes(len(elf.data) - len(contents)))
    for description in elf.frames.descriptions[::300]:
        with contextlib.suppress(TargetError, ValueError, IndexError, struct.error):
            rows_of(read_description(damaged, description), 8)
