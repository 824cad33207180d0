"""Names, fields and values by debug information: compared with gdb at random instructions, and printed by engines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from dprobes.dpc.ctype import Record
from dprobes.dpc.latenames import DescribedModule, LateNames
from dprobes.dpc.scattered import NotKnownError, Scattered
from dprobes.target.elf.file import ElfFile
from integration.support import I386_COMPILER, PROGRAMS, TIMEOUT, Builder

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ["ptrace", pytest.param("ebpf", marks=pytest.mark.skipif(os.geteuid() != 0, reason="ebpf needs root"))]
FUNCTIONS = ["distance", "folded", "make", "sorted", "hashed", "many", "walked", "recursive", "main"]
PLACES = 100
"""Instructions of each program at which all variables are compared: some 450 values."""

LEVELS = ["-O0", "-O1", "-O2", "-O3"]
OUTSIDE = "outside of its block"
"""gdb takes a block of several ranges for one from the first to the last instruction."""

FLAGS = ("-no-pie", "-fno-pie", "-g")

GDB = """
import gdb, json, random

chance = random.Random({seed})
functions, count, output = {functions}, {count}, {output!r}
for setting in ("pagination off", "confirm off", "debuginfod enabled off"):
    gdb.execute("set " + setting)
gdb.execute("break main", to_string=True)
gdb.execute("run", to_string=True)
gdb.execute("delete")
start = gdb.selected_frame().pc()
architecture = gdb.selected_frame().architecture()
places = {{}}
for name in functions:
    symbol = gdb.lookup_global_symbol(name) or gdb.lookup_static_symbol(name)
    if symbol is None:
        continue
    first = int(symbol.value().address)
    block = gdb.block_for_pc(first)
    while block.function is None or str(block.function) != name:
        block = block.superblock
    for instruction in architecture.disassemble(block.start, block.end - 1):
        if name != "main" or instruction["addr"] > start:
            places[instruction["addr"]] = (name, first)
for address in chance.sample(sorted(places), min(count, len(places))):
    gdb.execute(f"tbreak *{{address:#x}}", to_string=True)

def number(value):
    type_ = value.type.strip_typedefs()
    if type_.code in (gdb.TYPE_CODE_INT, gdb.TYPE_CODE_ENUM, gdb.TYPE_CODE_BOOL, gdb.TYPE_CODE_CHAR):
        return int(value)
    return int(value) & (1 << 64) - 1 if type_.code == gdb.TYPE_CODE_PTR else None

def rows(symbol, frame):
    try:
        value = symbol.value(frame)
        if value.is_optimized_out:
            yield symbol.name, None
            return
        type_ = value.type.strip_typedefs()
        if type_.code not in (gdb.TYPE_CODE_STRUCT, gdb.TYPE_CODE_UNION):
            yield symbol.name, number(value)
            return
        for field in type_.fields():
            yield f"{{symbol.name}}.{{field.name}}", None if value[field].is_optimized_out else number(value[field])
    except gdb.error:
        yield symbol.name, None

found = []
while True:
    gdb.execute("continue", to_string=True)
    try:
        frame = gdb.newest_frame()
    except gdb.error:
        break
    pc = frame.pc()
    line = frame.find_sal().line
    block = frame.block()
    while frame.type() == gdb.INLINE_FRAME:
        frame = frame.older()
    seen = set()
    while block is not None and not block.is_global and not block.is_static:
        for symbol in block:
            if (symbol.is_argument or symbol.is_variable) and symbol.name not in seen:
                seen.add(symbol.name)
                if {is_plain} and not symbol.is_argument and line <= symbol.line:
                    continue  # nobody has written to it yet: it is what was on the stack
                found += [(pc, places[pc][1], name, value) for name, value in rows(symbol, frame)]
        if block.function is not None and str(block.function) == places[pc][0]:
            break
        block = block.superblock
with open(output, "w") as file:
    json.dump(found, file)
