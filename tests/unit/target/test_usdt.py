"""USDT probes of a file: notes as <sys/sdt.h> writes them, moved ones, and whatever else may stand there."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from dprobes.target.elf.elf_headers import LoadSegment, Section
from dprobes.target.usdt import UsdtSite, matching_sites, near_probes, usdt_sites

if TYPE_CHECKING:
    from collections.abc import Sequence

CODE, DATA = range(0x1000, 0x2000), range(0x5000, 0x6000)
"""The link addresses that the file has; its offsets are 0x400 lower."""


@dataclass(eq=False)
class MadeUpFile:
    """Answer as an ``ElfFile`` does; ``base`` is the address of .stapsdt.base, None for a file without one."""

    notes: bytes
    base: int | None = 0x3000
    machine: str = "x86_64"
    word_size: int = 8
    struct_prefix: str = "<"
    sections: Sequence[Section] = field(init=False)
    load_segments: Sequence[LoadSegment] = (
        LoadSegment(0x1000, 0x1000, 0xC00, 0x1000, 5),
        LoadSegment(0x5000, 0x1800, 0x4C00, 0x1000, 6),
    )

    def __post_init__(self) -> None:
        self.sections = [Section(".note.stapsdt", 7, 0, 0, 0, len(self.notes), 0, 0)]
        if self.base is not None:
            self.sections.append(Section(".stapsdt.base", 1, 2, self.base, 0, 1, 0, 0))

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        assert what == "the section .note.stapsdt"
        return self.notes[offset : offset + size]

    def file_offset(self, address: int) -> int | None:
        return address - 0x400 if address in CODE or address in DATA else None

    def is_executable_offset(self, offset: int) -> bool:
        return offset + 0x400 in CODE


def note(
    name: str,
    address: int,
    semaphore: int = 0,
    arguments: str = "",
    *,
    provider: str = "demo",
    owner: bytes = b"stapsdt\0",
    kind: int = 3,
    word: str = "Q",
) -> bytes:
    strings = f"{provider}\0{name}\0{arguments}\0".encode()
    description = struct.pack(f"<3{word}", address, 0x3000, semaphore) + strings
    padded = description + bytes(-len(description) % 4)
    return struct.pack("<3I", len(owner), len(description), kind) + owner + bytes(-len(owner) % 4) + padded


def sites(*notes: bytes, base: int | None = 0x3000) -> tuple[UsdtSite, ...]:
    return usdt_sites(MadeUpFile(b"".join(notes), base))  # type: ignore[arg-type]


def test_a_note_has_places_names_and_arguments() -> None:
    first, second = sites(note("tick", 0x1010, 0x5002, "-4@%eax 8@$5"), note("other", 0x1020))
    assert (first.probe, first.address, first.offset) == ("demo:tick", 0x1010, 0xC10)
    assert (first.semaphore, first.counter, first.described) == (0x5002, 0x4C02, "-4@%eax 8@$5")
    assert [argument.text for argument in first.arguments] == ["-4@%eax", "8@$5"]
    assert (second.probe, second.semaphore, second.counter, second.arguments) == ("demo:other", 0, 0, ())


def test_what_a_tool_has_moved_is_found_where_it_is_now() -> None:
    (moved,) = sites(note("tick", 0x1010, 0x5002), base=0x3100)
    assert (moved.address, moved.semaphore) == (0x1110, 0x5102)
    (guarded_by_none,) = sites(note("tick", 0x1010), base=0x3100)
    assert (guarded_by_none.address, guarded_by_none.semaphore) == (0x1110, 0)
    (without_base,) = sites(note("tick", 0x1010), base=None)
    assert without_base.address == 0x1010


def test_a_place_outside_of_the_code_has_no_offset_and_a_semaphore_outside_of_the_file_no_counter() -> None:
    in_data, nowhere = sites(note("data", 0x5010), note("nowhere", 0x9000, 0x6002))
    assert (in_data.offset, nowhere.offset, nowhere.semaphore, nowhere.counter) == (None, None, 0x6002, 0)


def test_what_no_program_can_count_in_is_no_semaphore() -> None:
    in_code, nowhere, cut = sites(note("a", 0x1010, 0x1002), note("b", 0x1010, 0x9000), note("c", 0x1010, 0x67FF))
    assert (in_code.semaphore, nowhere.semaphore, cut.semaphore) == (0, 0, 0)


def test_other_notes_and_malformed_ones_are_no_probes() -> None:
    kept = note("kept", 0x1010)
    assert [site.name for site in sites(note("x", 0x1010, owner=b"GNU\0"), note("y", 0x1010, kind=1), kept)] == ["kept"]
    assert [site.name for site in sites(note("", 0x1010), note("x" * 300, 0x1010), kept)] == ["kept"]
    assert sites(struct.pack("<3I", 8, 8, 3) + b"stapsdt\0" + bytes(8)) == ()
    assert [site.name for site in sites(kept, kept[:-8])] == ["kept"]  # a note that does not end
    assert sites(struct.pack("<3I", 0xFFFFFFFF, 0xFFFFFFFF, 3)) == ()


def test_i386_files_have_words_of_4_bytes() -> None:
    file = MadeUpFile(note("tick", 0x1010, 0x5002, "-4@%eax", word="I"), machine="i386", word_size=4)
    (site,) = usdt_sites(file)  # type: ignore[arg-type]
    assert (site.offset, site.counter) == (0xC10, 0x4C02)
    assert usdt_sites(MadeUpFile(note("tick", 0x1010), machine="em_48879")) == ()  # type: ignore[arg-type]


def test_patterns_choose_by_provider_and_name() -> None:
    data = note("tick", 0x1010) + note("tock", 0x1020) + note("tick", 0x1030, provider="other")
    file = MadeUpFile(data)

    def found(provider: str, name: str) -> list[str]:
        return [site.probe for site in matching_sites(file, provider, name)]  # type: ignore[arg-type]

    assert found("demo", "tick") == ["demo:tick"]
    assert found("demo", "t[io]ck") == ["demo:tick", "demo:tock"]
    assert found("*", "tick") == ["demo:tick", "other:tick"]
    assert found("demo", "Tick") == []


def test_names_that_may_be_meant_are_near_those_that_there_are() -> None:
    file = MadeUpFile(note("gc__start", 0x1010) + note("gc__done", 0x1020) + note("line", 0x1030))

    def near(provider: str, name: str) -> list[str]:
        return near_probes(file, provider, name)  # type: ignore[arg-type]

    assert near("demo", "gc-start") == ["demo:gc__start"]
    assert near("dem", "line") == ["demo:line"]
    assert near("demo", "gc__stort")[0] == "demo:gc__start"
    assert near("demo", "zzz") == []


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: note("tick", 0x1010)[:50] + tail))
def test_whatever_the_bytes_are_nothing_but_sites_comes_out(data: bytes) -> None:
    for site in sites(data):
        assert site.provider
        assert site.name
