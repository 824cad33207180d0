"""C's meaning: random expressions, statements and structures, compiled by gcc and by us, have the same results."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.preprocessor import preprocess
from dprobes.rpn.parser import parse
from dprobes.source import SourceFile
from dprobes.testing import FakeContext, run_handler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dprobes.rpn.program import Program

ROUNDS = 40 if os.environ.get("DPROBES_EXAMPLES") == "torture" else 2
COUNT = 150
"""Programs in a round."""

TYPES = ("signed char", "unsigned char", "short", "unsigned short", "int", "unsigned int", "long", "unsigned long")
EDGES = (0, 1, 2, 3, -1, -2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
         2**63 - 1, -(2**63))  # fmt: skip
FRAME = """
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stddef.h>
static sigjmp_buf before;
static void failed(int number) { siglongjmp(before, number); }
int main(void) {
    signal(SIGFPE, failed);
%s
}
"""

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


class Writer:
    """Write random pieces of C that both compilers give a meaning."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [(f"v{number}", self.random.choice(TYPES)) for number in range(6)]
        self.loops = 0

    def constant(self) -> str:
        value = self.random.choice((*EDGES, self.random.randrange(-100, 100), self.random.getrandbits(64) - 2**63))
        if value < 0:
            return f"({value})" if value > -(2**63) else "(-9223372036854775807-1)"
        return f"{value}{self.random.choice(('', 'U', 'L', 'UL'))}"

    def declarations(self) -> str:
        return "".join(f"{type_} {name} = ({type_}){self.constant()}; " for name, type_ in self.names)

    def expression(self, depth: int) -> str:
        choose, rest = self.random, depth - 1
        if depth == 0 or choose.random() < 0.1:
            return choose.choice((self.constant(), *(name for name, _ in choose.sample(self.names, 2))))
        match choose.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                return f"({self.expression(rest)} {choose.choice('+-*&|^')} {self.expression(rest)})"
            case 5:
                return f"({self.expression(rest)} {choose.choice(('<<', '>>'))} {choose.randrange(31)})"
            case 6:
                operator = choose.choice(("<", ">", "<=", ">=", "==", "!="))
                return f"({self.expression(rest)} {operator} {self.expression(rest)})"
            case 7:
                return f"(({choose.choice(TYPES)}){self.expression(rest)})"
            case 8:
                return f"({choose.choice('-~!')}{self.expression(rest)})"
            case 9:
                return f"({self.expression(rest)} ? {self.expression(rest)} : {self.expression(rest)})"
            case 10:
                return f"({self.expression(rest)} {choose.choice(('&&', '||'))} {self.expression(rest)})"
        if choose.random() < 0.5:
            return f"({self.expression(rest)} {choose.choice('/%')} ({self.expression(rest)} | 1))"
        return f"({self.expression(rest)} >> ({self.expression(rest)} & 15))"

    def statement(self, depth: int) -> str:
        choose, rest = self.random, depth - 1
        name = choose.choice(self.names)[0]
        if depth == 0 or choose.random() < 0.3:
            match choose.randrange(3):
                case 0:
                    return f"{choose.choice(('++', '--'))}{name};"
                case 1:
                    return f"{name} {choose.choice(('+=', '-=', '^=', '|=', '*='))} {self.expression(2)};"
            return f"{name} = {self.expression(2)};"
        match choose.randrange(5):
            case 0:
                return f"if ({self.expression(2)}) {{ {self.statement(rest)} }} else {{ {self.statement(rest)} }}"
            case 1:
                self.loops += 1
                i = f"i{self.loops}"
                ways = ("", f"if ({self.expression(1)}) continue; ", f"if ({self.expression(1)}) break; ")
                head = f"for (int {i} = 0; {i} < {choose.randrange(4)}; {i}++)"
                return f"{head} {{ {choose.choice(ways)}{self.statement(rest)} }}"
            case 2:
                cases = "".join(
                    f"case {label}: {self.statement(rest)} {choose.choice(('break;', ''))} "
                    for label in choose.sample(range(-4, 8), choose.randrange(1, 8))
                )
                default = f"default: {self.statement(rest)} " if choose.random() < 0.5 else ""
                return f"switch ({self.expression(1)} & 7) {{ {cases}{default}}}"
            case 3:
                self.loops += 1
                i = f"i{self.loops}"
                return f"{{ int {i} = 0; do {{ {self.statement(rest)} }} while ({i}++ < {choose.randrange(3)}); }}"
        return f"{{ {self.statement(rest)} {self.statement(rest)} }}"