"""


def asked(program: Path, directory: Path, seed: int) -> list[tuple[int, int, str, int | None]]:
    """Return link address, start of the function, name, and value of each variable, as gdb has them."""
    if shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    script, output = directory / "ask.py", directory / "answers.json"
    script.write_text(
        GDB.format(seed=seed, functions=FUNCTIONS, count=PLACES, output=str(output), is_plain="-O0" in program.name)
    )
    done = subprocess.run(
        ["gdb", "-q", "-batch", "-nx", "-x", str(script), str(program)],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert output.exists(), done.stderr
    return [tuple(row) for row in json.loads(output.read_text())]


class Comparison:
    """What a program for all variables is made of, and why others are not in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module = DescribedModule(ElfFile.open(path))
        self.reasons: Counter[str] = Counter()
        self.strange: list[tuple[Any, ...]] = []
        self.wanted: dict[int, list[tuple[str, int]]] = {}

    def add(self, address: int, start: int, name: str, value: int | None) -> None:
        """Take a variable of gdb's into the program, if it is known to us as well."""
        offset = self.module.elf.file_offset(address)
        assert offset is not None
        names = LateNames(self.module, hex(offset), at_return=False)
        if "O0" in self.path.name and address < self._prologue_end(start):
            self.reasons["before the variables are where gdb looks"] += 1
            return
        known = self._is_known(names, name)
        if known is None and value is None:
            self.reasons["nowhere"] += 1
        elif known is None and value is not None:
            self.wanted.setdefault(offset, []).append((name, value))
            return
        elif known is None:
            self.strange.append((hex(address), name, "gdb has no value"))
        elif value is not None:
            self.reasons[known] += 1

    def _prologue_end(self, start: int) -> int:
        names = LateNames(self.module, hex(self.module.elf.file_offset(start) or 0), at_return=False)
        function = names._names._function  # type: ignore[union-attr]
        return self.module.prologue_end(function, start)

    def _is_known(self, names: LateNames, name: str) -> str | None:
        """Return None if a variable has a value for us, else why not."""
        whole, _, member = name.partition(".")
        try:
            found = names.find(whole)
            if found is None:
                return OUTSIDE
            if member and isinstance(found.value, Scattered) and isinstance(found.type, Record):
                place = found.type.member(member)
                assert place is not None
                names.member_of(found.value, place)
        except NotKnownError as error:
            return error.reason
        return None

    def text(self) -> str:
        lines = [f'module "{self.path}";']
        for offset, rows in self.wanted.items():
            values = ", ".join(f"(long)({name})" for name, _ in rows)
            lines.append(f'{offset:#x} {{ printf("at {offset}{" %d" * len(rows)}", {values}); }}')
        return "\n".join(lines)


def _is_of_stack(value: int) -> bool:
    return value >> 40 == 0x7F


@pytest.mark.parametrize("level", LEVELS)
def test_values_of_variables_are_those_of_gdb(build: Builder, tmp_path: Path, level: str) -> None:
    program = build("variables.c", level, *FLAGS, name=f"variables{level}")
    comparison = Comparison(program)
    for address, start, name, value in asked(program, tmp_path, seed=15 + LEVELS.index(level)):
        comparison.add(address, start, name, value)
    source = tmp_path / "all.dpc"
    source.write_text(comparison.text())
    # Without randomization of addresses, as gdb runs it.
    done = dprobes("run", str(source), "--engine", "ptrace", "--", "setarch", "-R", str(program))
    first: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        if "  at " in line:
            place, *values = line.split("  at ")[1].split()
            first.setdefault(int(place), values)
    equal = elsewhere = 0
    different = []
    for offset, rows in comparison.wanted.items():
        for (name, expected), printed in zip(rows, first[offset], strict=True):
            if int(printed) & (1 << 64) - 1 == expected & (1 << 64) - 1:
                equal += 1
            elif _is_of_stack(int(printed)) and _is_of_stack(expected):
                elsewhere += 1  # the environment is larger
            else:
                different.append((hex(offset), name, expected, printed))
    assert different == []
    assert comparison.strange == []
    assert equal >= 250, comparison.reasons
    assert elsewhere < 20
    # gdb follows calls to their sites; statically that cannot be done.
    reasons = {"before the variables are where gdb looks", "nowhere", "known only at the entry of the function",
               "in a register that is not for integers", OUTSIDE}  # fmt: skip
    assert set(comparison.reasons) <= reasons


def dprobes(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "dprobes", *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == status, done.stderr
    return done


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


def test_only_structures_are_printed_whole(build: Builder) -> None:
    program = build("variables.c", "-O2", *FLAGS, name="variables-O2")
    done = dprobes("run", "-e", 'walked { printf("%S", from); }', "--", str(program), status=2)
    assert done.stderr.startswith("-e:1:23: error: '%S' prints a structure, not 'struct packet *'\n")
    assert done.stderr.endswith("hint: write '*' before it\n")


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
def test_programs_of_32_bits(build: Builder, level: str) -> None:
    if shutil.which(I386_COMPILER) is None:
        pytest.skip(f"{I386_COMPILER} is not installed")
    program = build("variables.c", level, *FLAGS, i386=True, name=f"variables32{level}")
    lines = printed(program, 'distance { printf("%d %d %d", from.y, to.x, to.y); }')
    assert lines == ["2 3 -3", "2 4 -4", "2 5 -5", "2 6 -6"]
    (line, *_) = printed(program, 'walked { printf("%s %d %S", from->name, sizeof(*from), *from); }')
    assert line.startswith("packet-6 56 {next=0x")
    assert ', name="packet-6", word=..., low=6, high=4294967289, ' in line
