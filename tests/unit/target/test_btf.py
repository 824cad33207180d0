"""BTF as gcc writes it, malformed BTF, and the encoder read by the parser."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess

import pytest

from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import Btf, Kind, encode_functions

SOURCE = """
#include <stddef.h>
struct inner { short a; int counter; };
typedef const volatile struct inner inner_t;
struct outer {
    char c;
    struct { long pad; union { int x; struct { int y1, y2; }; }; };
    inner_t in;
    unsigned b1 : 3, b2 : 8;
    struct outer *next;
    int list[3];
};
enum color { RED, GREEN = -5 };
enum wide { BIG = 0x123456789abLL };
float f; struct outer o; enum color e; enum wide w;
int function(struct outer *p, enum color c) { return p->in.counter + c; }
const unsigned long offsets[] = { %s };
"""
PATHS = ("c", "pad", "x", "y1", "y2", "in", "in.a", "in.counter", "next", "list")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Btf, dict[str, int]]:
    """Return the BTF of SOURCE, and the offsets of PATHS as gcc sees them."""
    if shutil.which("gcc") is None or shutil.which("objcopy") is None:
        pytest.skip("gcc and objcopy are not installed")
    directory = tmp_path_factory.mktemp("btf")
    source, object_file = directory / "x.c", directory / "x.o"
    source.write_text(SOURCE % ", ".join(f"offsetof(struct outer, {path})" for path in PATHS))
    subprocess.run(["gcc", "-gbtf", "-c", "-o", object_file, source], check=True)

    def section(name: str) -> bytes:
        output = directory / "section"
        command = ["objcopy", "-O", "binary", f"--only-section={name}", "--set-section-flags", f"{name}=alloc"]
        subprocess.run([*command, object_file, output], check=True)
        return output.read_bytes()

    offsets = struct.unpack(f"={len(PATHS)}Q", section(".rodata")[-8 * len(PATHS) :])
    return Btf(section(".BTF")), dict(zip(PATHS, offsets, strict=True))


def test_members_lie_where_the_compiler_puts_them(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, offsets = compiled
    assert {path: btf.member_offset("outer", path) for path in PATHS} == offsets


def test_a_bit_field_that_begins_within_a_byte_has_no_offset(compiled: tuple[Btf, dict[str, int]]) -> None:
    with pytest.raises(TargetError, match=re.escape("the member 'b2' of the kernel's 'struct outer' is a bit field")):
        compiled[0].member_offset("outer", "b2")


@pytest.mark.parametrize("path", ["y3", "in.x", "next.c"])
def test_a_member_that_is_not_there_is_named(compiled: tuple[Btf, dict[str, int]], path: str) -> None:
    with pytest.raises(TargetError, match=re.escape(f"the kernel's 'struct outer' has no member '{path}'")):
        compiled[0].member_offset("outer", path)


def test_a_name_is_found_only_with_its_kind(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, _ = compiled
    assert btf.find(Kind.ENUM, "color") > 0
    assert btf.find(Kind.TYPEDEF, "inner_t") != btf.find(Kind.STRUCT, "inner")
    with pytest.raises(TargetError, match=r"^the kernel's type information has no STRUCT 'color'$"):
        btf.find(Kind.STRUCT, "color")
    with pytest.raises(TargetError, match=r"^the kernel's type information has no FUNC 'nner'$"):
        btf.find(Kind.FUNC, "nner")


def test_functions_are_numbered_as_the_encoder_says() -> None:
    blob, numbers = encode_functions(["main", "callback"])
    btf = Btf(blob)
    assert numbers == (btf.find(Kind.FUNC, "main"), btf.find(Kind.FUNC, "callback"))
    assert btf.find(Kind.INT, "unsigned long long") == 1


def test_other_bytes_are_no_btf() -> None:
    with pytest.raises(FormatError, match=r"^BTF has a header of 24 bytes, here are 3$"):
        Btf(b"abc")
    with pytest.raises(FormatError, match=r"^BTF begins with 0xeb9f and version 1, not 0x4141 and 65 \(at byte 0\)$"):
        Btf(b"A" * 24)


def test_a_section_beyond_the_end_is_refused() -> None:
    blob, _ = encode_functions(["main"])
    with pytest.raises(FormatError, match=r"^the sections of BTF are outside its data$"):
        Btf(blob[:-1])


def test_a_kind_of_the_future_is_refused() -> None:
    blob, _ = encode_functions(["main"])
    changed = bytearray(blob)
    changed[24 + 16 + 7] = 30  # the kind of the second type, behind the header and an INT of four words
    with pytest.raises(FormatError, match=r"^a type of BTF has the kind 30, which is unknown \(at byte 40\)$"):
        Btf(bytes(changed)).find(Kind.FUNC, "main")


def test_types_behind_what_is_asked_for_are_not_looked_at() -> None:
    blob, numbers = encode_functions(["first", "second", "third"])
    assert Btf(blob).name(numbers[2]) == "third"
    changed = bytearray(blob)
    changed[24 + 16 + 12 + 12 + 7] = 30  # the second function is behind an INT, a FUNC_PROTO and the first one
    btf = Btf(bytes(changed))
    assert btf.find(Kind.FUNC, "first") == numbers[0]
    for _ in range(2):
        with pytest.raises(FormatError, match="has the kind 30, which is unknown"):
            btf.find(Kind.FUNC, "second")
        with pytest.raises(FormatError, match="has the kind 30, which is unknown"):
            btf.kind(numbers[2])
    assert btf.find(Kind.FUNC, "first") == numbers[0]


def test_types_are_taken_apart(compiled: tuple[Btf, dict[str, int]]) -> None:
    btf, offsets = compiled
    outer = btf.find(Kind.STRUCT, "outer")
    members = {name: (type_, first, width) for name, type_, first, width in btf.members(outer)}
    assert list(members) == ["c", "", "in", "b1", "b2", "next", "list"]
    assert {members[name][1] // 8 for name in ("c", "in", "next", "list")} == {
        offsets[name] for name in ("c", "in", "next", "list")
    }
    assert (members["b1"][2], members["b2"][2]) == (3, 8)
    assert members["b2"][1] == members["b1"][1] + 3
    assert btf.target(outer) == offsets["list"] + 3 * 4 + 4
    element, count = btf.array(members["list"][0])
    assert (btf.name(element), count) == ("int", 3)
    assert btf.kind(members["next"][0]) is Kind.PTR
    assert btf.target(members["next"][0]) == outer
    assert btf.name(btf.result("function")) == "int"


def encoded(kind: Kind, is_signed: bool, *values: tuple[str, int]) -> Btf:
    """Return BTF of one enumeration; gcc 12 knows neither signs nor 64 bits of them."""
    is_wide = kind is Kind.ENUM64
    strings = bytearray(b"\0wide\0")
    types = bytearray(struct.pack("<III", 1, is_signed << 31 | kind << 24 | len(values), 8))
    for name, value in values:
        types += struct.pack("<II", len(strings), value & 0xFFFFFFFF)
        types += struct.pack("<I", value >> 32 & 0xFFFFFFFF) if is_wide else b""
        strings += name.encode() + b"\0"
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return Btf(bytes(header + types + strings))


@pytest.mark.parametrize("kind", [Kind.ENUM, Kind.ENUM64])
@pytest.mark.parametrize("is_signed", [False, True])
def test_enumerators_have_their_values(kind: Kind, is_signed: bool) -> None:
    values = {"RED": 0, "BLUE": -5 if is_signed else 0xFFFFFFFB, "BIG": 0x123456789AB if kind is Kind.ENUM64 else 7}
    btf = encoded(kind, is_signed, *values.items())
    assert dict(btf.enumerators(1)) == values
    assert {name: btf.enumerator(name) for name in values} == values
    assert btf.enumerator("wide") is None
    assert btf.enumerator("nothing") is None


def btf_of(*types: tuple[int, ...]) -> Btf:
    """Return BTF with types of these words; the string at 1 is ``a``."""
    words = [word for each in types for word in each]
    strings = b"\0a\0"
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, 4 * len(words), 4 * len(words), len(strings))
    return Btf(header + struct.pack(f"<{len(words)}I", *words) + strings)


@pytest.mark.parametrize("kind", [Kind.TYPEDEF, Kind.CONST])
def test_types_that_lead_to_themselves_are_refused(kind: Kind) -> None:
    btf = btf_of((1, kind << 24, 2), (1, kind << 24, 1))
    with pytest.raises(FormatError, match=r"^type [12] of BTF is one of a row that does not end$"):
        btf.value_type(1)


def test_pointers_that_lead_to_themselves_have_no_name() -> None:
    with pytest.raises(FormatError, match=r"^type 1 of BTF is one of a row that does not end$"):
        btf_of((0, Kind.PTR << 24, 1)).type_name(1)


def test_members_without_a_name_are_searched_once_each() -> None:
    levels = [(0, Kind.STRUCT << 24 | 2, 8, 0, number + 2, 0, 0, number + 2, 0) for number in range(60)]
    btf = btf_of(*levels, (1, Kind.INT << 24, 4, 32))
    assert btf.member(1, "missing") is None


def test_a_type_that_is_not_there_is_refused() -> None:
    btf = btf_of((1, Kind.INT << 24, 4, 32))
    for known, number in ((0, 0), (1, 2)):
        with pytest.raises(FormatError, match=rf"^BTF has {known} types, and none with the number {number}$"):
            btf.name(number)


def test_a_type_that_ends_behind_the_others_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^a type of BTF ends after the other types \(at byte 24\)$"):
        btf_of((1, Kind.STRUCT << 24 | 5, 4)).name(1)


def test_a_name_outside_the_strings_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^a name of BTF does not end within 1024 bytes \(at byte 140\)$"):
        btf_of((100, Kind.INT << 24, 4, 32)).name(1)
