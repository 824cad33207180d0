"""What a program's watchpoints become in a module's file, and what the processor can watch."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.resolve.codeless_probes import length_problem, resolve_watchpoints
from dprobes.resolve.probepoints import ProbeState, WatchedMemory
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.rpn_program import Access
from dprobes.source_text import SourceFile
from dprobes.target.probed_module import Module

if TYPE_CHECKING:
    from dprobes.resolve.probepoints import Probepoint


LENGTHS = "the processor watches 1, 2, 4 or 8 bytes"
ALIGNED = "the processor watches {0} bytes only at multiples of {0}"
EXECUTE = "an execute watchpoint is one byte long, the first one of the instruction"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    directory = tmp_path_factory.mktemp("watched")
    source = directory / "watched.s"
    source.write_text(
        ".globl code, data, odd\n.type code, @function\ncode: nop\nret\n.size code, . - code\n"
        ".data\n.balign 16\n.type data, @object\ndata: .zero 16\n.size data, 16\n"
        ".byte 0\n.type odd, @object\nodd: .zero 8\n.size odd, 8\n"
    )
    library = directory / "watched.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    return Module.load(library)


def resolved(module: Module, *points: tuple[str, str]) -> tuple[tuple[Probepoint, ...], Diagnostics]:
    text = "name = watched\n" + "".join(f"address = {p}\nwatchpoint = {a}\nexit\n" for p, a in points)
    diagnostics = Diagnostics()
    return resolve_watchpoints(
        parse_source(SourceFile("watched.rpn", text), diagnostics), module, diagnostics
    ), diagnostics


def test_a_range_is_named_by_its_last_byte(module: Module) -> None:
    data = module.address_of("data")
    (one, eight, inside, number), diagnostics = resolved(
        module, ("data", "w"), ("data : data + 7", "rw"), ("data + 4 : data + 5", "w"), ("0x1000:0x1003", "w")
    )
    assert (one.memory, one.where) == (WatchedMemory(data, 1, False, Access.WRITE), "data")
    assert eight.memory == WatchedMemory(data, 8, False, Access.READ_WRITE)
    assert (inside.memory, inside.where) == (WatchedMemory(data + 4, 2, False, Access.WRITE), "data+0x4")
    assert (number.memory, number.where) == (WatchedMemory(0x1000, 4, True, Access.WRITE), "0x1000")
    assert not list(diagnostics)


@pytest.mark.parametrize(
    ("place", "access", "message", "hint"),
    [
        ("data : data + 2", "w", f"3 bytes at {{data:#x}}, but {LENGTHS}", "data : data + 0x3"),
        ("data : data + 15", "w", f"16 bytes at {{data:#x}}, but {LENGTHS}", "data : data + 0x7"),
        ("odd : odd + 1", "rw", f"2 bytes at {{odd:#x}}, but {ALIGNED.format(2)}", "odd - 0x1 : odd + 0x2"),
        ("odd : odd + 7", "w", f"8 bytes at {{odd:#x}}, but {ALIGNED.format(8)}", "odd"),
        ("code : code + 1", "x", f"2 bytes at {{code:#x}}, but {EXECUTE}", "code"),
    ],
)
def test_what_the_processor_cannot_watch_is_said_with_what_it_can(
    module: Module, place: str, access: str, message: str, hint: str
) -> None:
    (watchpoint,), diagnostics = resolved(module, (place, access))
    assert watchpoint.state is ProbeState.WATCHPOINT_LEN_INVALID
    (diagnostic,) = diagnostics
    addresses = {name: module.address_of(name) for name in ("code", "data", "odd")}
    assert diagnostic.message == f"WATCHPOINT_LEN_INVALID: {message.format(**addresses)}; not inserted"
    assert diagnostic.hint == f"write 'address = {hint}'"
    (fixed,), after = resolved(module, (hint, access))
    assert fixed.state is ProbeState.COMPILED
    assert not list(after)


def test_the_fifth_has_no_register_but_invalid_ones_need_none(module: Module) -> None:
    places = [("data", "w"), ("data+1", "w"), ("data:data+2", "w"), ("data+2", "w"), ("data+3", "w"), ("data+4", "w")]
    watchpoints, diagnostics = resolved(module, *places)
    good, bad, none = ProbeState.COMPILED, ProbeState.WATCHPOINT_LEN_INVALID, ProbeState.DEBUGREG_UNAVAIL
    assert [w.state for w in watchpoints] == [good, good, bad, good, good, none]
    assert [d.message for d in diagnostics][1] == (
        "DEBUGREG_UNAVAIL: the processor has 4 debug registers, and 4 watchpoints come before this one; not inserted"
    )


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([("data : 0x2000", "w")], "one of the addresses is a number, the other one a symbol of the module"),
        ([("odd : data", "w")], "the upper address is below the lower one"),
        ([("nothere", "w")], "'{path}' has no symbol 'nothere'"),
        ([("data", "w"), ("data:data", "w")], "two watchpoints of the same kind at address {data:#x}"),
    ],
)
def test_what_means_nothing_is_an_error(module: Module, places: list[tuple[str, str]], message: str) -> None:
    _, diagnostics = resolved(module, *places)
    assert diagnostics.has_errors
    (diagnostic,) = diagnostics
    assert diagnostic.message == message.format(path=module.path, data=module.address_of("data"))


def test_each_of_many_equal_watchpoints_is_one_error(module: Module) -> None:
    _, diagnostics = resolved(module, *[("data", "w")] * 4)
    assert [diagnostic.message for diagnostic in diagnostics] == [
        f"two watchpoints of the same kind at address {module.address_of('data'):#x}"
    ] * 3


def test_the_processor_watches_few_lengths_where_they_are_aligned() -> None:
    assert length_problem(Access.WRITE, 0x1000, 8) is None
    assert length_problem(Access.WRITE, 0x1001, 1) is None
    assert length_problem(Access.EXECUTE, 0x1001, 1) is None
    assert length_problem(Access.WRITE, 0x1000, 3) == "the processor watches 1, 2, 4 or 8 bytes"
    assert length_problem(Access.READ_WRITE, 0x1004, 8) == "the processor watches 8 bytes only at multiples of 8"
    assert (
        length_problem(Access.EXECUTE, 0x1000, 2)
        == "an execute watchpoint is one byte long, the first one of the instruction"
    )
