"""What may stand at the end of an unfinished program."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.cli.languageserver.editor_completion import CompletionKind, completions_at
from dprobes.target.module_lookup import find_module

if TYPE_CHECKING:
    from pathlib import Path


def at_end(text: str, name: str = "a.dpc") -> dict[str, str]:
    return {each.text: text[each.start :] for each in completions_at(name, text, len(text))}


@pytest.mark.parametrize(
    ("text", "some", "replaced"),
    [
        ("libc.so", "libc.so.6", "libc.so"),
        ("libc.so.6:mallo", "malloc", "mallo"),
        ("return libc.so.6:mallo", "malloc", "mallo"),
        ("tracepo", "tracepoint", "tracepo"),
        ("syscall opena", "openat", "opena"),
        ("f(int count) { cou", "count", "cou"),
        ("f { pri", "printf", "pri"),
        ("f { @bytes = sum(1); @by", "@bytes", "@by"),
        ("static long total;\nf { to", "total", "to"),
        ('f { reg("ra', "rax", "ra"),
        ("syscall openat { args.fi", "filename", "fi"),
        ("syscall openat { fi", "filename", "fi"),
        ("return f { el", "elapsed", "el"),
    ],
)
def test_completions_in_c(text: str, some: str, replaced: str) -> None:
    assert at_end(text)[some] == replaced


@pytest.mark.parametrize(
    ("access", "members"),
    [
        ("it->", ["id", "next", "both"]),
        ("it->ne", ["next"]),
        ("it->next->next->bo", ["both"]),
        ("1 + it->next->i", ["id"]),
        ("((struct item *)n)->i", ["id"]),
        ("it->both.", ["low", "high"]),
        ("(*it).both.lo", ["low"]),
        ("n->", []),
    ],
)
@pytest.mark.parametrize(
    "around", ["f(struct item *it, long n) {{ {} }}", "f(struct item *it, long n) {{\n    {}\n    n++;\n}}"]
)
def test_members_of_structures(around: str, access: str, members: list[str]) -> None:
    declared = "struct pair { int low, high; };\nstruct item { int id; struct item *next; struct pair both; };\n"
    text, _, rest = (declared + "libc.so.6:free" + around.removeprefix("f").format(f"{access}|")).partition("|")
    found = completions_at("a.dpc", text + rest, len(text))
    assert [each.text for each in found] == members
    assert {each.kind for each in found} <= {CompletionKind.FIELD}


def test_members_in_a_condition_and_with_their_types() -> None:
    text = "struct item { int id; char *name; };\nlibc.so.6:free(struct item *it) when (it->"
    found = completions_at("a.dpc", text + ") { }", len(text))
    assert [(each.text, each.doc) for each in found] == [("id", "int"), ("name", "char *")]


def test_variables_of_the_module_are_known(tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text(
        "int counted;\nint take(int first, int second) { int sum = first + second; counted += sum; return sum; }\n"
        "int main(void) { return take(0, 0); }\n"
    )
    subprocess.run(["gcc", "-g", "-O0", "-o", program, source], check=True)
    for head in (f"{program}:take", f"return {program}:take(x)", f"module {program};\ntake"):
        assert {"first", "second", "sum", "counted"} <= set(at_end(head + " { "))
    assert set(at_end(f"{program}:take {{ coun")) == {"counted", "count"}
    assert "sum" in at_end(f"{program}:main {{ ")  # the call
    assert "first" not in at_end(f"{program}:main {{ ")


def test_statically_defined_probes_of_the_module_are_known() -> None:
    module = "libstdc++.so.6"  # which has those of exceptions
    if find_module(module) is None:
        pytest.skip(f"{module} is not installed")
    assert at_end(f"usdt {module}:libs")["libstdcxx:throw"] == "libs"
    assert set(at_end(f"usdt {module}:libstdcxx:c")) == {"libstdcxx:catch"}
    assert at_end("usdt no_such_library.so.77:") == {}


def test_what_cannot_stand_there_is_not_among_them() -> None:
    assert "elapsed" not in at_end("f { el")
    assert at_end("// libc.so.6:mallo") == {}
    assert at_end('f { printf("mallo') == {}
    assert at_end("no_such_library.so.77:f") == {}


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("nam", "name"),
        ('name = "libc.so', "libc.so.6"),
        ('name = "libc.so.6"\noffset = mallo', "malloc"),
        ("    push u", "push uid"),
        ("    push 1; du", "dup"),
        ("    push r, ra", "rax"),
        ("proc twice\n    ret\nendproc\noffset = f\n    call tw", "twice"),
        ("end_of_it:\n    abort\n    jmp en", "end_of_it"),
        ("table = sizes, hist, word\n    push 1\n    tally si", "sizes"),
    ],
)
def test_completions_in_rpn(text: str, some: str) -> None:
    assert some in {each.rstrip() for each in at_end(text, "a.rpn")}


def test_a_completion_says_what_it_is() -> None:
    (found,) = [each for each in completions_at("a.dpc", "f { nse", 7) if each.text == "nsecs"]
    assert (found.kind, found.doc) == (CompletionKind.VARIABLE, "CLOCK_MONOTONIC in nanoseconds")
