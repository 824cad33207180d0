"""What may stand at the end of an unfinished program."""

from __future__ import annotations

import pytest

from dprobes.cli.languageserver.completion import CompletionKind, completions_at


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
    ],
)
def test_completions_in_rpn(text: str, some: str) -> None:
    assert some in {each.rstrip() for each in at_end(text, "a.rpn")}


def test_a_completion_says_what_it_is() -> None:
    (found,) = [each for each in completions_at("a.dpc", "f { nse", 7) if each.text == "nsecs"]
    assert (found.kind, found.doc) == (CompletionKind.VARIABLE, "CLOCK_MONOTONIC in nanoseconds")
