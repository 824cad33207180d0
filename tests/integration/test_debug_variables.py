"""Names, fields and values by debug information: compared with gdb at random instructions, and printed by engines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from integration.debug_comparison import FLAGS, asked, compare, dprobes
from integration.support import I386_COMPILER, PROGRAMS, Builder

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
LEVELS = ["-O0", "-O1", "-O2", "-O3"]


@pytest.mark.parametrize("level", LEVELS)
def test_values_of_variables_are_those_of_gdb(build: Builder, tmp_path: Path, level: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    is_plain = level == "-O0"
    answers = asked(program, tmp_path, seed=15 + LEVELS.index(level), is_plain=is_plain)
    compare(program, answers, tmp_path, is_plain=is_plain)


def printed(program: Path, text: str, *options: str) -> list[str]:
    """Return what a handler prints for each hit, without time and process."""
    done = dprobes("run", "-e", text, *options, "--", str(program))
    return [line.split("]  ", 1)[1] for line in done.stdout.splitlines() if "]  " in line]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_have_names_and_types_at_the_entry(build: Builder, level: str, engine: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    text = 'many { printf("%d %d %c %u %d %d %d", a, b > 0, c, d, e, g >= 0, h >> 30); }'
    first, *others = printed(program, text, "--engine", engine)
    assert first.split()[0] == "0"
    assert first.split()[2:5] == ["a", "65000", "0"]
    assert [line.split()[-1] for line in (first, *others)] == ["1", "2", "4", "8"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_members_through_pointers_bit_fields_and_unnamed_unions(build: Builder, level: str, engine: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    text = """
    walked(from) {
        printf("%s %d %d %d %d %x %d %d %d", from->name, from->state == FAILED, from->length, from->delta,
               from->at.y, from->high, from->values[4], from->is_last, from->next->next->at.x);
    }
    """
    number = 6
    expected = f"packet-6 0 {number * 37} {number - 25} -6 {~number & 0xFFFFFFFF:x} {4 * number - 300} 0 4"
    assert printed(program, text, "--engine", engine) == [expected, expected]


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_structures_in_registers_have_members(build: Builder, level: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    lines = printed(program, 'distance { printf("%d %d", to.x, to.y); }')
    assert lines == ["3 -3", "4 -4", "5 -5", "6 -6"]


def test_returns_know_the_parameters_of_the_entry_and_the_type_that_is_returned(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    lines = printed(program, 'return make { printf("%d %d %s", retval->at.x, number, name); }')
    assert lines == [f"{n} {n} packet" for n in (3, 4, 5, 6)]


def test_variables_of_the_module_have_their_types(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    values = "calls, table[7], head->name, ::table[0], sizeof(table)"
    text = f'walked when (wanted == BUSY) {{ printf("%d %d %s %d %d", {values}); }}'
    (line,) = printed(program, text)
    calls, *others = line.split()
    assert int(calls) > 1000
    assert others == ["9", "packet-6", "1", "32"]


@pytest.mark.parametrize("engine", ENGINES)
def test_enumerations_are_printed_by_their_names(build: Builder, engine: str) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    text = 'walked { printf("%s %v %8s|%d", from->state, from->next->state, wanted, wanted); }'
    assert printed(program, text, "--engine", engine) == ["IDLE FAILED     BUSY|7", "IDLE FAILED   FAILED|-3"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_a_structure_is_printed_whole(build: Builder, level: str, engine: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    text = 'return make when (number == 4) { printf("made %S, %s", *retval->next, retval->name); }'
    (line,) = printed(program, text, "--engine", engine)
    word = 3 | (~3 & 0xFFFFFFFF) << 32
    assert line == (
        "made {next=0x0, state=IDLE, kind=3, length=111, delta=-22, at={x=3, y=-3}, "
        f'name="packet-3", word={word}, low=3, high={~3 & 0xFFFFFFFF}, '
        "values=[-300, -297, -294, -291, -288], is_last=0}, packet-4"
    )
    (first, *_) = printed(program, 'distance { printf("%S %S", from, to); }', "--engine", engine)
    assert first == "{x=0, y=2} {x=3, y=-3}"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_array_in_a_structure_is_one_field(build: Builder, engine: str) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    text = 'return make when (number == 4) { printf("%S", *retval->next); }'
    done = dprobes("run", "-e", text, "--format", "json", "--engine", engine, "--", str(program))
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    fields = json.loads(line)["fields"]
    assert (fields["values"], fields["name"]) == ([-300, -297, -294, -291, -288], "packet-3")


def test_only_structures_are_printed_whole(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    done = dprobes("run", "-e", 'walked { printf("%S", from); }', "--", str(program), status=2)
    assert done.stderr.startswith("-e:1:23: error: '%S' prints a structure, not 'struct packet *'\n")
    assert done.stderr.endswith("hint: write '*' before it\n")


def refusal(program: Path, text: str) -> list[str]:
    """Return the messages and hints of the errors that a program has."""
    done = dprobes("run", "-e", text, "--", str(program), status=2)
    return [
        line.partition("error: ")[2] or line for line in done.stderr.splitlines() if "error: " in line or "hint" in line
    ]


@pytest.mark.parametrize("engine", [*ENGINES, "inline"])
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_results_that_are_structures_have_members(build: Builder, level: str, engine: str) -> None:
    program = build("results.c", level, *FLAGS, name=f"results{level}")
    text = """
    return pair_of { printf("%d %d", retval.left, retval.right); }
    return mixed_of { printf("%d", retval.whole); }
    return wide_of { printf("%d %d", retval.low, retval.high); }
    return large_of { printf("%d %S", retval.third, retval); }
    return longer_of { printf("%d", retval); }
    """
    expected = ["6 -6", "8", "10 {first=8, second=9, third=10}", "9 -9", "-10000000000"]
    assert printed(program, text, "--engine", engine) == expected


@pytest.mark.parametrize(
    ("function", "errors"),
    [
        ("real_of", ["there is no floating-point arithmetic: this is 'double'", 'hint: its bits are reg("xmm0")']),
        ("small_of", ["there is no floating-point arithmetic: this is 'float'", 'hint: its bits are reg("xmm0")']),
        ("long_of", ["'retval' is not known here: in no register that a handler can read"]),
        ("nothing_of", ["'retval' is not known here: the function returns nothing"]),
    ],
)
def test_results_that_are_no_integers_are_errors(build: Builder, function: str, errors: list[str]) -> None:
    program = build("results.c", "-O2", *FLAGS, name="results-O2")
    assert refusal(program, f'return {function} {{ printf("%d", retval); }}') == errors


@pytest.mark.parametrize("engine", ENGINES)
def test_floating_point_parameters_take_no_place_of_others_without_debug_information(
    build: Builder, tmp_path: Path, engine: str
) -> None:
    program, bare = build("results.c", "-O2", *FLAGS, name="results-O2"), tmp_path / "results"
    subprocess.run(["strip", "-g", "-o", str(bare), str(program)], check=True)
    text = 'beside(int a, double d, float f, int b, long double l) { printf("%d %d", a, b); }'
    assert printed(bare, text, "--engine", engine) == ["1 -4"]
    message = "there is no floating-point arithmetic: this is 'double'"
    assert refusal(bare, 'beside(int a, double d) { printf("%d", d); }') == [message]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_the_compiler_has_left_out_is_an_error(tmp_path: Path, engine: str) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    program = tmp_path / "results"
    words = ["clang", "-O2", *FLAGS, str(PROGRAMS / "results.c"), "-o", str(program)]
    subprocess.run(words, check=True, cwd=tmp_path)
    for handler in ("area", "area(p, unused, k)", "area(struct pair *p, int unused, long k)"):
        text = f'{handler} {{ printf("%d %d", p->left, k); }}'
        assert printed(program, text, "--engine", engine) == ["6 10"]
        error = "'unused' is not known here: optimized out"
        assert refusal(program, f'{handler} {{ printf("%d", unused); }}') == [error]


def test_sizes_and_offsets_of_the_modules_types(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    text = """
    walked(p) when (wanted == BUSY) {
        struct packet *same = (struct packet *)p;
        printf("%d %d %d %d", sizeof(struct packet), offsetof(struct packet, name), sizeof(enum state), same->at.x);
    }
    """
    assert printed(program, text) == ["64 24 4 6"]


def test_what_the_program_declares_wins(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    text = """
    struct packet { long first; int second; };
    walked(struct packet *from, unsigned char wanted) { printf("%d %d", sizeof(*from), wanted); }
    """
    assert printed(program, text) == ["16 7", "16 253"]


def test_a_compiled_program_needs_no_debug_information(build: Builder, tmp_path: Path) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    source, built, bare = tmp_path / "walk.dpc", tmp_path / "walk.ppdf", tmp_path / "variables-O2"
    source.write_text(f'module "{program.name}";\nwalked {{ printf("%s %d", from->name, from->delta); }}\n')
    dprobes("build", str(source), "--for", str(program), "-o", str(built))
    subprocess.run(["strip", "-o", str(bare), str(program)], check=True)
    done = dprobes("run", str(built), "--", str(bare))
    assert [line.split("]  ")[1] for line in done.stdout.splitlines() if "]  " in line] == ["packet-6 -19"] * 2


def test_builds_for_which_a_program_is_not_the_same_are_refused(build: Builder, tmp_path: Path) -> None:
    one = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    changed = tmp_path / "changed.c"
    source = (PROGRAMS / "variables.c").read_text()
    changed.write_text(source.replace("struct packet *next;", "long more; struct packet *next;", 1))
    other = tmp_path / "variables-O2"
    subprocess.run(["gcc", "-O2", *FLAGS, "-o", str(other), str(changed)], check=True)
    program = tmp_path / "walk.dpc"
    program.write_text('module "variables-O2"; walked { printf("%s", from->name); }')
    built = ("build", str(program), "-o", str(tmp_path / "walk.ppdf"))
    done = dprobes(*built, "--for", str(one), "--for", str(other), status=1)
    assert done.stderr == (
        f"dprobes: error: '{program}' becomes another program for '{other}' than for '{one}': "
        "their types or variables differ\nhint: build a file for each of them\n"
    )
    dprobes(*built, "--for", str(one), "--for", str(one))


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_classes_have_the_members_of_their_bases(build: Builder, level: str) -> None:
    program = build("classes.cpp", level, *FLAGS, "-lstdc++", name=f"classes{level}")
    values = "item->price, item->kind, book->pages, book->kind == BIG, book->title"
    assert printed(program, f'shop::total {{ printf("%d %s %d %d %s", {values}); }}') == ["3 BIG 100 1 book"]
    assert printed(program, 'shop::Book::cost { printf("%d %d", this->pages, this->price); }') == ["100 3", "100 3"]


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_objects_with_virtual_functions_and_bases_are_printed_whole(build: Builder, level: str) -> None:
    program = build("classes.cpp", level, *FLAGS, "-lstdc++", name=f"classes{level}")
    (book,) = printed(program, 'shop::total { printf("%S", *book); }')
    assert re.fullmatch(r'\{_vptr\.Item=0x[0-9a-f]+, price=3, kind=BIG, pages=100, title="book"\}', book)
    (copy,) = printed(program, 'shop::number { printf("%S", *copy); }')
    assert re.fullmatch(r"\{Item=\.\.\., _vptr\.Copy=0x[0-9a-f]+, number=4\}", copy)


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_programs_of_32_bits(build: Builder, level: str) -> None:
    if shutil.which(I386_COMPILER) is None:
        pytest.skip(f"{I386_COMPILER} is not installed")
    program = build("variables.c", level, *FLAGS, i386=True, name=f"variables32{level}")
    lines = printed(program, 'distance { printf("%d %d %d", from.y, to.x, to.y); }')
    assert lines == ["2 3 -3", "2 4 -4", "2 5 -5", "2 6 -6"]
    (line, *_) = printed(program, 'walked { printf("%s %d %S", from->name, sizeof(*from), *from); }')
    assert line.startswith("packet-6 56 {next=0x")
    assert ', name="packet-6", word=..., low=6, high=4294967289, ' in line
