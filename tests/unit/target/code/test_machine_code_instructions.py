# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from dprobes.target.code.machine_code import (
    Boundary,
    BoundaryCheck,
    check_boundary,
    decode_at,
    disassemble,
    disassemble_around,
    unprobeable,
)
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from unit.target.conftest import Toolbox

    ErrorOf = Callable[[Callable[[], object]], tuple[str, str | None]]


def objdump(tools: Toolbox, path: Path, *options: str) -> list[tuple[int, bytes, str]]:
    """Return address, bytes and mnemonic of each instruction in .text."""
    text = tools.run("objdump", "-d", "-M", "intel", "-w", "-j", ".text", *options, path)
    rows = re.findall(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2} )+) *\t?(\S*)", text, re.MULTILINE)
    return [(int(address, 16), bytes.fromhex(raw), mnemonic) for address, raw, mnemonic in rows]


def test_instructions_are_those_of_objdump(tools: Toolbox, pie: Path, fixed: Path, i386: Path) -> None:
    for path in (pie, fixed, i386):
        module = Module.load(path)
        rows = objdump(tools, path)
        start = module.file_offset(rows[0][0])
        decoded = disassemble(module, start, len(rows))
        assert [(address, raw) for address, raw, _ in rows] == [(d.address, d.raw) for d in decoded]
        assert [raw[0] for _, raw, _ in rows] == [d.opcode_byte for d in decoded]


def test_boundaries_of_the_c_library_are_those_of_objdump(tools: Toolbox, libc: Path) -> None:
    module = Module.load(libc)
    for name in ("printf", "qsort_r", "getaddrinfo", "vfprintf"):
        (symbol,) = module.symbols.lookup(name)
        low, high = symbol.address, symbol.address + symbol.size
        starts = {a for a, _, _ in objdump(tools, libc, f"--start-address={low}", f"--stop-address={high}")}
        offsets = range(low, min(high, low + 1500))
        found = {a for a in offsets if check_boundary(module, module.file_offset(a)).status is Boundary.ON_BOUNDARY}
        assert {a for a in starts if a in offsets} == found


def test_boundaries_of_a_stripped_file_come_from_the_unwind_table(pie: Path, stripped: Path) -> None:
    full, bare = Module.load(pie), Module.load(stripped)
    start = full.file_offset(full.address_of("main"))
    for offset in range(start, start + 20):
        assert check_boundary(full, offset) == check_boundary(bare, offset)


def test_offset_inside_an_instruction_names_its_neighbours(pie: Path) -> None:
    module = Module.load(pie)
    start = module.file_offset(module.address_of("work"))
    first = decode_at(module, start)
    second = decode_at(module, start + first.length)
    longer = first if first.length > 1 else second
    assert BoundaryCheck(Boundary.ON_BOUNDARY) == check_boundary(module, longer.offset)
    expected = BoundaryCheck(Boundary.INSIDE, longer.offset, longer.offset + longer.length)
    assert expected == check_boundary(module, longer.offset + 1)


def test_boundary_is_unknown_without_symbol_and_unwind_table(tools: Toolbox, static: Path) -> None:
    bare = tools.directory / "static_bare"
    tools.run("strip", "--remove-section=.eh_frame", "-o", bare, static)
    full = Module.load(static)
    offset = full.file_offset(full.address_of("work"))
    assert Boundary.ON_BOUNDARY is check_boundary(full, offset).status
    assert BoundaryCheck(Boundary.UNKNOWN) == check_boundary(Module.load(bare), offset)


def test_decoded_instruction_has_all_its_parts(tools: Toolbox, tmp_path: Path) -> None:
    module = assemble(tools, tmp_path, "lock xaddl %eax, 0x10(%rdi)\n ret")
    decoded = decode_at(module, module.file_offset(module.elf.entry))
    assert (module.elf.entry, 5, bytes.fromhex("f00fc14710")) == (decoded.address, decoded.length, decoded.raw)
    assert ("lock xadd [rdi+0x10], eax", 0xF0, "xadd") == (decoded.text, decoded.opcode_byte, decoded.mnemonic)
    assert module.file_offset(module.elf.entry) == decoded.offset


def assemble(tools: Toolbox, directory: Path, code: str, bits: int = 64) -> Module:
    source, path = directory / "code.s", directory / "code"
    source.write_text(f".globl _start\n.type _start, @function\n_start: {code}\n.size _start, .-_start\n")
    tools.run("gcc", f"-m{bits}", "-c", source, "-o", directory / "code.o")
    tools.run("ld", "-m", "elf_x86_64" if bits == 64 else "elf_i386", directory / "code.o", "-o", path)
    return Module.load(path)


