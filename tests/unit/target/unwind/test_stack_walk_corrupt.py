"""Unwind tables with any bytes in them, on stacks that loop: the walk ends, soon, and never raises."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprobes.errors import TargetError
from dprobes.rpn.instruction_set import StackEnd
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.process_images import ProcessImage
from dprobes.target.process_maps import Mapping
from dprobes.target.unwind.stack_memory import FileSpace, MappedFiles
from dprobes.target.unwind.stack_walk import COLUMNS, walk

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS_64 = COLUMNS["x86_64"]
BIAS = 0x7000_0000_0000
STACK = 0x7FFF_0000_0000
SOURCE = Path(__file__).parents[3] / "programs" / "callstacks.c"
FLAGS = {
    "eh_frame": ("-shared", "-fPIC"),
    "debug_frame": ("-shared", "-fPIC", "-g", "-fno-asynchronous-unwind-tables"),
    "static": ("-static-pie", "-Wl,--no-eh-frame-hdr"),
}
SECTIONS = (".eh_frame", ".eh_frame_hdr", ".debug_frame")


@pytest.fixture(scope="module", params=FLAGS)
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("corrupt") / "module"
    subprocess.run(["gcc", "-O2", "-pthread", *FLAGS[request.param], SOURCE, "-o", path], check=True)
    return path


def loaded(path: Path) -> tuple[ElfFile, ProcessImage]:
    """Return a file, and an image in which it is mapped."""
    elf = ElfFile.open(path)
    segment = next(segment for segment in elf.load_segments if segment.executable)
    status = path.stat()
    start = BIAS + segment.vaddr & -4096
    identity = status.st_dev, status.st_ino, str(path)
    end = start + segment.filesz + 4096
    mapping = Mapping(start, end, "r-xp", segment.offset & -4096, *identity, deleted=False)
    return elf, ProcessImage(1, 0, [mapping])


def looping(words: list[int]) -> Callable[[int, int], bytes]:
    """Return what reads a stack of a mebibyte that holds these words again and again."""
    data = struct.pack(f"<{len(words)}Q", *words)
    size = 1 << 20

    def read(address: int, count: int) -> bytes:
        if not STACK <= address <= STACK + size - count:
            raise TargetError("no memory")
        start = (address - STACK) % len(data)
        return (data * (count // len(data) + 2))[start : start + count]

    return read


mutations = st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(mutations, st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6), st.data())
def test_a_walk_ends_whatever_the_tables_are(
    module: Path, changes: list[tuple[int, bytes]], places: list[int], data: st.DataObject
) -> None:
    contents = bytearray(module.read_bytes())
    elf = ElfFile.of_bytes(module, bytes(contents))
    sections = [section for section in elf.sections if section.name in SECTIONS and section.size]
    for place, new in changes:
        section = sections[place % len(sections)]
        at = section.offset + place % section.size
        kept = new[: section.offset + section.size - at]
        contents[at : at + len(kept)] = kept
    copy = module.with_name(f"copy-{os.getpid()}")
    copy.write_bytes(contents)
    whole, image = loaded(copy)
    code = next(segment for segment in whole.load_segments if segment.executable)
    words = [BIAS + code.vaddr + place % code.filesz for place in places]
    words.append(STACK + 8 * data.draw(st.integers(0, 100)))
    space = FileSpace(8, image, MappedFiles())
    space.read_stack = looping(words)
    registers = dict.fromkeys(range(16), STACK) | {COLUMNS_64.pc: words[0], COLUMNS_64.sp: STACK}
    found = walk(space, COLUMNS_64, registers, 127)
    assert 1 <= len(found.addresses) <= 127
    assert isinstance(found.end, StackEnd)
    copy.unlink()


def test_untouched_tables_are_found(module: Path) -> None:
    elf, image = loaded(module)
    space = FileSpace(8, image, MappedFiles())
    names = [line.split() for line in subprocess.check_output(["nm", module], text=True).splitlines()]
    (here,) = (int(words[0], 16) for words in names if words[-1] == "here")
    table = space.table_at(BIAS + here)
    assert table is not None
    rules = table.rules_at(BIAS + here)
    assert rules is not None
    assert rules.start == BIAS + here
    assert rules.row_at(BIAS + here) is not None
    assert elf.word_size == 8