def results_of_gcc(bodies: Sequence[str], directory: Path) -> list[str]:
    source, program = directory / "all.c", directory / "all"
    blocks = (f'    if (!sigsetjmp(before, 1)) {{ {body} }} else puts("failed");' for body in bodies)
    source.write_text(FRAME % "\n".join(blocks))
    subprocess.run(["gcc", "-w", "-fwrapv", "-O1", "-o", str(program), str(source)], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


def compiled(text: str) -> Program:
    diagnostics = Diagnostics()
    source = preprocess(SourceFile("random.dpc", text), diagnostics)
    (compilation,), _ = compile_text(source, diagnostics, module="random")
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return program


def words_of(program: Program, number: int) -> str | None:
    """Return the words that a handler logs, in hexadecimal; None if an exception has ended it."""
    one = dataclasses.replace(program, definitions=(program.definitions[number],))
    outcome = run_handler(one, FakeContext())
    if outcome.unhandled:
        return None
    log, words = outcome.log, []
    while log:
        start = 3 if log[0] == 7 and len(log) % 8 else 0  # an item of one word, for what may fail
        words.append(f"{int.from_bytes(log[start : start + 8], 'little'):x}")
        log = log[start + 8 :]
    return " ".join(words)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_expressions_have_the_values_of_gcc(seed: int, tmp_path: Path) -> None:
    writer = Writer(seed)
    declarations = writer.declarations()
    expressions = [writer.expression(4) for _ in range(COUNT)]
    printed = [f'printf("%llx\\n", (unsigned long long)({text}));' for text in expressions]
    truth = results_of_gcc([declarations + text for text in printed], tmp_path)
    ours = compiled(
        "".join(
            f'f{number}() {{ {declarations} long long r = {text}; printf("%llx", r); }}\n'
            for number, text in enumerate(expressions)
        )
    )
    for number, (expected, text) in enumerate(zip(truth, expressions, strict=True)):
        found = words_of(ours, number)
        assert (text, found or "failed") == (text, expected), declarations


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_statements_do_what_those_of_gcc_do(seed: int, tmp_path: Path) -> None:
    writer = Writer(1000 + seed)
    declarations = writer.declarations()
    bodies = [" ".join(writer.statement(3) for _ in range(3)) for _ in range(COUNT // 2)]
    names = [name for name, _ in writer.names]
    show = f'printf("{" ".join(["%llx"] * len(names))}\\n", {", ".join(f"(long long){name}" for name in names)});'
    truth = results_of_gcc([declarations + body + show for body in bodies], tmp_path)
    ours = compiled("".join(f"f{number}() {{ {declarations}{body}{show} }}\n" for number, body in enumerate(bodies)))
    for number, (expected, body) in enumerate(zip(truth, bodies, strict=True)):
        found = words_of(ours, number)
        assert (body, found or "failed") == (body, expected), declarations


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_structures_are_laid_out_as_by_gcc(seed: int, tmp_path: Path) -> None:
    choose = random.Random(2000 + seed)
    texts, shows = [], []
    for number in range(COUNT // 5):
        members, fields = "", []
        for position in range(choose.randrange(1, 8)):
            type_ = choose.choice(TYPES)
            match choose.randrange(4):
                case 0:
                    width = choose.randrange(1, 9 if "char" in type_ else 17 if "short" in type_ else 32)
                    members += f"{type_} m{position} : {width}; "
                case 1:
                    members += f"{type_} m{position}[{choose.randrange(1, 5)}]; "
                    fields.append(f"m{position}")
                case 2:
                    members += f"struct {{ {type_} a; char b; }} m{position}; "
                    fields.append(f"m{position}")
                case 3:
                    members += f"{type_} m{position}; "
                    fields.append(f"m{position}")
        texts.append(f"{choose.choice(('struct', 'struct', 'union'))} s{number} {{ {members}}};")
        kind = texts[-1].split()[0]
        values = [f"sizeof({kind} s{number})", *(f"offsetof({kind} s{number}, {name})" for name in fields)]
        shows.append(
            f'printf("{" ".join(["%llx"] * len(values))}\\n", {", ".join(f"(long long){v}" for v in values)});'
        )
    truth = results_of_gcc([f"{text} {show}" for text, show in zip(texts, shows, strict=True)], tmp_path)
    ours = compiled("\n".join([*texts, *(f"f{number}() {{ {show} }}" for number, show in enumerate(shows))]))
    for number, (expected, text) in enumerate(zip(truth, texts, strict=True)):
        assert (text, words_of(ours, number)) == (text, expected)
