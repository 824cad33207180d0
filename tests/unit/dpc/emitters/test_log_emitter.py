"""The minor codes of records: one for each text that a hit may print, in the order of the source."""

from __future__ import annotations

import re

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import CompiledSource, compile_source
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile


def compiled(text: str) -> CompiledSource:
    diagnostics = Diagnostics()
    found = compile_source(SourceFile("a.dpc", text), diagnostics, CompileOptions(), module="m")
    assert not diagnostics.render()
    return found


def texts_of(text: str) -> dict[int, str]:
    """Return what is printed by the minor codes."""
    parts = re.split(r"^minor = (\d+)$", compiled(text).templates, flags=re.MULTILINE)
    return {
        int(minor): "|".join(re.findall(r'fmt = "(.*)"', body))
        for minor, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('f { printf("a"); }', {0: "a"}),
        ('f { printf("a"); } g { printf("b"); } h { printf("c"); }', {1: "a", 2: "b", 3: "c"}),
        ('f { @[pid]++; } g { printf("b"); }', {2: "b"}),
        ('f { printf("a"); printf("b"); } g { printf("c"); }', {1: "a|b", 2: "c"}),
        ('f(x) { if (x) printf("a"); else printf("b"); } g { printf("c"); }', {1: "a", 2: "b", 3: "c"}),
        ('f(x) { printf("a"); if (*(int *)x) printf("b"); } g { printf("c"); }', {1: "a", 2: "a|b", 3: "c"}),
        ('one:f { printf("a"); } two:g { printf("b"); } one:h { printf("c"); }', {1: "a", 2: "b", 3: "c"}),
        ('one:f, two:g { printf("a"); } two:h { printf("b"); }', {1: "a", 2: "b"}),
        ('[minor 7] f { printf("a"); } g { printf("b"); }', {7: "a", 8: "b"}),
        ('f { printf("a"); } [minor 7] g { printf("b"); } h { printf("c"); }', {1: "a", 7: "b", 8: "c"}),
    ],
)
def test_codes_count_in_the_order_of_the_source(text: str, expected: dict[int, str]) -> None:
    assert texts_of(text) == expected


def test_codes_that_are_computed_at_the_hit_are_apart() -> None:
    found = texts_of('f(x, y) { if (x) printf("a"); if (y) printf("b"); } g { printf("c"); }')
    assert found == {1: "a", 2: "b", 5: "a|b", 6: "c"}


def test_a_code_is_set_where_a_record_may_end_with_it() -> None:
    assert "setmin" not in compiled('f { printf("a"); printf("b"); }').rpn
    assert re.findall(r"setmin.*", compiled('f(x) { if (x) printf("a"); else printf("b"); }').rpn) == ["setmin 1"]
