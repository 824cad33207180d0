"""What each pass makes of a program can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import PASSES, dump_lines
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile

TEXT = """\
#define LIMIT (2 * 21)
static int n;
libc.so.6:abs(int x) when (x > LIMIT) { n += x; }
every 1s { printf("%d", n); }
"""


def dumped(name: str, text: str = TEXT) -> list[str]:
    return dump_lines(SourceFile("a.dpc", text), Diagnostics(), CompileOptions(), name)


def test_the_source_is_that_behind_the_preprocessor() -> None:
    assert dumped("source")[2] == "libc.so.6:abs(int x) when (x > (2 * 21)) { n += x; }"


def test_tokens_have_places() -> None:
    assert dumped("tokens")[:5] == [
        "a.dpc:2:1: name static",
        "a.dpc:2:8: name int",
        "a.dpc:2:12: name n",
        "a.dpc:2:13: punctuation ;",
        "a.dpc:3:1: name libc",
    ]


def test_the_tree_is_what_is_written() -> None:
    lines = dumped("tree")
    assert lines[0] == "ProgramTree"
    start = lines.index("    condition: Binary @a.dpc:3:28 operator='>'")
    assert lines[start : start + 5] == [
        "    condition: Binary @a.dpc:3:28 operator='>'",
        "      left: Name @a.dpc:3:28 name='x'",
        "      right: Binary @a.dpc:3:32 operator='*'",
        "        left: Number @a.dpc:3:32 value=2 is_decimal=True",
        "        right: Number @a.dpc:3:32 value=21 is_decimal=True",
    ]


def test_the_typed_tree_has_conversions_and_constants() -> None:
    assert dumped("typed") == [
        "TypedProbe @a.dpc:3:1 slots=0",
        "  condition: Comparison operator='<' is_signed=True type=<int>",
        "    left: Constant value=42 type=<int>",
        "    right: Convert type=<int>",
        "      operand: Register name='arg0' type=<unsigned long> at_entry=False is_certain=False",
        "  body: Steps",
        "    statements[0]: Evaluate @a.dpc:3:41",
        "      value: Assign type=<int>",
        "        target: Variable kind=LOCAL first=0 type=<int>",
        "        value: Arithmetic operator='+' type=<int>",
        "          left: Variable kind=LOCAL first=0 type=<int>",
        "          right: Convert type=<int>",
        "            operand: Register name='arg0' type=<unsigned long> at_entry=False is_certain=False",
        "  paths: LogPaths logs=0 ends={()} last={()}",
        "TypedBlock @a.dpc:4:1 slots=0",
        "  body: Steps",
        "    statements[0]: Log @a.dpc:4:12 number=1 template='%(n)dd'",
        "      items[0]: Variable kind=LOCAL first=0 type=<int>",
    ]


def test_rpn_is_what_is_compiled() -> None:
    lines = dumped("rpn")
    assert lines[:3] == ['name = "libc.so.6"', "major = 0", "vars = 1"]
    assert "    // n += x" in lines


def test_every_pass_gives_something() -> None:
    assert all(dumped(name) for name in PASSES)


def test_the_passes_before_an_error_can_be_looked_at() -> None:
    text = "libc.so.6:abs { nothing = 1; }"
    assert dumped("tree", text)[0] == "ProgramTree"
    assert dumped("places", text)[0] == "ProgramTree"
    for name in ("typed", "rpn"):
        with pytest.raises(SourceError):
            dumped(name, text)


def test_the_command_line_knows_all_passes() -> None:
    build = Path(__file__).parents[3] / "src" / "dprobes" / "cli" / "verbs" / "build.py"
    listed = ", ".join(f'"{name}"' for name in PASSES)
    assert f"DUMPS = ({listed})" in build.read_text()
