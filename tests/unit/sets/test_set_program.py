"""The program of a set: its macros and places, and the comparison with what the set promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dprobes.api.compiled_program import load_program
from dprobes.diagnostics import Diagnostics
from dprobes.errors import TargetError
from dprobes.formatters.templates.template_collection import templates_of
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.sets.set_library import load_set
from dprobes.sets.set_program import (
    PlaceFit,
    broken_promises,
    fits_of_modules,
    fits_of_places,
    set_source,
    with_probe_names,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """[set]
name = "heap"
major = 200
version = 1
summary = "a sample"

[modules]
LIBC = ["libnowhere.so.9", "libc.so.6"]

[places]
ALLOCATION = ["usdt LIBC:libc:nothing(size)", "LIBC:no_such_function(size)", "LIBC:malloc(unsigned size)"]

[[probe]]
name = "heap.block.allocate"
summary = "a block is allocated"
file = "heap.dpc"
minor = 3
group = "memory"
type = "begin"
engines = ["ebpf"]
fields = ["size:int"]
"""
PROGRAM = '[group "memory", type "begin", minor 3] ALLOCATION { printf("%u", size); }\n'


def made(directory: Path, program: str = PROGRAM, text: str = TEXT) -> Path:
    directory /= "heap"
    directory.mkdir(mode=0o755)
    for name, content in (("set.toml", text), ("heap.dpc", program)):
        (directory / name).write_text(content)
        (directory / name).chmod(0o644)
    return directory / "set.toml"


def promises(path: Path) -> str:
    loaded = load_program(path, CompileOptions())
    diagnostics = Diagnostics()
    broken_promises(load_set(path), loaded.programs, templates_of(loaded.templates), diagnostics)
    return "\n".join(each.message for each in diagnostics)


def test_the_first_module_and_place_that_fit_are_used(tmp_path: Path) -> None:
    path = made(tmp_path)
    source, options, names = set_source(path, CompileOptions(defines=(("OTHER", "1"),)))
    assert source.text == f'module "libc.so.6", major 200;\n#include "{path.parent}/heap.dpc"\n'
    assert options.defines == (("OTHER", "1"), ("LIBC", '"libc.so.6"'), ("ALLOCATION", "LIBC:malloc(unsigned size)"))
    (program,) = load_program(path, CompileOptions()).programs
    (definition,) = program.definitions
    assert (program.name, program.major, definition.minor) == ("libc.so.6", 200, 3)
    assert names == {3: "heap.block.allocate"}


def test_templates_have_the_names_of_probes(tmp_path: Path) -> None:
    loaded = load_program(made(tmp_path), CompileOptions())
    template = templates_of(loaded.templates).find(200, 3)
    assert template is not None
    assert template.probe == "heap.block.allocate"
    assert with_probe_names('minor = 3\nfmt = "minor = 4"\n\nminor = 4\nfmt = "x"\n', {4: "a.b.c"}) == (
        'minor = 3\nfmt = "minor = 4"\n\nminor = 4\nprobe = "a.b.c"\nfmt = "x"\n'
    )


VIEWS = """
[[view]]
name = "sizes"
question = "which sizes are there?"
file = "sizes.dpc"

[[view]]
name = "largest"
question = "which are the largest blocks?"
sql = "select max(size) from heap_block_allocate"
"""


def test_a_view_has_the_macros_of_its_set_and_the_next_major_code(tmp_path: Path) -> None:
    path = made(tmp_path, text=TEXT + VIEWS)
    (path.parent / "sizes.dpc").write_text('ALLOCATION { printf("%u", size); @ = count() }\n')
    (path.parent / "sizes.dpc").chmod(0o644)
    source, _, names = set_source(path / "sizes", CompileOptions())
    assert source.text == f'module "libc.so.6", major 201;\n#include "{path.parent}/sizes.dpc"\n'
    assert names == {}
    loaded = load_program(path / "sizes", CompileOptions())
    assert [program.major for program in loaded.programs] == [201]
    template = templates_of(loaded.templates).find(201, loaded.program.definitions[0].minor)
    assert template is not None
    assert template.probe == ""
    with pytest.raises(TargetError, match=r"^'heap/largest' is a query in SQL, which needs a trace file$") as raised:
        set_source(path / "largest", CompileOptions())
    assert raised.value.hint == ("record with 'dprobes run heap -o FILE.dpt', then 'dprobes sql FILE.dpt heap/largest'")
    with pytest.raises(TargetError, match=r"^the set 'heap' has no view 'other'$"):
        set_source(path / "other", CompileOptions())


def test_macros_of_the_user_take_precedence(tmp_path: Path) -> None:
    given = (("LIBC", "/lib/mine.so"), ("ALLOCATION", "LIBC:calloc"))
    source, options, _ = set_source(made(tmp_path), CompileOptions(defines=given))
    assert options.defines == given
    assert source.text.startswith("module /lib/mine.so, major 200;\n")


def test_alternatives_have_the_reason_for_which_they_do_not_fit(tmp_path: Path) -> None:
    found = load_set(made(tmp_path))
    assert fits_of_modules(found) == [
        PlaceFit("LIBC", "libnowhere.so.9", "it is not on this machine"),
        PlaceFit("LIBC", "libc.so.6", None),
    ]
    first, second, third = fits_of_places(found, CompileOptions())
    assert first.problem is not None
    assert "has no USDT probe" in first.problem
    assert second.problem is not None
    assert "no_such_function" in second.problem
    assert third == PlaceFit("ALLOCATION", "LIBC:malloc(unsigned size)", None)


def test_without_a_module_no_place_fits(tmp_path: Path) -> None:
    path = made(tmp_path, text=TEXT.replace(', "libc.so.6"', ""))
    assert {each.problem for each in fits_of_places(load_set(path), CompileOptions())} == {
        "there is no module 'libnowhere.so.9'"
    }


def test_kept_promises(tmp_path: Path) -> None:
    assert promises(made(tmp_path)) == ""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('group "memory", ', "", "'heap.block.allocate' is promised in the group 'memory', and has no group"),
        (
            'group "memory"',
            'group "io"',
            "'heap.block.allocate' is promised in the group 'memory', and has the group 'io'",
        ),
        ('type "begin", ', "", "'heap.block.allocate' is promised with the type 'begin', and has no type"),
        (
            'type "begin"',
            'type "end"',
            "'heap.block.allocate' is promised with the type 'begin', and has the type 'end'",
        ),
        ("%u", "%p", "'heap.block.allocate' is promised with the fields 'size:int', and has 'size:address'"),
        ("size)", "size + 1)", "'heap.block.allocate' is promised with the fields 'size:int', and has 'value:int'"),
        (
            'printf("%u", size)',
            "return",
            "'heap.block.allocate' is promised with the fields 'size:int', and has 'none'",
        ),
        (
            "minor 3",
            "minor 4",
            (
                "no probe of the program has the minor code 3 of 'heap.block.allocate'\n"
                "the set 'heap' does not promise its probe with the minor code 4"
            ),
        ),
    ],
)
def test_broken_promises(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PROGRAM
    assert promises(made(tmp_path, PROGRAM.replace(old, new))) == message
