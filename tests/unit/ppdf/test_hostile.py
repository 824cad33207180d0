"""Files that are truncated, damaged, or made to harm: an error that says where, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import tracemalloc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.cli.output.program_listing import ppdf_listing
from dprobes.diagnostics import Diagnostics
from dprobes.errors import FormatError, SourceError, TargetError
from dprobes.ppdf.ppdf_file import decode, encode
from dprobes.ppdf.ppdf_model import Ppdf
from dprobes.ppdf.ppdf_sections import MAGIC, SECTION_MAX, SIZE_MAX
from dprobes.resolve.kernel_places import KernelModule, resolve_kernel
from dprobes.resolve.local_module import resolve
from dprobes.rpn import instruction_set
from dprobes.rpn.instruction_set import rows_by_syntax
from dprobes.rpn.rpn_program import Code, Expression, Instruction, Offset, ProbeDefinition, Procedure, Program
from dprobes.target.carried_symbols import CarriedSymbols, OtherBuild
from dprobes.target.elf.elf_file import ElfFile
from dprobes.target.kernel.kernel_image import moved_kernel
from dprobes.target.kernel.kernel_symbols import CarriedKernel, Kallsyms, KernelArea, KernelSymbol
from dprobes.target.kernel.running_kernel import RunningKernel
from dprobes.target.process_maps import executable_mappings, read_maps
from unit.ppdf.samples import SMALL, repacked, sample, sections_of, with_header

DATA = encode(sample())
LIBRARY = next(m.path for m in executable_mappings(read_maps(os.getpid())) if "/libc.so" in m.path)
"""A file with code: the C library of this process."""

SEEDS = st.integers(0, (1 << 32) - 1)


def decoded(data: bytes) -> Ppdf | None:
    """Return what is decoded, None if that is refused; what is decoded comes back from its own bytes."""
    try:
        found = decode(data)
    except FormatError:
        return None
    assert decode(encode(found)) == found
    return found


def used(ppdf: Ppdf) -> None:
    """List a program as ``show`` does, and resolve it as an engine would; that it cannot be is no harm."""
    for as_bpf in (False, True):
        assert all(line.replace("\t", "").isprintable() for line in ppdf_listing(ppdf, None, as_bpf=as_bpf))
    symbols = CarriedSymbols(ppdf.builds, "hostile.ppdf", OtherBuild.NEAREST)
    running = RunningKernel(Kallsyms(b"ffffffff81000000 T _text\n"))
    for kernel in ppdf.kernels:
        with contextlib.suppress(TargetError):
            moved = moved_kernel(kernel, running)
            resolve_kernel(ppdf.program, KernelModule(moved, kernel.module), architecture("x86_64"), Diagnostics())
    with contextlib.suppress(SourceError, TargetError):
        resolve(ppdf.program, symbols.module_of(ElfFile.open(LIBRARY)), Diagnostics(), allow_write=True)


def error_of(data: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        decode(data)
    return caught.value.message


def test_a_file_that_is_cut_anywhere_is_refused() -> None:
    for length in range(len(DATA)):
        assert decoded(DATA[:length]) is None, length


def test_a_file_with_something_behind_it_is_refused() -> None:
    size = len(DATA)
    assert (
        error_of(DATA + b"\0")
        == f"the file is longer than it says: expected {size} bytes, found {size + 1} (at byte {size})"
    )


def test_a_file_with_any_byte_changed_is_refused() -> None:
    for offset in range(len(SMALL)):
        changed = bytearray(SMALL)
        changed[offset] ^= 1 << offset % 8
        assert decoded(bytes(changed)) is None, offset


@given(seed=SEEDS)
def test_bytes_that_are_changed_under_right_checksums_do_no_harm(seed: int) -> None:
    random = Random(seed)
    sections = sections_of(SMALL)
    for _ in range(20):
        changed = dict(sections)
        for _ in range(random.choice((1, 1, 1, 3))):
            name = random.choice(list(sections))
            data = bytearray(changed[name])
            place = random.randrange(len(data) + 1)
            match random.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([random.randrange(256)])
                case 1:
                    data[place : place + 4] = random.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF)).to_bytes(4, "little")
                case 2:
                    del data[place : place + random.randrange(1, 9)]
                case _:
                    data[place:place] = random.randbytes(random.randrange(1, 9))
            changed[name] = bytes(data)
        found = decoded(repacked(changed))
        if found is not None:
            used(found)


@given(
    data=st.binary(max_size=300), name=st.sampled_from(["STRS", "INFO", "SRCE", "CODE", "PROG", "BILD", "EBPF", "TMPL"])
)
def test_random_sections_do_no_harm(data: bytes, name: str) -> None:
    decoded(repacked({**sections_of(SMALL), name: data}))


@given(data=st.binary(max_size=200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    assert decoded(data) is None
    assert decoded(MAGIC + data) is None


def test_what_is_no_ppdf_is_called_so() -> None:
    assert error_of(b"") == "the file is truncated: expected a header of 24 bytes, found 0 (at byte 0)"
    assert (
        error_of(b"name = x\n") == "this is not a PPDF: expected it to begin with 89 50 50 44 46 0d 0a 1a (at byte 0)"
    )
    assert error_of(DATA.replace(b"\r\n", b"\n", 1)).startswith("this is not a PPDF")
    assert error_of(DATA[:9]) == "the file is truncated: expected a header of 24 bytes, found 9 (at byte 0)"


def test_a_newer_major_version_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(FormatError) as caught:
        decode(with_header(SMALL, 8, struct.pack("<HH", 2, 3)))
    assert caught.value.message == "the file has version 2.3, and this dprobes reads versions up to 1.x (at byte 8)"
    assert caught.value.hint == "update dprobes here, or build the file with an older one"
    assert error_of(with_header(SMALL, 8, struct.pack("<HH", 0, 9))) == "expected version 1.x, found 0.9 (at byte 8)"


def test_a_newer_minor_version_is_read_without_the_sections_that_are_new() -> None:
    more = {**sections_of(SMALL), "NEWS": b"what nobody knows yet"}
    assert decode(repacked(more, minor=4)) == decode(SMALL)
    assert error_of(repacked(more)).startswith("expected no section NEWS in version 1.3 (at byte ")


def test_a_newer_instruction_set_is_refused_and_says_what_to_do() -> None:
    sections = sections_of(SMALL)
    assert decode(repacked({**sections, "ISET": struct.pack("<I", instruction_set.VERSION)})) == decode(SMALL)
    with pytest.raises(FormatError) as caught:
        decode(repacked({**sections, "ISET": struct.pack("<I", instruction_set.VERSION + 1)}))
    assert re.fullmatch(
        r"the program is in version 8 of the instruction set, and this dprobes reads versions up to 7 \(at byte \d+\)",
        caught.value.message,
    )
    assert caught.value.hint == "update dprobes here, or build the file with an older one"
    said = error_of(repacked({**sections, "ISET": bytes(4)}))
    assert said.startswith("section ISET: expected a version from 1 on, found 0 (at byte ")


def sections_of_version_1_2() -> dict[str, bytes]:
    sections = sections_of(SMALL)
    assert error_of(repacked(sections, minor=2)).startswith("expected no section COMP in version 1.2 (at byte ")
    del sections["COMP"], sections["TOOL"]
    assert decode(repacked(sections, minor=2)) == decode(SMALL)
    assert error_of(repacked(sections)).startswith("expected a section COMP (companions), found none")
    return sections


def test_version_1_1_has_no_section_with_kernels() -> None:
    sections = sections_of_version_1_2()
    assert error_of(repacked(sections, minor=1)).startswith("expected no section KERN in version 1.1 (at byte ")
    del sections["KERN"]
    assert decode(repacked(sections, minor=1)) == replace(decode(SMALL), kernels=())
    assert error_of(repacked(sections, minor=2)).startswith("expected a section KERN (kernels), found none")


def test_version_1_0_has_no_section_with_the_instruction_set() -> None:
    sections = sections_of_version_1_2()
    del sections["KERN"]
    assert error_of(repacked(sections, minor=0)).startswith("expected no section ISET in version 1.0 (at byte ")
    del sections["ISET"]
    assert decode(repacked(sections, minor=0)) == replace(decode(SMALL), kernels=())
    assert error_of(repacked(sections, minor=1)).startswith("expected a section ISET (the instruction set), found none")


def test_damage_names_the_section() -> None:
    changed = bytearray(SMALL)
    changed[-1] ^= 1
    assert error_of(bytes(changed)).startswith("section TOOL is damaged: expected the CRC-32 ")
    changed = bytearray(SMALL)
    changed[30] ^= 1
    assert error_of(bytes(changed)).startswith("the header is damaged: expected the CRC-32 ")


def rows_of(data: bytes) -> list[tuple[bytes, int, int, int]]:
    (count,) = struct.unpack_from("<I", data, 16)
    return [struct.unpack_from("<4sIII", data, 24 + 16 * n) for n in range(count)]


@pytest.mark.parametrize(
    ("move", "growth", "found"),
    [
        (-4, 0, "found 8 bytes at {less}"),
        (4, 0, "found 8 bytes at {more}"),
        (0, 1 << 31, "found 2147483656 bytes at {start}"),
        (0, -4, None),
    ],
)
def test_a_table_that_lies_is_refused(move: int, growth: int, found: str | None) -> None:
    name, start, size, checksum = rows_of(SMALL)[1]
    changed = struct.pack("<4sIII", name, start + move, size + growth, checksum)
    said = error_of(with_header(SMALL, 40, changed))
    if found is None:
        assert said.startswith("section INFO is damaged")
        return
    found = found.format(start=start, less=start - 4, more=start + 4)
    assert said == f"expected section INFO at byte {start} within {len(SMALL)} bytes, {found} (at byte 40)"


def test_sections_that_are_missing_or_there_twice_are_refused() -> None:
    for name in sections_of(SMALL):
        fewer = {other: data for other, data in sections_of(SMALL).items() if other != name}
        assert error_of(repacked(fewer)).startswith(f"expected a section {name} (")
    assert error_of(with_header(SMALL, 24 + 16, b"STRS")) == "there are two sections STRS (at byte 40)"
    assert error_of(with_header(SMALL, 24, b"\xff\0??")).startswith("expected four letters as the name of a section")


def test_numbers_that_would_fill_memory_are_refused_before_it_is_taken() -> None:
    huge = b"\xfe\xff\xff\xff"
    tracemalloc.start()
    try:
        for name, data in sections_of(SMALL).items():
            for place in range(0, len(data) - 3, 11):
                changed = data[:place] + huge + data[place + 4 :]
                with contextlib.suppress(FormatError):
                    decode(repacked({**sections_of(SMALL), name: changed}))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert (
        error_of(with_header(SMALL, 16, huge))
        == f"expected at most {SECTION_MAX} sections, found 4294967294 (at byte 16)"
    )
    assert (
        error_of(with_header(SMALL, 12, huge))
        == f"expected a size of at most {SIZE_MAX} bytes, found 4294967294 (at byte 12)"
    )


def test_source_lines_far_behind_do_not_fill_memory() -> None:
    lines = b"".join(struct.pack("<IIII", 0, 1, 1 << 20, 0) for _ in range(1000))
    data = repacked({**sections_of(SMALL), "SRCE": struct.pack("<I", 1000) + lines + struct.pack("<I", 0)})
    tracemalloc.start()
    try:
        assert "expected the number of a line from 1 to " in error_of(data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_macros_that_lead_in_a_circle_are_refused() -> None:
    line = struct.pack("<IIIII", 1, 0, 1, 1, 0)
    for body in (0, 1, 7):
        span = struct.pack("<IIIIIII", 1, 0, 1, 1, 0, 0, body)
        data = repacked({**sections_of(SMALL), "SRCE": line + span})
        assert "expected the number of a span for a macro below 0" in error_of(data)
    spans = b"".join(struct.pack("<IIIIII", 0, 1, 1, 0, 0, max(n - 1, 0) if n else 0xFFFFFFFF) for n in range(1000))
    data = repacked({**sections_of(SMALL), "SRCE": line + struct.pack("<I", 1000) + spans})
    assert "the definitions of macros lead nowhere" in error_of(data)


def test_code_that_is_not_the_program_is_refused() -> None:
    sections = sections_of(SMALL)
    at = sections["CODE"].find(bytes.fromhex("4c ff ff ff ff 4c"))  # push -1, in 4-byte words
    assert at > 0
    changed = bytearray(sections["CODE"])
    changed[at + 1] = 0xFE
    assert error_of(repacked({**sections, "CODE": bytes(changed)})).startswith(
        "the code for i386 is not that of the program (at byte "
    )


def test_a_program_that_hides_that_it_writes_is_refused() -> None:
    sections = sections_of(SMALL)
    said = error_of(repacked({**sections, "INFO": sections["INFO"][:4] + bytes(4)}))
    assert said.startswith("section INFO: 'pop mem, u8' is in the program, but the flag 0x1 is not set (at byte ")


@pytest.mark.parametrize("name", ["a b", "../a", "..", ""])
def test_names_in_kernels_that_lead_elsewhere_are_refused(name: str) -> None:
    area, symbol = KernelArea(".text", 0, 8), KernelSymbol("f", 0, "t", "m")
    for kernel, what in (
        (CarriedKernel("1", "p", name or " ", (area,)), "a module"),
        (CarriedKernel("1", "p", "m", (area._replace(name=name),)), "an area"),
        (CarriedKernel("1", "p", "m", (area,), (symbol._replace(name=name),)), "a symbol"),
    ):
        data = encode(Ppdf(decode(SMALL).program, ("x86_64",), needs_write=True, kernels=(kernel,)))
        assert f"section KERN: expected the name of {what} without blanks and slashes, found " in error_of(data)


def test_kernels_that_say_too_little_are_refused() -> None:
    program, area = decode(SMALL).program, KernelArea("_text", 0, 8)
    whole = CarriedKernel("1", "p", "", (area,), (KernelSymbol("f", 0, "1"),))
    for kernels, said in (
        ((CarriedKernel("1", "p", "", ()),), "expected an area, found none"),
        ((CarriedKernel("1", "p", "", (area,)),) * 2, "there are two kernels 1"),
        ((whole,), "expected a letter for the kind of a symbol, found '1'"),
    ):
        data = encode(Ppdf(program, ("x86_64",), needs_write=True, kernels=kernels))
        assert error_of(data).startswith(f"section KERN: {said} (at byte ")


def test_many_labels_and_statements_take_no_more_time_than_their_number() -> None:
    rows = rows_by_syntax()
    labels = {f"l{n}": 0 for n in range(50_000)}
    code = Code((Instruction(rows["jmp <label>"], "l49999"),) * 20_000, labels)
    names = tuple(f"p{n}" for n in range(20_000))
    procedures = tuple(Procedure(name, Code((Instruction(rows["ret"]),))) for name in names)
    program = Program("a", definitions=(ProbeDefinition(Offset(Expression(0)), code),), procedures=procedures)
    ppdf = Ppdf(program, ("x86_64",))
    assert decode(encode(ppdf)) == ppdf


def test_what_the_format_cannot_hold_is_refused() -> None:
    push = rows_by_syntax()["push <value>"]
    for value in (1 << 64, -(1 << 64) - 1):
        code = Code((Instruction(push, Expression(value)),))
        program = Program("a", definitions=(ProbeDefinition(Offset(Expression(0)), code),))
        with pytest.raises(FormatError, match=r"'push .*' cannot be encoded in 8-byte words"):
            encode(Ppdf(program, ("x86_64",)))
    plain = Program("a", definitions=(ProbeDefinition(Offset(Expression(0)), Code()),))
    for machines, shown in (((), "nothing"), (("vax",), "vax")):
        with pytest.raises(FormatError, match=f"a PPDF is for x86_64, i386, aarch64, .*, ppc64, not for {shown}"):
            encode(Ppdf(plain, machines))
    with pytest.raises(FormatError, match="a PPDF holds strings of at most 1048576 bytes, not of 1048577"):
        encode(Ppdf(plain, ("i386",), tool="x" * ((1 << 20) + 1)))
    far = Program("a", definitions=(ProbeDefinition(Offset(Expression(1 << 64)), Code()),))
    with pytest.raises(FormatError, match="has more than 64 bits"):
        encode(Ppdf(far, ("i386",)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "section STRS: expected UTF-8, found something else (at byte "),
        (b"\x1b[2J", r"section STRS: expected no control characters, found '\x1b' (at byte "),
        ("\x9b".encode(), r"section STRS: expected no control characters, found '\x9b' (at byte "),
    ],
)
def test_strings_that_a_terminal_would_obey_are_refused(text: bytes, message: str) -> None:
    sections = sections_of(SMALL)
    strings = sections["STRS"].replace(b"dprobes test"[: len(text)], text, 1)
    assert strings != sections["STRS"]
    assert error_of(repacked({**sections, "STRS": strings})).startswith(message)


def test_names_that_are_no_text_are_not_written() -> None:
    for name in ("a\nb", "\udcff", "\x7f"):
        with pytest.raises(FormatError, match="a PPDF holds names and lines of text only, not "):
            encode(Ppdf(decode(SMALL).program, ("x86_64",), tool=name))