@pytest.mark.parametrize(
    ("code", "bits", "text", "reason"),
    [
        ("int3", 64, "int3", "it is a breakpoint instruction itself"),
        ("int $3", 64, "int3", "it is a breakpoint instruction itself"),
        ("int $0x80", 32, "int 0x80", "it is a software interrupt"),
        ("into", 32, "into", "it may raise a software interrupt"),
        ("fwait", 64, "fwait", "it only waits for a pending floating-point exception"),
        (".byte 0xf1", 64, "int1", "it raises a debug exception itself"),
        ("into_is_gone: .byte 0xce", 64, "(bad)", "it is not a valid instruction"),
        (".byte 0x0f, 0xff", 64, "(bad)", "it is not a valid instruction"),
        ("endbr64", 64, "endbr64", None),
        ("syscall", 64, "syscall", None),
        ("ud2", 64, "ud2", None),
        ("jmp _start", 64, "jmp 0x", None),
        ("mov 0x100(%rip), %rax", 64, "mov rax, [rip+0x100]", None),
    ],
)
def test_unprobeable_instructions_are_named(
    tools: Toolbox, tmp_path: Path, code: str, bits: int, text: str, reason: str | None
) -> None:
    if code == "int $3":
        code = ".byte 0xcc"
    module = assemble(tools, tmp_path, code + "\n nop\n nop\n nop", bits)
    decoded = decode_at(module, module.file_offset(module.elf.entry))
    assert text == decoded.text[: len(text)]
    assert reason == unprobeable(decoded)


def test_boundary_after_an_invalid_instruction_is_unknown(tools: Toolbox, tmp_path: Path) -> None:
    module = assemble(tools, tmp_path, "nop\n .byte 0x06, 0x90, 0x90")
    start = module.file_offset(module.elf.entry)
    assert [Boundary.ON_BOUNDARY, Boundary.ON_BOUNDARY, Boundary.UNKNOWN] == [
        check_boundary(module, start + i).status for i in range(3)
    ]


def test_disassembly_around_an_offset_stays_in_the_function(pie: Path) -> None:
    module = Module.load(pie)
    start = module.file_offset(module.address_of("main"))
    whole = disassemble(module, start, 6)
    assert whole[1:5] == disassemble_around(module, whole[3].offset, 2, 1)
    assert whole[:4] == disassemble_around(module, whole[2].offset, 10, 1)
    assert whole[3:4] == disassemble_around(module, whole[3].offset, 0, 0)
    longer = next(d for d in whole[1:] if d.length > 1)
    assert longer in disassemble_around(module, longer.offset + 1, 1, 0)


def test_disassembly_ends_with_the_code(pie: Path) -> None:
    module = Module.load(pie)
    segment = next(s for s in module.elf.load_segments if s.executable)
    decoded = disassemble(module, segment.offset, 1 << 20)
    assert segment.filesz == sum(d.length for d in decoded)
    assert [] == disassemble(module, segment.offset, 0)


def test_chunks_do_not_show_in_long_disassembly(tools: Toolbox, libc: Path) -> None:
    module = Module.load(libc)
    low = module.address_of("vfprintf")
    rows = objdump(tools, libc, f"--start-address={low}", f"--stop-address={low + 20000}")[:-20]
    decoded = disassemble(module, module.file_offset(low), len(rows))
    assert [(address, len(raw)) for address, raw, _ in rows] == [(d.address, d.length) for d in decoded]


def test_offsets_outside_code_are_errors(pie: Path, error_of: ErrorOf) -> None:
    module = Module.load(pie)
    data = module.file_offset(module.address_of("global_value"))
    message = f"file offset 0x{data:x} of '{pie}' is not in its code"
    assert (message, None) == error_of(lambda: decode_at(module, data))
    assert (message, None) == error_of(lambda: check_boundary(module, data))
    assert (message, None) == error_of(lambda: disassemble(module, data, 1))
    assert (message, None) == error_of(lambda: disassemble_around(module, data, 1, 1))


def test_other_processors_cannot_be_decoded(pie: Path, error_of: ErrorOf) -> None:
    elf = ElfFile.open(pie)
    elf.machine = "em_8"
    module = Module(elf, Module.load(pie).symbols)
    known = "i386, x86_64, aarch64, riscv64, s390, s390x, ppc, ppc64"
    message = f"instructions of em_8 cannot be decoded, only those of {known}"
    assert (message, None) == error_of(lambda: decode_at(module, elf.entry))
