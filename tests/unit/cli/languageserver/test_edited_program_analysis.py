"""What is found out about programs while they are written."""

from __future__ import annotations

import random

from dprobes.cli.languageserver.edited_program import analyse, word_at
from dprobes.cli.languageserver.editor_completion import completions_at
from dprobes.cli.languageserver.explanation import explain
from dprobes.cli.languageserver.name_definition import definition_of

PROGRAM = """\
libc.so.6:malloc(size) when (size > 10) {
    printf("%d of %d", size, nsecs);
}
libc.so.6:free { @ = count() }
"""


def messages(name: str, text: str) -> list[tuple[str, str]]:
    return [(each.message, each.span.text if each.span else "") for each in analyse(name, text).diagnostics]


def test_all_that_is_wrong_is_found() -> None:
    assert messages("a.dpc", PROGRAM) == []
    assert messages("a.dpc", PROGRAM.replace("nsecs", "nsec")) == [("'nsec' is not defined", "nsec")]
    ((message, place),) = messages("a.dpc", PROGRAM.replace("malloc", "mallok"))
    assert message.endswith("has no symbol 'mallok'")
    assert place == "libc.so.6:mallok"
    both = PROGRAM.replace("nsecs", "nsec").replace("libc.so.6:free", "libc.so.6:frea")
    assert [message for message, _ in messages("a.dpc", both)][:1] == ["'nsec' is not defined"]
    assert messages("a.dpc", both)[1][0].endswith("has no symbol 'frea'")
    assert messages("a.rpn", 'name = "libc.so.6"\noffset = malloc\npusj 1\nexit\n') == [
        ("unknown instruction 'pusj'", "pusj")
    ]


def test_of_a_probe_rpn_and_costs_are_explained() -> None:
    found = explain(analyse("a.dpc", PROGRAM), PROGRAM.index("free"))
    assert found is not None
    text, start, end = found
    assert PROGRAM[start:end] == "libc.so.6:free"
    assert "| `free` | " in text
    assert "\noffset = free\n" in text
    assert "\n    tally _\n" in text
    assert "malloc" not in text


def test_names_are_explained() -> None:
    analysis = analyse("a.dpc", PROGRAM)
    assert explain(analysis, PROGRAM.index("nsecs") + 1) == (
        "```c\nunsigned long long  // nsecs\n```\n\n`nsecs`: CLOCK_MONOTONIC in nanoseconds",
        PROGRAM.index("nsecs"),
        PROGRAM.index("nsecs") + 5,
    )
    size = PROGRAM.index("size, nsecs")
    shown = "```c\nunsigned long  // size\n```\n\n```c\nlibc.so.6:malloc(size) when (size > 10) {\n```"
    assert explain(analysis, size) == (shown, size, size + 4)
    assert explain(analysis, PROGRAM.index("10)")) is None
    text = "static long total;   // of all\nf { total++; }\n"
    at = text.index("total++")
    shown = "```c\nlong  // total\n```\n\n```c\nstatic long total;   // of all\n```"
    assert explain(analyse("b.dpc", text), at) == (shown, at, at + 5)
    text = "name = libc.so.6\noffset = malloc // where\n    push r, arg0; log 1\n    exit\n"
    rpn = analyse("a.rpn", text)
    said = [explain(rpn, text.index(word)) for word in ("name", "push", "log")]
    assert [found is not None and found[0].partition(":")[0] for found in said] == [
        "`name =`", "`push r, <register>` ( -- value*cells )", "`log <count>` ( x*n -- )",
    ]  # fmt: skip


def test_words() -> None:
    assert [word_at("a bc @d", offset) for offset in (0, 2, 4, 5, 7)] == [(0, 1), (2, 4), (2, 4), (5, 7), (5, 7)]
    assert word_at("a  b", 2) == (2, 2)


def test_unfinished_programs_raise_nothing() -> None:
    choose = random.Random(6)
    for _ in range(40):
        pieces = [PROGRAM[: choose.randrange(len(PROGRAM))], choose.choice(("", "{", "(", '"', "@", "/*", "\0", "é"))]
        text = "".join(pieces)
        offset = choose.randrange(len(text) + 1)
        for name in ("a.dpc", "a.rpn"):
            analysis = analyse(name, text)
            explain(analysis, offset)
            completions_at(name, text, offset)
            definition_of(name, text, offset)
    deep = [message for message, _ in messages("a.dpc", "f { @ = sum(" + "(" * 3000)]
    assert "this is nested more than 100 levels deep" in deep
