"""``docs/reference/ppdf.md`` draws what is written: its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import LoopForm
from dprobes.ppdf import build_facts, code_images, ppdf_sections, program_definitions, tool_trees
from dprobes.ppdf.code_images import NoteKind
from dprobes.ppdf.ppdf_file import IS_JOINED, NEEDS_WRITE, STRING_MAX
from dprobes.ppdf.program_definitions import LOCATIONS
from dprobes.ppdf.tool_trees import BLOCK_KINDS, StatementKind, ValueKind
from dprobes.target.elf.elf_file import CODE_PREFIX
from unit.ppdf.samples import SMALL, sections_of

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "ppdf.md").read_text()


@pytest.mark.parametrize(
    "line",
    [
        f"     0     8  magic: {ppdf_sections.MAGIC.hex(' ')}\n",
        f"     8   u16  major version: {ppdf_sections.MAJOR}\n",
        f"    10   u16  minor version: {ppdf_sections.MINOR}\n",
        f"size of the file in bytes, at most {ppdf_sections.SIZE_MAX}\n",
        f"number of sections, at most {ppdf_sections.SECTION_MAX}\n",
        f"size in bytes, at most {STRING_MAX}; UTF-8",
        f"flags: {NEEDS_WRITE} the program needs --allow-write\n",
        f"               {IS_JOINED} it has companions or blocks of the tool,",
        f"number of variables, at most {tool_trees.SLOTS_MAX}\n",
        f"values are nested at most {tool_trees.DEPTH_MAX} deep",
        "kind: " + ", ".join(f"{number} {kind.value}" for number, kind in enumerate(BLOCK_KINDS)),
        f"{program_definitions.LINE_MAX} at most",
        f"A chain of spans has at most {program_definitions.DEPTH_MAX} spans",
        "kind: " + ", ".join(f"{n} {kind}" for n, kind in enumerate(build_facts.KINDS)),
        "binding: " + ", ".join(f"{n} {binding}" for n, binding in enumerate(build_facts.BINDINGS)),
        f'"{CODE_PREFIX}" and a hash',
        "(" + ", ".join(f"`{loops.value}`" for loops in LoopForm) + ")",
        "`x86_64` (8 bytes) or `i386` (4 bytes)",
    ],
)
def test_a_number_is_documented(line: str) -> None:
    assert line in TEXT


def test_the_tables_are_those_of_the_code() -> None:
    assert re.findall(r"^\| ([A-Z]{4}) \|", TEXT, re.MULTILINE) == list(sections_of(SMALL))
    assert re.findall(r"^### ([A-Z]{4})$", TEXT, re.MULTILINE) == list(sections_of(SMALL))
    assert [int(n) for n in re.findall(r"^\| (?:`offset|`address|`sampler).*`u8` (\d)", TEXT, re.MULTILINE)] == list(
        LOCATIONS.values()
    )
    assert [int(n) for n in re.findall(r"^\| (\d) \|", TEXT, re.MULTILINE)] == list(NoteKind)
    statements, values = TEXT.split("\n| statement |")[1].split("\n| value |")
    assert [int(n) for n in re.findall(r"^\| (\d+) ", statements, re.MULTILINE)] == list(StatementKind)
    assert [int(n) for n in re.findall(r"^\| (\d+) ", values, re.MULTILINE)] == list(ValueKind)
    words = {4: set[str](), 8: set[str]()}
    for names, size in re.findall(r"((?:`\w+`[, ]*(?:and )?)+)\s\(([48]) bytes\)", TEXT.split("### CODE")[1]):
        words[int(size)] |= set(re.findall(r"`(\w+)`", names))
    assert words == {
        size: {each for each in code_images.MACHINES if architecture(each).word_size == size} for size in words
    }


def test_the_header_is_as_drawn() -> None:
    sizes = {"8": 8, "u16": 2, "u32": 4}
    rows = re.findall(r"^ +(\d+) +(8|u16|u32) ", TEXT, re.MULTILINE)
    place = 0
    for offset, size in rows:
        assert int(offset) == place
        place += sizes[size]
    assert place == 24
    assert int.from_bytes(SMALL[12:16], "little") == len(SMALL)
    assert int.from_bytes(SMALL[16:20], "little") == len(sections_of(SMALL))
