# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dprobes.errors import TargetError
from dprobes.target.code.machine_code import check_boundary, disassemble
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.elf.symbol_table import elf_symbols
from dprobes.target.module_symbols import SymbolTable
from dprobes.target.probed_module import Module
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]


def readelf_segments(tools: Toolbox, path: Path) -> list[tuple[int, ...]]:
    rows = re.findall(
        r"^ +LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+) (0x\w+) ([R ][W ][E ])",
        tools.run("readelf", "-lW", path),
        re.MULTILINE,
    )
    letters = {"R": 4, "W": 2, "E": 1, " ": 0}
    return [
        (int(vaddr, 16), int(memsz, 16), int(offset, 16), int(filesz, 16), sum(letters[x] for x in flags))
        for offset, vaddr, filesz, memsz, flags in rows
    ]


def test_headers_agree_with_readelf(
    tools: Toolbox, system_files: list[Path], pie: Path, fixed: Path, static: Path, i386: Path, versioned: Path
) -> None:
    for path in [*system_files, pie, fixed, static, i386, versioned]:
        elf = ElfFile.open(path)
        header = tools.run("readelf", "-hW", path)
        notes = tools.run("readelf", "-nW", path)
        dynamic = tools.run("readelf", "-dW", path)
        program = tools.run("readelf", "-lW", path)
        assert readelf_segments(tools, path) == [
            (s.vaddr, s.memsz, s.offset, s.filesz, s.flags) for s in elf.load_segments
        ]
        assert ("DYN" in re.findall(r"Type: +(\w+)", header)[0]) == elf.is_pie_or_shared
        assert re.findall(r"Build ID: (\w+)", notes) == ([elf.build_id] if elf.build_id else [])
        assert re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) == list(elf.needed)
        assert re.findall(r"\(SONAME\).*\[(.*)\]", dynamic) == ([elf.soname] if elf.soname else [])
        assert re.findall(r"interpreter: (.*)\]", program) == ([elf.interpreter] if elf.interpreter else [])
        assert int(re.findall(r"Entry point address: +0x(\w+)", header)[0], 16) == elf.entry


def test_machine_and_type_have_names(pie: Path, fixed: Path, i386: Path, tools: Toolbox) -> None:
    assert ("x86_64", "dyn", 8, "little") == identity(pie)
    assert ("x86_64", "exec", 8, "little") == identity(fixed)
    assert ("i386", "exec", 4, "little") == identity(i386)
    assert ("i386", "rel", 4, "little") == identity(tools.directory / "small32.o")


def identity(path: Path) -> tuple[str, str, int, str]:
    elf = ElfFile.open(path)
    return elf.machine, elf.type, elf.word_size, elf.byte_order


def big_endian_header(elf_class: int, machine: int) -> bytes:
    size, word = (52, 4) if elf_class == 1 else (64, 8)
    head = b"\x7fELF" + bytes([elf_class, 2, 1]) + bytes(9) + (2).to_bytes(2, "big") + machine.to_bytes(2, "big")
    head += (1).to_bytes(4, "big") + bytes(3 * word) + bytes(4) + size.to_bytes(2, "big")
    return head.ljust(size, b"\0")


