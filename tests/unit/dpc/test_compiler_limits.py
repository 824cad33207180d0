"""What no pass can follow is an error at its place, however it is written."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source, dump_lines
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile

LONG = " + ".join(["n"] * 5000)
MANY_OPERATORS = "there is an expression with too many operators here"
NESTED = "this is nested more than 100 levels deep"


def errors_of(text: str) -> list[str]:
    """Return the places and messages of all errors."""
    diagnostics = Diagnostics()
    with pytest.raises(SourceError):
        dump_lines(SourceFile("a.dpc", text), diagnostics, CompileOptions(), "rpn")
    return [line for line in diagnostics.render().splitlines() if line.startswith("a.dpc:")]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"static long n;\nlibc.so.6:abs() {{ n = {LONG}; }}", "2:1"),
        (f"static long n;\nlong sum() {{ return {LONG}; }}\nlibc.so.6:abs() {{ n = sum(); }}", "2:6"),
        (f"static long n;\nlibc.so.6:abs() {{ n++; }}\nend {{ n = {LONG}; }}", "3:1"),
        (f"static long n[{LONG.replace('n', '1')}];\nlibc.so.6:abs() {{ return; }}", "1:1"),
    ],
)
def test_a_chain_of_operators_has_an_end(text: str, place: str) -> None:
    assert errors_of(text) == [f"a.dpc:{place}: error: {MANY_OPERATORS}"]


@pytest.mark.parametrize("declared", [f"int {'*' * 200}a;", f"int a{'[2]' * 200};", f"int {'*' * 60}a{'[2]' * 60};"])
def test_types_are_not_nested_deeper_than_expressions(declared: str) -> None:
    first, *_ = errors_of(f"struct s {{ {declared} }};\nlibc.so.6:abs(struct s *p) {{ return; }}")
    assert first.endswith(f"error: {NESTED}")


def test_a_number_of_any_length_is_too_large() -> None:
    found = errors_of(f"static long n;\nlibc.so.6:abs() {{ n = 1{'0' * 9999}; n = {'0' * 9999}; n = 0x{'f' * 60}; }}")
    assert found == [
        f"a.dpc:2:23: error: '1{'0' * 69}…' has more than 64 bits",
        f"a.dpc:2:{23 + 10000 + 6 + 9999 + 6}: error: '0x{'f' * 60}' has more than 64 bits",
    ]


@pytest.mark.parametrize("text", ["", "\n", "// nothing"])
def test_nothing_is_no_program(text: str) -> None:
    with pytest.raises(SourceError, match="the program has no probe and no 'begin', 'every' or 'end' block"):
        compile_source(SourceFile("a.dpc", text), Diagnostics(), CompileOptions())
