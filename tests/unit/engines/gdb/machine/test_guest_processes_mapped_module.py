"""Where a module is in the processes of a machine, by what they have mapped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from dprobes.engines.gdb.machine.guest_processes import AddressSpace, MappedFile, MappedModule, ModulePlace
from dprobes.target.elf.elf_headers import LoadSegment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dprobes.engines.gdb.machine.guest_processes import AddressSpaces
    from dprobes.target.elf.elf_file import ElfFile

ID = bytes(range(20))
FIRST, SECOND = AddressSpace(0x100, 11), AddressSpace(0x200, 12)
BIAS = 0x7F0000000000


def elf(build_id: bytes = ID) -> ElfFile:
    segments = (LoadSegment(0, 0x400, 0, 0x400, 4), LoadSegment(0x401234, 0x2800, 0x1234, 0x2800, 5))
    return cast(
        "ElfFile",
        SimpleNamespace(
            path=Path("/lib/libx.so.1"),
            soname="libx.so",
            load_segments=segments,
            build_id=build_id.hex() or None,
            data=b"\0" * 0x300 + build_id,
            link_address=lambda offset: offset,
        ),
    )


class Spaces:
    """Address spaces with what they map, and what is in their memory at the place of the build-id."""

    def __init__(self, mapped: dict[AddressSpace, list[MappedFile]], memory: dict[int, bytes]) -> None:
        self.mapped, self.memory = mapped, memory

    def __iter__(self) -> Iterator[AddressSpace]:
        return iter(self.mapped)

    def code_files(self, space: int) -> list[MappedFile]:
        return [each for key, found in self.mapped.items() if key.address == space for each in found]

    def file_at(self, space: int, address: int) -> MappedFile | None:
        return next((each for each in self.code_files(space) if each.start <= address < each.end), None)

    def read(self, space: int, address: int, size: int) -> bytes:
        assert address & 0xFFF == 0x300
        return self.memory.get(space, b"")[:size]


def code(
    space: AddressSpace, *, bias: int = BIAS, name: bytes = b"libx.so.1", inode: int = 7, more: int = 0
) -> MappedFile:
    start = bias + 0x401000 + more
    return MappedFile(space.address, start, start + 0x1000, 0x1000 + more, True, name, inode)


def module(mapped: dict[AddressSpace, list[MappedFile]], memory: dict[int, bytes], **options: Any) -> MappedModule:
    return MappedModule(cast("AddressSpaces", Spaces(mapped, memory)), elf(**options), "libx.so.1")


def test_it_is_where_its_code_is_mapped() -> None:
    other = code(FIRST, bias=0x9000, name=b"other")
    mapped = {FIRST: [other, code(FIRST)], SECOND: [code(SECOND, bias=0x1000, name=b"libx.so")]}
    found = module(mapped, {0x100: ID, 0x200: ID})
    assert list(found) == [ModulePlace(0x100, 11, BIAS), ModulePlace(0x200, 12, 0x1000)]
    assert found.is_at(0x100, BIAS)
    assert found.is_at(0x100, BIAS, BIAS + 0x401234)
    assert not found.is_at(0x100, BIAS + 0x1000)
    assert not found.is_at(0x200, BIAS)


def test_data_and_other_parts_of_the_file_are_not_its_code() -> None:
    mapped = code(FIRST)
    found = module({}, {})
    assert found.bias_in(None, 1) is None
    assert found.bias_in(mapped._replace(is_code=False), 1) is None
    assert found.bias_in(mapped._replace(offset=0x5000), 1) is None
    assert found.bias_in(mapped, 1) == BIAS


def test_a_part_of_its_code_that_is_mapped_alone() -> None:
    assert module({}, {}).bias_in(code(FIRST, more=0x1000), 1) == BIAS


def test_another_build_is_another_module() -> None:
    found = module({FIRST: [code(FIRST)], SECOND: [code(SECOND, inode=8)]}, {0x100: ID, 0x200: ID[::-1]})
    assert [place.pid for place in found] == [11]
    assert found.others == {12}


def test_what_cannot_be_read_yet_is_taken_for_it_until_it_can() -> None:
    spaces = Spaces({FIRST: [code(FIRST)]}, {})
    found = MappedModule(cast("AddressSpaces", spaces), elf(), "libx.so.1")
    assert found.is_at(0x100, BIAS)
    spaces.memory[0x100] = ID[::-1]
    assert not found.is_at(0x100, BIAS)


def test_a_file_without_a_build_id_is_known_by_its_name() -> None:
    assert [place.pid for place in module({FIRST: [code(FIRST)]}, {0x100: b"x" * 20}, build_id=b"")] == [11]


def test_processes_that_share_an_address_space_come_once() -> None:
    twin = AddressSpace(FIRST.address, 13)
    assert [place.pid for place in module({FIRST: [code(FIRST)], twin: []}, {0x100: ID})] == [11]
