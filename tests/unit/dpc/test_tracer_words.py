"""What bpftrace's words become here is accepted here: hints lead to programs without errors."""

# ruff: noqa: SIM300 - expected == actual
from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.dpc.syntax.program_parser import parse
from dprobes.dpc.tracer_words import call_hint, condition_of, name_hint, place_hint, type_hint
from dprobes.preprocessor import preprocess
from dprobes.source_text import SourceFile

PLACES = {
    "uprobe:libc.so.6:malloc": "libc.so.6:malloc",
    "u:/bin/bash:main+4": "/bin/bash:main+4",
    "uretprobe:libc.so.6:malloc": "return libc.so.6:malloc",
    "ur:libc.so.6:malloc": "return libc.so.6:malloc",
    "kprobe:vfs_read": "kernel:vfs_read",
    "k:vfs_*": "kernel:vfs_*",
    "kr:vfs_read": "return kernel:vfs_read",
    "kretprobe:vfs_read": "return kernel:vfs_read",
    "kprobe:ext4:ext4_sync_file": "kmod ext4:ext4_sync_file",
    "fentry:vfs_read": "kernel:vfs_read",
    "fexit:vmlinux:vfs_read": "return kernel:vfs_read",
    "tracepoint:sched:sched_switch": "tracepoint sched:sched_switch",
    "t:sched:sched_switch": "tracepoint sched:sched_switch",
    "tracepoint:syscalls:sys_enter_openat": "syscall openat",
    "tracepoint:syscalls:sys_exit_read": "return syscall read",
    "rawtracepoint:sched_switch": "tracepoint SUBSYSTEM:NAME",
    "usdt:libc.so.6:libc:setjmp": "usdt libc.so.6:libc:setjmp",
    "profile:hz:99": "sample 99hz",
    "p:hz:49": "sample 49hz",
    "interval:s:1": "every 1s",
    "i:ms:100": "every 100ms",
    "interval:5s": "every 5s",
    "software:page-faults:1": "sample page-faults:1",
    "software:cs": "sample context-switches:100000",
    "hardware:cpu-cycles:1000000": "sample cycles:1000000",
    "s:cpu-clock:1000": "sample 99hz",
    "software:alignment-faults:1": "sample page-faults:100",
    "watchpoint:0x1000:8:w": "watch w (long)0x1000",
    "watchpoint:nothing": "watch w MODULE:variable",
    "uprobe:malloc": "MODULE:FUNCTION",
}


def errors(text: str) -> list[str]:
    diagnostics = Diagnostics()
    source = SourceFile("p.dpc", text)
    parse(preprocess(source, diagnostics), diagnostics)
    return [each.render() for each in diagnostics]


@pytest.mark.parametrize(("written", "ours"), PLACES.items())
def test_a_point_of_bpftrace_is_told_its_place(written: str, ours: str) -> None:
    assert (written.partition(":")[0], ours) == place_hint(written)
    (error,) = errors(f"{written} {{ }}")
    underlined = f"    {written} {{ }}\n    ^{'~' * (len(written) - 1)}\n"
    assert error.endswith(f"is not a module\n{underlined}hint: write '{ours}'")
    if not any(word.isupper() for word in ours.replace(":", " ").split()):
        assert [] == errors(f"{ours} {{ }}")


@pytest.mark.parametrize(
    "place",
    [
        "bash:main",
        "libc.so.6:malloc",
        "u:main",
        "t:main",
        "k:file.c:12",
        '"k":main',
        "kprobe",
        "interval",
        "uprobes:a:b",
    ],
)
def test_other_places_are_left_alone(place: str) -> None:
    assert place_hint(place) is None
    assert [] == errors(f"{place} {{ }}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("/pid == 4/", "pid == 4"), ("/ a / b > 2 /", "a / b > 2"), ("//", None), ("/x", None), ("x/", None), ("", None)],
)
def test_a_condition_is_what_stands_in_slashes(text: str, expected: str | None) -> None:
    assert expected == condition_of(text)


@pytest.mark.parametrize(
    ("text", "column", "condition"),
    [
        ("m:f /pid == 4/ { }", "5-14", "pid == 4"),
        ('m:f / comm == "x" && arg0 / 2 > 1 / { }', "5-35", 'comm == "x" && arg0 / 2 > 1'),
        ("m:f(size) /size > 4/ { }", "11-20", "size > 4"),
        ("m:f/pid==4/ { }", "4-11", "pid==4"),
        ("m:f/pid == 4/ { }", "4-13", "pid == 4"),
        ("m:f, m:g /tid/ { }", "10-14", "tid"),
    ],
)
def test_a_condition_in_slashes_is_told_its_form(text: str, column: str, condition: str) -> None:
    (error,) = errors(text)
    first = column.partition("-")[0]
    assert error.splitlines()[0] == f"p.dpc:1:{first}: error: a condition is not written in slashes"
    assert error.splitlines()[-1] == f"hint: write when ({condition})"
    assert len(error.splitlines()[2].strip()) == int(column.partition("-")[2]) - int(first) + 1
    assert [] == errors(f"m:f when ({condition}) {{ }}")


def test_a_path_in_a_place_is_no_condition() -> None:
    assert [] == errors('"net/http.(*conn).serve" { } /bin/bash:main { } bash:builtins/echo.def:12 { }')


def test_names_and_functions_have_hints() -> None:
    assert "names have no '$': write size; declare variables with a type: long size = …;" == name_hint("$size")
    assert "write a name, such as N, and give its value with -D N=…: there is no '$1'" == name_hint("$1")
    assert "the stack is read as memory: *(long *)(sp + 16)" == name_hint("sarg1")
    assert "write comm" == name_hint("execname")
    assert name_hint("size") is None
    assert "write hist(x)" == call_hint("quantize")
    assert call_hint("printf") is None
    assert "write a type, such as long, before the name, which has no '$'" == type_hint("let")
    assert type_hint("leet") is None