@pytest.mark.parametrize(
    ("elf_class", "number", "machine"),
    [(1, 22, "s390"), (2, 22, "s390x"), (1, 20, "ppc"), (2, 21, "ppc64"), (2, 183, "aarch64"), (1, 8, "em_8")],
)
def test_other_processors_are_recognised(tmp_path: Path, elf_class: int, number: int, machine: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(big_endian_header(elf_class, number))
    assert (machine, "exec", 4 * elf_class, "big") == identity(path)


def test_offsets_and_addresses_are_each_others_inverse(pie: Path, fixed: Path, libc: Path) -> None:
    for path in (pie, fixed, libc):
        elf = ElfFile.open(path)
        for segment in elf.load_segments:
            for delta in {0, segment.filesz // 2, segment.filesz - 1}:
                address = segment.vaddr + delta
                assert segment.offset + delta == elf.file_offset(address)
                assert elf.data[segment.offset + delta : segment.offset + delta + 1] == elf.read(address, 1)
                if segment.executable:
                    assert address == elf.link_address(segment.offset + delta)
                    assert elf.is_executable_offset(segment.offset + delta)


def test_addresses_outside_the_file_have_no_offset(pie: Path, error_of: ErrorOf) -> None:
    elf = ElfFile.open(pie)
    bss = Module.load(pie).address_of("zeroed")
    assert elf.file_offset(bss) is None
    assert bytes(400) == elf.read(bss, 400)
    assert elf.file_offset(0x7FFF_FFFF_FFFF) is None
    assert elf.link_address(1 << 40) is None
    assert not elf.is_executable_offset(0)
    assert (f"'{pie}' has no 4 bytes at address 0x10000000", None) == error_of(lambda: elf.read(0x10000000, 4))


def test_frame_starts_are_those_of_the_unwind_table(tools: Toolbox, system_files: list[Path], stripped: Path) -> None:
    for path in [*system_files, stripped]:
        listed = {
            int(start, 16) for start in re.findall(r"FDE cie=\w+ pc=(\w+)\.\.", tools.run("readelf", "-wfN", path))
        }
        assert sorted(listed) == sorted(set(ElfFile.open(path).frames.starts))


def test_frame_covers_exactly_its_function(tools: Toolbox, pie: Path, stripped: Path) -> None:
    elf = ElfFile.open(stripped)
    (work,) = SymbolTable(elf_symbols(full := ElfFile.open(pie)), code_range=full.code_range).lookup("work")
    assert work.address == elf.frames.covering(elf, work.address + work.size - 1)
    assert work.address != elf.frames.covering(elf, work.address + work.size)
    assert elf.frames.covering(elf, 0) is None


def test_reading_leaves_no_descriptor_open(libc: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    elf = ElfFile.open(libc)
    assert before == len(list(Path("/proc/self/fd").iterdir()))
    assert elf.machine


def test_what_is_not_an_elf_file_is_named(tmp_path: Path, error_of: ErrorOf, pie: Path) -> None:
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n")
    empty = tmp_path / "empty"
    empty.touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    script = (f"'{text}' is not an ELF file", "it is a script: probe the program that runs it")
    assert script == error_of(lambda: ElfFile.open(text))
    text.write_text("text\n")
    assert (f"'{text}' is not an ELF file", None) == error_of(lambda: ElfFile.open(text))
    assert (f"'{empty}' is empty, expected an ELF file", None) == error_of(lambda: ElfFile.open(empty))
    assert (f"'{tmp_path}' is a directory, expected an ELF file", None) == error_of(lambda: ElfFile.open(tmp_path))
    assert (f"'{pipe}' is not a regular file, expected an ELF file", None) == error_of(lambda: ElfFile.open(pipe))
    assert ("'/no/such' does not exist", None) == error_of(lambda: ElfFile.open("/no/such"))
    assert (f"'{text}/x' does not exist", None) == error_of(lambda: ElfFile.open(f"{text}/x"))
    assert ("'a\\x00b' is not a file name: it contains a NUL byte", None) == error_of(lambda: ElfFile.open("a\0b"))
    assert (f"'{loop}' cannot be read: too many levels of symbolic links", None) == error_of(lambda: ElfFile.open(loop))


def test_damaged_headers_are_named(tmp_path: Path, error_of: ErrorOf, pie: Path) -> None:
    path = tmp_path / "x"
    good = pie.read_bytes()

    def error(data: bytes) -> str:
        path.write_bytes(data)
        message, hint = error_of(lambda: ElfFile.open(path))
        assert hint is None
        return message

    def changed(offset: int, new: bytes) -> bytes:
        return good[:offset] + new + good[offset + len(new) :]

    sections = int.from_bytes(good[40:48], "little") + 64 * int.from_bytes(good[60:62], "little")
    assert f"'{path}' is truncated: 10 bytes of the 16 that identify an ELF file" == error(good[:10])
    assert f"'{path}' is truncated: 40 bytes of the 64 of its header" == error(good[:40])
    assert f"'{path}' is truncated: its section headers end at byte {sections} of 5000" == error(good[:5000])
    assert f"'{path}' has ELF class 3, expected 1 (32-bit) or 2 (64-bit)" == error(changed(4, b"\3"))
    assert f"'{path}' has ELF data encoding 7, expected 1 (little-endian) or 2 (big-endian)" == error(changed(5, b"\7"))
    assert f"'{path}' has ELF type 9, expected a program, library or object file" == error(changed(16, b"\x09\0"))
    assert f"'{path}' is a malformed ELF file: program headers of 9 bytes, expected 56" == error(changed(54, b"\x09\0"))


def test_truncated_file_without_section_headers_is_named(tmp_path: Path, error_of: ErrorOf, pie: Path) -> None:
    path = tmp_path / "x"
    elf = ElfFile.open(pie)
    end = max(s.offset + s.filesz for s in elf.load_segments)
    good = pie.read_bytes()
    path.write_bytes((good[:40] + bytes(8) + good[48:60] + bytes(4) + good[64:])[: end - 1])
    message = f"'{path}' is truncated: a segment ends at byte {end} of {end - 1}"
    assert (message, None) == error_of(lambda: ElfFile.open(path))


def test_segment_past_the_address_space_is_named(tmp_path: Path, error_of: ErrorOf, pie: Path) -> None:
    path = tmp_path / "x"
    good = bytearray(pie.read_bytes())
    headers, count = int.from_bytes(good[32:40], "little"), int.from_bytes(good[56:58], "little")
    places = [headers + 56 * i for i in range(count)]
    load = next(place for place in places if good[place : place + 4] == b"\1\0\0\0")
    good[load + 40 : load + 48] = b"\xff" * 8
    good[load + 16 : load + 24] = (16).to_bytes(8, "little")
    path.write_bytes(good)
    message = (
        f"'{path}' is a malformed ELF file: a segment at address 0x10 has no room for its 0xffffffffffffffff bytes"
    )
    assert (message, None) == error_of(lambda: ElfFile.open(path))


def test_large_files_are_mapped_with_the_same_result(pie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Module.load(pie)
    monkeypatch.setattr("dprobes.target.elf.file_contents.READ_LIMIT", 0)
    large = Module.load(pie)
    assert not isinstance(large.elf.data, bytes)
    assert small.elf.build_id == large.elf.build_id
    assert small.elf.load_segments == large.elf.load_segments
    assert small.elf.frames.starts == large.elf.frames.starts
    assert list(small.symbols.functions()) == list(large.symbols.functions())
    offset = small.file_offset(small.address_of("main"))
    assert disassemble(small, offset, 5) == disassemble(large, offset, 5)
    with pytest.raises(TargetError):
        large.address_of("no_such")


def test_importing_the_package_imports_no_heavy_library() -> None:
    names = [
        "elf.elf_file",
        "module_symbols",
        "elf.symbol_sources",
        "process_maps",
        "module_lookup",
        "probed_module",
        "code.machine_code",
    ]
    code = f"import sys; import {', '.join('dprobes.target.' + n for n in names)}\n"
    code += "print([m for m in ('elftools', 'iced_x86', 'difflib') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "[]" == done.stdout.strip()


def use_everything(path: Path) -> None:
    """Ask every question; whatever the file, only a TargetError may end it."""
    module = Module.load(path)
    elf = module.elf
    for question in (
        lambda: elf.frames.starts,
        lambda: module.address_of("work"),
        lambda: module.address_of("printf"),
        lambda: module.symbols.lookup("main"),
        lambda: list(module.symbols.functions()),
        lambda: module.symbols.near("wrok"),
        lambda: elf.read(elf.entry, 16),
        lambda: [module.symbol_at(o) for o in range(0x1000, 0x1200, 7)],
        lambda: [module.function_start(o) for o in range(0x1000, 0x1200, 7)],
        lambda: check_boundary(module, 0x1141),
        lambda: disassemble(module, 0x1050, 5),
    ):
        try:
            question()
        except TargetError:
            continue


def accepts_or_target_error(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        use_everything(path)
    except TargetError:
        return


def test_truncation_anywhere_gives_nothing_but_target_error(tmp_path: Path, stripped: Path) -> None:
    good = stripped.read_bytes()
    for size in [*range(130), *range(130, len(good), 131)]:
        accepts_or_target_error(tmp_path / "x", good[:size])


@settings(
    max_examples=rounds(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_mutation_anywhere_gives_nothing_but_target_error(
    tmp_path: Path, pie: Path, stripped: Path, i386: Path, data: st.DataObject
) -> None:
    good = bytearray(data.draw(st.sampled_from([pie, stripped, i386])).read_bytes())
    wide = good[4] == 2
    headers = int.from_bytes(good[40:48] if wide else good[32:36], "little")
    tables = int.from_bytes(good[32:40] if wide else good[28:32], "little")
    # Header bytes matter most; the rest covers symbols, strings, notes, hash and unwind tables.
    places = st.one_of(
        st.integers(4, 63),
        st.integers(tables, tables + 700),
        st.integers(headers, len(good) - 1),
        st.integers(0, len(good) - 1),
    )
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(places) % len(good)
        new = data.draw(st.one_of(st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f", b"\xff"]), st.binary(max_size=8)))
        good[place : place + len(new)] = new
    accepts_or_target_error(tmp_path / "x", bytes(good))


@settings(
    max_examples=rounds(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(ident=st.sampled_from([b"\1\1", b"\1\2", b"\2\1", b"\2\2"]), rest=st.binary(max_size=400))
def test_garbage_after_the_magic_gives_nothing_but_target_error(tmp_path: Path, ident: bytes, rest: bytes) -> None:
    accepts_or_target_error(tmp_path / "x", b"\x7fELF" + ident + rest)
