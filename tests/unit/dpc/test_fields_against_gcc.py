"""Bit fields that are written: random structures and assignments leave the memory, and have the values, of gcc's."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.fake_context import FakeContext
from dprobes.preprocessor import preprocess
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile
from dprobes.testing import run_handler
from unit.dpc.test_against_gcc import ROUNDS, TYPES, results_of_gcc, shown

if TYPE_CHECKING:
    from pathlib import Path

    from dprobes.rpn.rpn_program import Program

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

COUNT = 40
"""Structures in a round."""

WORDS = 4
"""Of 64 bits: the memory of a structure."""

ADDRESS = 0x1000
WIDE = ("long long", "unsigned long long", "long long", "unsigned long long", *TYPES)
WIDTHS = {"char": 8, "short": 16, "int": 32, "long": 32, "long long": 64}


def structure(choose: random.Random, number: int) -> tuple[str, list[str]]:
    """Return a structure of bit fields, and their names."""
    members, names = [], []
    for position in range(choose.randrange(1, 5)):
        type_ = choose.choice(WIDE)
        width = choose.randrange(1, WIDTHS[type_.removeprefix("unsigned ").removeprefix("signed ")] + 1)
        members.append(f"{type_} m{position} : {width};")
        names.append(f"m{position}")
    return f"struct s{number} {{ {' '.join(members)} }};", names


def changes(choose: random.Random, names: list[str]) -> list[str]:
    """Return expressions that change fields."""
    found = []
    for _ in range(4):
        field, constant = f"p->{choose.choice(names)}", f"{choose.getrandbits(63)}LL"
        forms = (f"{field} = {constant}", f"{field} = -{constant}", f"{field} += {constant}", f"{field} ^= {constant}",
                 f"{field}++", f"--{field}", f"{field} = {field} + 3")  # fmt: skip
        found.append(choose.choice(forms))
    return found


def compiled(text: str, bits: int) -> Program:
    diagnostics = Diagnostics()
    source = preprocess(SourceFile("fields.dpc", text), diagnostics)
    (compilation,), _ = compile_text(
        source, diagnostics, module="m", allow_write=True, word_size_of=lambda _: bits // 8
    )
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return program


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_bit_fields_are_written_as_by_gcc(seed: int, bits: int, tmp_path: Path) -> None:
    choose = random.Random(7000 + seed)
    cases = []
    for number in range(COUNT):
        declared, names = structure(choose, number)
        steps = [f"long long r{n} = ({each});" for n, each in enumerate(changes(choose, names))]
        memory = [choose.getrandbits(64) for _ in range(WORDS)]
        values = [*(f"r{n}" for n in range(len(steps))), *(f"raw[{n}]" for n in range(WORDS))]
        cases.append((number, declared, " ".join(steps), memory, values))
    bodies = []
    for number, declared, done, memory, values in cases:
        words = ", ".join(f"{word}ULL" for word in memory)
        place = f"unsigned long long raw[] = {{ {words} }}; struct s{number} *p = (void *)raw;"
        bodies.append((f"{declared} {place} {done}", values))
    truth = results_of_gcc(bodies, tmp_path, bits)
    for (number, declared, done, memory, values), expected in zip(cases, truth, strict=True):
        places = f"unsigned long long *raw = (void *){ADDRESS}; struct s{number} *p = (void *){ADDRESS};"
        program = compiled(f"{declared} f() {{ {places} {done} {shown(values)} }}", bits)
        data = b"".join(word.to_bytes(8, "little") for word in memory)
        context = FakeContext("i386" if bits == 32 else "x86_64", memory={ADDRESS: data})
        log = run_handler(program, context).log
        ours = [f"{int.from_bytes(log[at : at + 8], 'little'):x}" for at in places_of(log, len(values))]
        assert (declared, done, " ".join(ours)) == (declared, done, expected)


def places_of(log: bytes, count: int) -> list[int]:
    """Return where the values are: the first ones as they are, those of memory as items."""
    items = WORDS
    raw = count - items
    return [8 * n for n in range(raw)] + [8 * raw + 11 * n + 3 for n in range(items)]
