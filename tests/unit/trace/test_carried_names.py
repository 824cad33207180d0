"""The names in trace files: each thing is told once, what comes back is what was told, wrong frames are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.errors import FormatError
from dprobes.target.code_names import CodeName, InlinedCode, LocatedCode, LocatedFunction, MappedCode
from dprobes.trace import carried_names as module
from dprobes.trace.carried_names import CarriedNames, NameRegister
from dprobes.trace.trace_frames import FrameKind, json_frame
from dprobes.trace.trace_reader import TraceParser
from support.trace_files import header, program, records

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBC = MappedCode(0x7000_0000, 0x7010_0000, 0x2000, "libc.so.6", "ab12")
MALLOC = LocatedFunction(0x2100, 0x2200, "malloc")
FREE = LocatedFunction(0x2200, 0x2300, "free")
KERNEL = MappedCode(0xFFFFFFFF81000100, 0xFFFFFFFF81000200, 0xFFFFFFFF81000100, "vmlinux", "")
VFS_READ = LocatedFunction(KERNEL.start, KERNEL.end, "vfs_read")


def told(register: NameRegister, *found: LocatedCode, has_names: bool = True) -> dict[str, Any] | None:
    telling = register.telling(found)
    assert telling is not None
    body = telling(has_names)
    return None if body is None else json.loads(json.dumps(body))


def carried(*bodies: dict[str, Any] | None) -> CarriedNames:
    names = CarriedNames()
    for body in bodies:
        if body is not None:
            names.add(body)
    return names


def test_what_was_told_names_all_addresses_of_the_functions() -> None:
    body = told(NameRegister(), LocatedCode(42, 5, LIBC, MALLOC), LocatedCode(None, 0, KERNEL, VFS_READ))
    names = carried(body)
    start = LIBC.start + 0x100
    assert names.name_of(start, 42, 9) == CodeName("malloc", 0, "libc.so.6")
    assert names.name_of(start + 0xFF, 42, None) == CodeName("malloc", 0xFF, "libc.so.6")
    assert names.name_of(start + 0x100, 42, 9) == CodeName("", 0x2200, "libc.so.6")
    assert names.name_of(LIBC.end, 42, 9) is None
    assert names.name_of(start, 43, 9) is None
    assert names.name_of(start, 42, 4) is None  # it executed something else then
    assert names.name_of(KERNEL.start + 4, None, 1) == CodeName("vfs_read", 4, "vmlinux")
    assert names.name_of(KERNEL.end, None, 1) is None


def test_each_thing_is_told_once() -> None:
    register = NameRegister()
    malloc, free = LocatedCode(42, 5, LIBC, MALLOC), LocatedCode(42, 5, LIBC, FREE)
    first = told(register, malloc, malloc)
    assert first == {
        "modules": [[0, "libc.so.6", "ab12"]],
        "mappings": [[42, 5, LIBC.start, LIBC.end, LIBC.offset, 0]],
        "functions": [[0, 0x2100, 0x2200, "malloc"]],
    }
    assert told(register, malloc) is None
    assert told(register, malloc, free) == {"functions": [[0, 0x2200, 0x2300, "free"]]}
    other = LocatedCode(43, 6, LIBC._replace(start=0x1000, end=0x2000), None)
    assert told(register, other) == {"mappings": [[43, 6, 0x1000, 0x2000, LIBC.offset, 0]]}
    assert told(register, malloc, has_names=False) == first
    assert register.telling([]) is None


def test_a_function_of_unknown_size_grows() -> None:
    register = NameRegister()
    bodies = [
        told(register, LocatedCode(1, 0, LIBC, LocatedFunction(0x2100, end, "label"))) for end in (0x2104, 0x2110)
    ]
    names = carried(*bodies)
    assert names.name_of(LIBC.start + 0x10C, 1, None) == CodeName("label", 0xC, "libc.so.6")


def test_a_process_that_executes_another_program_has_other_names() -> None:
    register = NameRegister()
    other = MappedCode(LIBC.start, LIBC.end, 0, "other.so", "")
    names = carried(
        told(register, LocatedCode(42, 5, LIBC, MALLOC)),
        told(register, LocatedCode(42, 70, other, LocatedFunction(0x100, 0x180, "open"))),
    )
    address = LIBC.start + 0x100
    assert [names.name_of(address, 42, time) for time in (5, 69, 70, None)] == [
        CodeName("malloc", 0, "libc.so.6"), CodeName("malloc", 0, "libc.so.6"),
        CodeName("open", 0, "other.so"), CodeName("open", 0, "other.so"),
    ]  # fmt: skip


def test_inlined_calls_have_names_too() -> None:
    parts = (
        InlinedCode(0x2110, 0x2140, "outer"),
        InlinedCode(0x2120, 0x2130, "inner"),
        InlinedCode(0x2190, 0x21A0, "other"),
    )
    register = NameRegister()
    body = told(register, LocatedCode(42, 5, LIBC, MALLOC._replace(inlined=parts)))
    assert body is not None
    assert body["inlined"] == [
        [0, 0x2100, 0x2110, 0x2140, "outer"],
        [0, 0x2100, 0x2120, 0x2130, "inner"],
        [0, 0x2100, 0x2190, 0x21A0, "other"],
    ]
    names = carried(body)
    found = [names.name_of(LIBC.start + 0x100 + distance, 42, None) for distance in (0, 0x12, 0x22, 0x30, 0x40)]
    assert [name and name.inlined for name in found] == [(), ("outer",), ("inner", "outer"), ("outer",), ()]
    assert told(register, LocatedCode(42, 5, LIBC, MALLOC._replace(inlined=parts))) is None


ranges = st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(ranges, max_size=12, unique_by=lambda pair: pair[0]), st.integers(0, 270))
def test_of_functions_in_functions_the_one_that_starts_last_counts(found: Sequence[tuple[int, int]], at: int) -> None:
    mapped = MappedCode(0, 1000, 0, "m", "")
    register = NameRegister()
    bodies = [told(register, LocatedCode(1, 0, mapped, LocatedFunction(a, b, f"f{a}"))) for a, b in found]
    expected = max((a for a, b in found if a <= at < b), default=None)
    name = carried(told(register, LocatedCode(1, 0, mapped, None)), *bodies).name_of(at, 1, None)
    assert name == (CodeName("", at, "m") if expected is None else CodeName(f"f{expected}", at - expected, "m"))


def test_a_file_is_told_no_more_than_readers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOLD_MAX", 10)
    register = NameRegister()
    found = [LocatedCode(1, 0, LIBC, LocatedFunction(n, n + 1, f"f{n}")) for n in range(100)]
    body = told(register, *found)
    assert body is not None
    assert len(body["functions"]) == 9
    monkeypatch.setattr(module, "_KNOWN_MAX", 5)
    names = carried({"modules": [[n, "m", ""] for n in range(9)], "mappings": [[1, 0, 0, 9, 0, 0]]})
    assert names.name_of(1, 1, None) is None


# In files


def test_names_are_those_behind_one_header() -> None:
    body = told(NameRegister(), LocatedCode(42, 5, LIBC, MALLOC))
    assert body is not None
    parser = TraceParser("trace.dpt")
    data = (
        header() + program(1) + json_frame(FrameKind.NAMES, body) + records(1, (0, b"x"))
        + header() + program(1) + records(1, (0, b"y"))
    )  # fmt: skip
    first, second = parser.feed(data)
    assert first.program.names.name_of(LIBC.start + 0x101, 42, 9) == CodeName("malloc", 1, "libc.so.6")
    assert second.program.names.name_of(LIBC.start + 0x101, 42, 9) is None


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"modules": 1}, "'modules' is not a list of lists of 3"),
        ({"modules": [[0, "a"]]}, "'modules' is not a list of lists of 3"),
        ({"modules": [[0, "a", None]]}, "a name is not text, or too long"),
        ({"modules": [[0, "a" * 70_000, ""]]}, "a name is not text, or too long"),
        ({"modules": [[-1, "a", ""]]}, "-1 is not a number between 0 and 4294967295"),
        ({"mappings": [[1, 0, 0, 1 << 65, 0, 0]]}, f"{1 << 65} is not a number between 0 and {1 << 64}"),
        ({"mappings": [[True, 0, 0, 1, 0, 0]]}, "True is not a number between 0 and 4294967295"),
        ({"mappings": [[1, "x", 0, 1, 0, 0]]}, f"'x' is not a number between 0 and {(1 << 64) - 1}"),
        ({"functions": [[0, 0, 1, []]]}, "a name is not text, or too long"),
        ({"functions": [{}]}, "'functions' is not a list of lists of 4"),
    ],
)
def test_wrong_frames_are_refused(said: dict[str, Any], problem: str) -> None:
    data = header() + json_frame(FrameKind.NAMES, said)
    with pytest.raises(FormatError) as raised:
        list(TraceParser("trace.dpt").feed(data))
    assert (
        raised.value.message
        == f"a frame of 'trace.dpt' does not hold what it must: {problem} (at byte {len(header())})"
    )
    assert raised.value.offset == len(header())


def test_modules_that_nobody_has_told_are_shown_by_their_number() -> None:
    names = carried({"mappings": [[1, 0, 0x1000, 0x2000, 0, 7]], "functions": [[7, 0, 0x10, "f"]]})
    assert names.name_of(0x1004, 1, None) == CodeName("f", 4, "module 7")
