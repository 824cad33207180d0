"""Where names are defined; a bar marks the name that is asked for, brackets of another kind where it is defined."""

from __future__ import annotations

import pytest

from dprobes.cli.languageserver.name_definition import definition_of

CASES = [
    "static long «total»; f { to|tal++; }",
    "#define «LIMIT» 8\nf { @ = sum(LIM|IT); }",
    "struct «pair» { int a; }; f { struct pa|ir *p = 0; }",
    "int «twice»(int n) { return 2 * n; } f { @ = sum(twi|ce(4)); }",
    "f(char *name, «size») { @ = sum(si|ze); }",
    "f(«size») { } g(size) { }\nf(x) { @ = sum(x); siz|e }".replace("«size»", "size").replace("g(size)", "g(«size»)"),
    "f { long «n» = 1; @ = sum(|n); }",
    "f { «@bytes»[pid] = sum(1); } g { delete(@by|tes[pid]); }",
    "// static long total;\nstatic long «total»;\nf { total|++; }",
]


@pytest.mark.parametrize("marked", CASES)
def test_definitions_in_c(marked: str) -> None:
    expected, offset, text = positions(marked)
    found = definition_of("a.dpc", text, offset)
    assert found is not None
    assert (found.start, text[found.start : found.end]) == expected


@pytest.mark.parametrize(
    "marked",
    ["    jmp e|nd\n«end»:\n    abort", "proc «twice»\nendproc\noffset = f\ncall twi|ce", "#define «N» 1\npush |N"],
)
def test_definitions_in_rpn(marked: str) -> None:
    expected, offset, text = positions(marked)
    found = definition_of("a.rpn", text, offset)
    assert found is not None
    assert (found.start, text[found.start : found.end]) == expected


def test_what_is_not_defined() -> None:
    assert definition_of("a.dpc", "f { @ = sum(nothing); }", 15) is None
    assert definition_of("a.dpc", "f {  }", 4) is None
    assert definition_of("a.dpc", "", 0) is None


def positions(marked: str) -> tuple[tuple[int, str], int, str]:
    """Return where the name is defined and what it is, the offset that is asked for, and the text without marks."""
    bar = marked.index("|")
    plain = marked.replace("|", "")
    start = plain.index("«")
    name = plain[start + 1 : plain.index("»")]
    before = sum(1 for position, character in enumerate(marked) if character in "«»" and position < bar)
    return (start, name), bar - before, plain.replace("«", "").replace("»", "")
