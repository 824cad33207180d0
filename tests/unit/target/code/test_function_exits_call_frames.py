"""Where the canonical frame address is, compared with what pyelftools reads from the same bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from elftools.dwarf.callframe import FDE, CallFrameInfo
from elftools.dwarf.structs import DWARFStructs
from hypothesis import given, settings
from hypothesis import strategies as st

from dprobes.target.code.function_exits import CallFrames
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.unwind.exception_frames import FrameAddress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unit.target.conftest import Toolbox

LIBRARIES = ("/lib/x86_64-linux-gnu/libc.so.6", "/usr/i686-linux-gnu/lib/libc.so.6")

EVERY = 3
"""One of so many descriptions is compared: the other reader takes its time."""


def rows_of(elf: ElfFile) -> Iterator[tuple[int, Any]]:
    """Give the rows of all functions as (link address, rule), as pyelftools reads them."""
    section = next(s for s in elf.sections if s.name == ".eh_frame")
    structs = DWARFStructs(little_endian=True, dwarf_format=32, address_size=elf.word_size)
    stream = io.BytesIO(elf.bytes_at(section.offset, section.size, "the table"))
    info = CallFrameInfo(stream, section.size, section.address, structs, for_eh_frame=True)
    for entry in info.get_entries()[::EVERY]:
        if isinstance(entry, FDE):
            try:
                table = entry.get_decoded().table
            except ValueError:
                continue  # DW_CFA_GNU_args_size, which it cannot even name
            yield from ((row["pc"], row["cfa"]) for row in table)


@pytest.mark.parametrize("path", LIBRARIES)
def test_the_rows_of_a_c_library_are_those_that_another_reader_finds(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    elf = ElfFile.open(path)
    frames = CallFrames(elf)
    expected: dict[int, Any] = dict(rows_of(elf))
    assert len(expected) > 3000
    for address, rule in expected.items():
        if elf.frames.extent(elf, address) is None:
            continue  # past the end of a function
        found = frames.frame_address(address)
        if rule.reg is None:
            assert found == FrameAddress(None, 0, bytes(rule.expr)), hex(address)
        else:
            assert found == FrameAddress(rule.reg, rule.offset), hex(address)


def test_the_bytes_of_an_expression_are_no_instructions(tools: Toolbox) -> None:
    # Where register 3 was: an expression of two bytes, which would be an instruction and an unknown one.
    code = ".type f, @function\n.globl f\nf:\n.cfi_startproc\n.cfi_escape 0x16, 3, 2, 0x2d, 0x3f\nret\n.cfi_endproc\n"
    elf = ElfFile.open(str(tools.build("libcode.so", {"code.s": code}, "-shared", "-nostdlib")))
    assert [CallFrames(elf).frame_address(start) for start in elf.frames.starts] == [FrameAddress(7, 8)]


@settings(max_examples=20)
@given(data=st.data())
def test_damaged_descriptions_give_no_answer_and_no_other_exception(data: st.DataObject) -> None:
    elf = ElfFile.open(LIBRARIES[0])
    section = next(s for s in elf.sections if s.name == ".eh_frame")
    contents = bytearray(elf.data[: section.offset + section.size])
    for _ in range(data.draw(st.integers(1, 200))):
        contents[section.offset + data.draw(st.integers(0, section.size - 1))] = data.draw(st.integers(0, 255))
    # The headers are those of the whole file, whose end is zeros.
    damaged = ElfFile.of_bytes(elf.path, bytes(contents) + bytes(len(elf.data) - len(contents)))
    frames = CallFrames(damaged)
    for start in elf.frames.starts[::200]:
        assert frames.is_at_entry(start) in (True, False, None)
