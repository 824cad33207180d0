"""What BTF says of types is what DWARF says of them, for the same source; damaged BTF ends in an error."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.dpc.modules.debug_scope import NameScope, ScopedTypes
from dprobes.dpc.modules.debug_values import DebugTypes
from dprobes.dpc.modules.kernel_module import BtfModule, BtfTypes
from dprobes.dpc.typedtree.name_scope import NotKnownError
from dprobes.dpc.types.c_types import Array, Enumeration, Integer, Pointer, Record, size_of
from dprobes.dwarf.debug_file import debug_file_of
from dprobes.errors import FormatError, TargetError
from dprobes.target.btf import Btf
from dprobes.target.elf.elf_file import ElfFile

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.dpc.types.c_types import CType

# gcc 12 writes the dimensions of arrays of arrays in the wrong order: here they are equal.
SOURCE = """
enum color { RED, GREEN = 5, BLUE };
typedef unsigned long size_type;
typedef struct node { struct node *next; const char *name; enum color color; } node_t;
union value { long number; double real; unsigned char bytes[12]; };
struct flags { unsigned low : 3, : 2, middle : 9; unsigned long long high : 40; signed char sign : 4; };
struct outer {
    _Bool is_set; char letter; signed char small; unsigned char octet; short half; unsigned short uhalf;
    int word; unsigned uword; long wide; unsigned long uwide; long long longer; unsigned long long ulonger;
    float ratio; struct flags flags; union value value; node_t nodes[3]; int grid[3][3]; size_type size;
    struct { int inside; union { int left; unsigned right; }; };
    struct unknown *unknown; void *any; int (*call)(int); volatile const int *watched; struct node **links; long rest[];
};
struct outer *first;
int length;
node_t *function(struct outer *outer, enum color color, struct flags by_value, long *last)
{
    return color == RED ? &outer->nodes[by_value.low] : &outer->nodes[*last];
}
"""


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> tuple[Btf, ScopedTypes]:
    directory = tmp_path_factory.mktemp("types")
    (directory / "types.c").write_text(SOURCE)
    for option, name in (("-gbtf", "btf.o"), ("-g", "dwarf.so")):
        command = ["gcc", "-c"] if name.endswith(".o") else ["gcc", "-shared", "-fPIC"]
        subprocess.run([*command, option, "types.c", "-o", name], cwd=directory, check=True)
    section = ["objcopy", "-O", "binary", "--only-section=.BTF", "--set-section-flags", ".BTF=alloc", "btf.o", "btf"]
    subprocess.run(section, cwd=directory, check=True)
    debug = debug_file_of(ElfFile.open(directory / "dwarf.so"))
    assert debug is not None
    return Btf((directory / "btf").read_bytes()), ScopedTypes(DebugTypes(debug, 8).of, NameScope(debug))


def btf_types(btf: Btf) -> BtfTypes:
    return BtfTypes(btf, lambda _kind, _tag: None)


def described(type_: CType | None, depth: int = 0) -> object:
    """Return all that matters of a type, down to some depth."""
    match type_:
        case Record():
            members = [] if depth > 3 else [
                (m.name, m.offset, m.bits, m.shift, described(m.type, depth + 1)) for m in type_.members or ()
            ]  # fmt: skip
            return type_.is_union, type_.tag, type_.size, members
        case Pointer(target):
            return "pointer", described(target, depth + 1)
        case Array(element, count):
            return "array", count, described(element, depth + 1)
        case Enumeration():
            return type_.tag, type_.values, size_of(type_.base)
        case Integer():
            return type_.size, type_.is_signed, type_.rank
    return str(type_)


@pytest.mark.parametrize(
    ("kind", "tag"),
    [("struct", "outer"), ("struct", "node"), ("struct", "flags"), ("union", "value"), ("enum", "color")],
)
def test_types_with_tags_are_those_of_dwarf(types: tuple[Btf, ScopedTypes], kind: str, tag: str) -> None:
    btf, dwarf = types
    expected = described(dwarf.tagged(kind, tag))
    assert described(btf_types(btf).tagged(kind, tag)) == expected
    assert expected is not None


@pytest.mark.parametrize("name", ["size_type", "node_t", "unsigned int", "nothing"])
def test_types_with_names_are_those_of_dwarf(types: tuple[Btf, ScopedTypes], name: str) -> None:
    btf, dwarf = types
    assert described(btf_types(btf).named(name)) == described(dwarf.named(name))


def test_what_the_program_declares_comes_first(types: tuple[Btf, ScopedTypes]) -> None:
    ours = Record("node")
    found = BtfTypes(types[0], lambda kind, tag: ours if (kind, tag) == ("struct", "node") else None)
    assert found.tagged("struct", "node") is ours
    outer = found.tagged("struct", "outer")
    assert isinstance(outer, Record)
    nodes = outer.member("nodes")
    assert nodes is not None
    assert isinstance(nodes.type, Array)
    assert nodes.type.element is ours


def test_functions_have_parameters_and_results(types: tuple[Btf, ScopedTypes]) -> None:
    names = BtfModule(lambda: types[0]).names_at("function", at_return=False)
    assert [str(names.parameter_type(number)) for number in (0, 1, 2, 3, 4)] == [
        "struct outer *", "enum color", "None", "long *", "None",
    ]  # fmt: skip
    returned = names.returned()
    assert returned is not None
    assert str(returned.type) == "struct node *"
    last = names.named_parameter("last")
    assert last is not None
    assert "arg3" in str(last.value)
    assert names.named_parameter("by_value") is None
    green = names.elsewhere("GREEN")
    assert green is not None
    assert "5" in str(green.value)
    assert names.was_asked


def test_names_of_what_is_not_there(types: tuple[Btf, ScopedTypes]) -> None:
    module = BtfModule(lambda: types[0])
    for place in ("nothing", "function+4", None):
        names = module.names_at(place, at_return=True)
        assert names.parameter_type(0) is None
        assert names.returned() is None
    none = BtfModule(lambda: None)
    assert none.types is None
    assert none.names_at("function", at_return=False).elsewhere("outer") is None


def test_of_types_with_one_name_that_of_a_parameter_is_meant(tmp_path: Path) -> None:
    source = (
        "int first(struct same { int a; } *p) { return p->a; }\n"
        "int second(struct same { long a, b; } *p) { return p->b; }\n"
        "int third(int n) { return n; }\n"
    )
    (tmp_path / "same.c").write_text(source)
    subprocess.run(["gcc", "-gbtf", "-w", "-c", "same.c"], check=True, cwd=tmp_path)
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.BTF", "--set-section-flags", ".BTF=alloc", "same.o",
                    "btf"], check=True, cwd=tmp_path)  # fmt: skip
    module = BtfModule(lambda: Btf((tmp_path / "btf").read_bytes()))
    for function, size in (("first", 4), ("second", 16)):
        types = module.names_at(function, at_return=False).types
        assert types is not None
        found = types.tagged("struct", "same")
        assert found is not None
        assert size_of(found) == size
    types = module.names_at("third", at_return=False).types
    assert types is not None
    with pytest.raises(TargetError) as caught:
        types.tagged("struct", "same")
    assert caught.value.message == "the kernel has 2 types 'struct same', of 16, 4 bytes"
    assert caught.value.hint == "a parameter or member of it means its own; or declare the intended one"


def test_damaged_btf_ends_in_an_error(types: tuple[Btf, ScopedTypes]) -> None:
    data, random, damaged = bytes(types[0]._data), Random(15), 0
    for _ in range(500):
        mutated = bytearray(data)
        for _ in range(random.randrange(1, 8)):
            mutated[random.randrange(24, len(data))] = random.choice((0, 1, 0xFF, random.randrange(256)))
        try:
            btf = Btf(bytes(mutated))
            for tag in ("outer", "node", "flags"):
                described(btf_types(btf).tagged("struct", tag))
            names = BtfModule(lambda btf=btf: btf).names_at("function", at_return=False)  # type: ignore[misc]
            assert names.parameter_type(9) is None
            with suppress(NotKnownError):  # it returns nothing, or that is nowhere
                if (returned := names.returned()) is not None:
                    described(returned.type)
        except (TargetError, FormatError):
            damaged += 1
    assert damaged >= 10
