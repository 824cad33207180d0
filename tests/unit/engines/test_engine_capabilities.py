"""What a program needs of an engine, and how an engine that lacks it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.engine_capabilities import Capability, requirements
from dprobes.engines.engine_choice import refuse_unsupported
from dprobes.engines.engine_registry import engine_row, rows
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.engines.engine_registry import EngineRow
    from dprobes.rpn.rpn_program import Program


def parsed(text: str) -> Program:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("x.rpn", text), diagnostics)
    diagnostics.raise_if_errors()
    return program


def needs(handler: str, arch: str = "x86_64") -> set[Capability]:
    program = parsed(f"name = x\noffset = 0\n{handler}\nexit\n")
    return {requirement.capability for requirement in requirements(program, architecture(arch))}


@pytest.mark.parametrize("register", ["rax", "r15", "eip", "cs", "ss", "arg0", "retval"])
def test_what_every_hit_has_needs_nothing(register: str) -> None:
    assert needs(f"push r, {register}\npush u, cs") == set()


@pytest.mark.parametrize("register", ["ds", "es", "fs", "gs", "fs_base", "gs_base", "1"])
def test_other_segment_registers_are_a_capability(register: str) -> None:
    assert needs(f"push r, {register}") == {Capability.SEGMENT_REGISTER}


@pytest.mark.parametrize(
    ("handler", "capabilities"),
    [
        ("push 1\npop r, ds", {Capability.WRITE_REGISTER, Capability.SEGMENT_REGISTER}),
        ("push 1\npop r, rax", {Capability.WRITE_REGISTER}),
        ("push u, xmm0", {Capability.FLOATING_POINT}),
        ("push 0\nvfyrw", {Capability.VERIFY_WRITE}),
        ("push 0\nvfyr", set()),
        ("push 0\npush 0\nvsa", {Capability.SEGMENTED}),
        ("push 0\npush io, u8", {Capability.IO_PORT}),
        ("push 0\nlin2phys", {Capability.PHYSICAL_MEMORY}),
        ("exit 1", {Capability.HAND_OVER}),
        ("exit 2", set()),
        ("exit 3", {Capability.CORE_DUMP}),
    ],
)
def test_each_instruction_names_all_that_it_needs(handler: str, capabilities: set[Capability]) -> None:
    assert needs(handler) == capabilities


@pytest.mark.parametrize("statement", ["pop mem, u32", "pop r, rax"])
@pytest.mark.parametrize("header", ["name = vmlinux\nmodtype = kernel", "name = dummy\nmodtype = kmod"])
def test_who_writes_in_the_kernel_needs_an_engine_for_that(header: str, statement: str) -> None:
    program = parsed(f"{header}\noffset = f\npush 1\npush 2\n{statement}\nexit\n")
    needed = tuple(requirements(program, architecture("x86_64")))
    assert Capability.KERNEL_WRITE in {requirement.capability for requirement in needed}
    diagnostics = Diagnostics()
    ebpf = engine_row("ebpf")
    assert ebpf.candidacy is not None
    able = replace(ebpf, capabilities=ebpf.capabilities | ebpf.candidacy.found_by_trying)
    refuse_unsupported(needed, able, diagnostics)
    (found,) = diagnostics
    assert found.message == (
        f"'{statement}' needs writing registers or memory at a hit in the kernel, which the ebpf engine lacks"
    )
    assert found.hint == "use --engine gdb=ENDPOINT, with the stub of such a machine or process"
    refuse_unsupported(needed, engine_row("gdb"), diagnostics)
    assert len(list(diagnostics)) == 1


def test_the_documentation_says_what_each_engine_can() -> None:
    text = (Path(__file__).parents[3] / "docs/reference/support.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    start = next(number for number, line in enumerate(lines) if line[0] == "a program with")
    names = [name.strip("`") for name in lines[start][1:]]
    assert sorted(names) == sorted(row.name for row in rows())
    said = {line[0]: dict(zip(names, line[1:], strict=True)) for line in lines[start + 1 : start + 1 + len(Capability)]}
    assert said == {each.value: {row.name: _ability(row, each) for row in rows()} for each in Capability}


def _ability(row: EngineRow, capability: Capability) -> str:
    if capability in row.capabilities:
        return "yes"
    is_tried = row.candidacy is not None and capability in row.candidacy.found_by_trying
    return "[kernel](#capabilities-that-depend-on-the-kernel)" if is_tried else "no"


def test_a_refusal_names_the_engine_that_can() -> None:
    diagnostics = Diagnostics()
    program = parsed("name = x\noffset = 0\npush r, ds\nexit\n")
    needed = tuple(requirements(program, architecture("x86_64")))
    refuse_unsupported(needed, engine_row("ptrace"), diagnostics)
    assert not list(diagnostics)
    refuse_unsupported(needed, replace(engine_row("ebpf"), name="other", capabilities=frozenset()), diagnostics)
    (found,) = diagnostics
    assert found.message == (
        "'push r, ds' needs the segment registers other than cs and ss, which the other engine lacks"
    )
    assert found.hint == "use --engine ptrace with -c COMMAND or -p PID"
