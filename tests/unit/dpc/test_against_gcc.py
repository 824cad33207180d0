"""C's meaning: random expressions, statements and structures, compiled by gcc and by us, have the same results."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_text
from dprobes.errors import SourceError
from dprobes.preprocessor import preprocess
from dprobes.rpn.rpn_parser import parse
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, run_handler
from dprobes.vm import Ending
from support.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dprobes.rpn.rpn_program import Program

ROUNDS = rounds(80, 2)
COUNT = 150
"""Programs in a round."""

PATIENCE = 20.0
"""Seconds in which a case that differs is made smaller."""

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

FREESTANDING = """
typedef unsigned int size_t;
#define offsetof(type, member) __builtin_offsetof(type, member)
static void *before[5];
static char output[1 << 24], *end = output;
static long call(long number, long a, long b, long c, long d) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c), "S"(d) : "memory");
    return result;
}
static void failed(int number) { __builtin_longjmp(before, 1); }
static void put(char c) { *end++ = c; }
static void show(unsigned long long value, char last) {
    char digits[17]; int count = 0;
    do { digits[count++] = "0123456789abcdef"[value & 15]; value >>= 4; } while (value);
    while (count) put(digits[--count]);
    put(last);
}
static unsigned long long divided(unsigned long long n, unsigned long long d, unsigned long long *rest) {
    unsigned long long q = 0, r = 0;
    for (int bit = 63; bit >= 0; bit--) {
        int carry = r >> 63;
        r = r << 1 | (n >> bit & 1);
        if (carry || r >= d) { r -= d; q |= 1ULL << bit; }
    }
    *rest = r;
    return q;
}
unsigned long long __udivdi3(unsigned long long a, unsigned long long b) {
    unsigned long long r; return divided(a, b, &r);
}
unsigned long long __umoddi3(unsigned long long a, unsigned long long b) {
    unsigned long long r; divided(a, b, &r); return r;
}
long long __divdi3(long long a, long long b) {
    unsigned long long q = __udivdi3(a < 0 ? -a : a, b < 0 ? -b : b); return (a < 0) != (b < 0) ? -q : q;
}
long long __moddi3(long long a, long long b) {
    unsigned long long r = __umoddi3(a < 0 ? -a : a, b < 0 ? -b : b); return a < 0 ? -r : r;
}
void _start(void) {
    struct { void (*handler)(int); unsigned long flags; void *restorer; unsigned long long mask; } action =
        {failed, 0x40000000, 0, 0};
    call(174, 8, (long)&action, 0, 8);
%s
    for (char *p = output; p < end; p += call(4, 1, (long)p, end - p, 0)) ;
    call(1, 0, 0, 0, 0);
}
"""
"""A program of 32 bits that needs no library: many machines have none for these."""

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


class Writer:
    """Write random pieces of C that both compilers give a meaning."""

    def __init__(self, seed: int, bits: int = 64) -> None:
        self.random = random.Random(seed)
        self.types = TYPES if bits == 64 else (*TYPES, "long long", "unsigned long long")
        self.names = [(f"v{number}", self.random.choice(self.types)) for number in range(6)]
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
                return f"(({choose.choice(self.types)}){self.expression(rest)})"
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


def shown(values: Sequence[str]) -> str:
    """Return the statement that prints values in hexadecimal, for both compilers."""
    return f'printf("{" ".join(["%llx"] * len(values))}\\n", {", ".join(f"(long long)({each})" for each in values)});'


def results_of_gcc(bodies: Sequence[tuple[str, Sequence[str]]], directory: Path, bits: int = 64) -> list[str]:
    """Return what gcc's programs print of the values behind each body, "failed" where a division has no result."""
    source, program = directory / "all.c", directory / "all"
    if bits == 64:
        blocks = (f'    if (!sigsetjmp(before, 1)) {{ {b} {shown(v)} }} else puts("failed");' for b, v in bodies)
        text, options = FRAME % "\n".join(blocks), []
    else:
        blocks = (
            f"    if (!__builtin_setjmp(before)) {{ {body} "
            + " ".join(f"show((long long)({each}), {chr(39)}{' ' if n + 1 < len(values) else chr(92) + 'n'}{chr(39)});"
                       for n, each in enumerate(values))
            + " } else { put('f'); put('a'); put('i'); put('l'); put('e'); put('d'); put(10); }"
            for body, values in bodies
        )  # fmt: skip
        text = FREESTANDING % "\n".join(blocks)
        options = ["-m32", "-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-fno-stack-protector", "-no-pie"]
    source.write_text(text)
    subprocess.run(["gcc", "-w", "-fwrapv", "-O1", *options, "-o", str(program), str(source)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def compiled(text: str, bits: int = 64) -> Program:
    diagnostics = Diagnostics()
    source = preprocess(SourceFile("random.dpc", text), diagnostics)
    (compilation,), _ = compile_text(source, diagnostics, module="random", word_size_of=lambda _: bits // 8)
    program = parse(compilation.preprocessed(), diagnostics)
    diagnostics.raise_if_errors()
    assert program is not None
    return program


def words_of(program: Program, number: int, bits: int = 64) -> str | None:
    """Return the numbers of 64 bits that a handler logs, in hexadecimal; None if an exception has ended it."""
    one = dataclasses.replace(program, definitions=(program.definitions[number],))
    outcome = run_handler(one, FakeContext("i386" if bits == 32 else "x86_64"))
    if outcome.unhandled or outcome.ending is Ending.ABORT:
        return None
    log, words = outcome.log, []
    step = 3 if len(log) % 8 else 0  # items, for what may fail
    while log:
        words.append(f"{int.from_bytes(log[step : step + 8], 'little'):x}")
        log = log[step + 8 :]
    return " ".join(words)


def compare(cases: Sequence[tuple[str, Sequence[str]]], declarations: str, directory: Path, bits: int) -> None:
    """Compare what both compilers make of bodies and of the values behind them; show the smallest that differs."""
    found = first_difference(cases, declarations, directory, bits)
    if found is None:
        return
    body, values = cases[found]
    smaller = shrunk(body, values, lambda b, v: first_difference([(b, v)], declarations, directory, bits) is not None)
    (expected,) = results_of_gcc([(declarations + smaller[0], smaller[1])], directory, bits)
    ours = words_of(compiled(function_of(0, declarations, *smaller), bits), 0, bits)
    assert (smaller, ours or "failed") == (smaller, expected), declarations


def function_of(number: int, declarations: str, body: str, values: Sequence[str]) -> str:
    return f"f{number}() {{ {declarations}{body} {shown(values)} }}\n"


def first_difference(
    cases: Sequence[tuple[str, Sequence[str]]], declarations: str, directory: Path, bits: int
) -> int | None:
    """Return the number of the first case whose results differ."""
    truth = results_of_gcc([(declarations + body, values) for body, values in cases], directory, bits)
    text = "".join(function_of(number, declarations, *case) for number, case in enumerate(cases))
    ours = compiled(text, bits)
    for number, expected in enumerate(truth):
        if (words_of(ours, number, bits) or "failed") != expected:
            return number
    return None


def shrunk(
    body: str, values: Sequence[str], differs: Callable[[str, Sequence[str]], bool]
) -> tuple[str, Sequence[str]]:
    """Return a smaller case that still differs: without parts in parentheses and braces, and with fewer values."""
    current, until = (body, list(values)), time.monotonic() + PATIENCE
    while True:
        for candidate in smaller_ones(*current):
            if time.monotonic() > until:
                return current
            try:
                if differs(*candidate):
                    current = candidate
                    break
            except (SourceError, subprocess.CalledProcessError, ValueError):
                continue  # it is no program any more
        else:
            return current


def smaller_ones(body: str, values: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Give cases that lack something, those first that lack most."""
    if len(values) > 1:
        yield from ((body, [each]) for each in values)
    yield from ((text, values) for text in without_parts(body, "{}", ("{}",)))
    for number, value in enumerate(values):
        for text in without_parts(value, "()", ("0", "1")):
            yield body, [*values[:number], text, *values[number + 1 :]]
        inners = (part for part in parts_of(value, "()") if part != value)
        yield from ((body, [*values[:number], inner, *values[number + 1 :]]) for inner in inners)
    yield from ((text, values) for text in without_parts(body, "()", ("0", "1")))


def parts_of(text: str, brackets: str) -> list[str]:
    """Return the parts of a text that are enclosed by brackets, the longest first."""
    starts, found = [], []
    for position, character in enumerate(text):
        if character == brackets[0]:
            starts.append(position)
        elif character == brackets[1] and starts:
            found.append(text[starts.pop() : position + 1])
    return sorted(found, key=len, reverse=True)


def without_parts(text: str, brackets: str, instead: Sequence[str]) -> Iterator[str]:
    """Give the text with something else in the place of each part."""
    for part in parts_of(text, brackets):
        yield from (text.replace(part, each, 1) for each in instead if part != each)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_expressions_have_the_values_of_gcc(seed: int, bits: int, tmp_path: Path) -> None:
    writer = Writer(seed, bits)
    declarations = writer.declarations()
    compare([("", [writer.expression(4)]) for _ in range(COUNT)], declarations, tmp_path, bits)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_statements_do_what_those_of_gcc_do(seed: int, bits: int, tmp_path: Path) -> None:
    writer = Writer(1000 + seed, bits)
    declarations = writer.declarations()
    names = [name for name, _ in writer.names]
    bodies = [(" ".join(writer.statement(3) for _ in range(3)), names) for _ in range(COUNT // 2)]
    compare(bodies, declarations, tmp_path, bits)


def test_what_differs_is_made_smaller() -> None:
    body = "{ a = 1; { b = (3 * (4 + 5)); } } { c = 2; }"
    differs = lambda b, v: "4" in b and "x" in v[0]  # noqa: E731
    assert shrunk(body, ["((x) + (y * 2))", "z"], differs) == ("{ a = 1; { b = (3 * (4 + 5)); } } {}", ["(x)"])


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_structures_are_laid_out_as_by_gcc(seed: int, bits: int, tmp_path: Path) -> None:
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
        shows.append(values)
    truth = results_of_gcc(list(zip(texts, shows, strict=True)), tmp_path, bits)
    functions = (f"f{number}() {{ {shown(values)} }}" for number, values in enumerate(shows))
    ours = compiled("\n".join([*texts, *functions]), bits)
    for number, (expected, text) in enumerate(zip(truth, texts, strict=True)):
        assert (text, words_of(ours, number, bits)) == (text, expected)
