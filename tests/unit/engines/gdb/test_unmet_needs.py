"""What a machine, its stub or a process lacks is an error at the instruction that needs it."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.gdb.stub_registers import Registers, processor_of, registers_of
from dprobes.engines.gdb.unmet_needs import refuse_for_process, refuse_lacking
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.rpn_program import Program
from dprobes.source_text import SourceFile

ARCHITECTURE = architecture("x86_64")


def parsed(handler: str, head: str = "name = vmlinux\nmodtype = kernel") -> Program:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p.rpn", f"{head}\noffset = 1\n{handler}\nexit\n"), diagnostics)
    diagnostics.raise_if_errors()
    assert isinstance(program, Program)
    return program


def refuse(handler: str, lacks: str = "") -> None:
    """Look at a handler on a machine whose stub describes the general registers only."""
    processor = processor_of(ARCHITECTURE)
    assert processor is not None
    description = processor.default_description()
    names = registers_of(ARCHITECTURE, processor, description)
    registers = Registers(description, bytes(1024), "little")
    refuse_lacking(
        parsed(handler),
        ARCHITECTURE,
        names,
        registers,
        "fake",
        has_monitor=lacks != "monitor",
        has_physical=lacks != "physical",
        has_kernel=lacks != "kernel",
        has_programs=lacks != "programs",
    )


def test_what_a_machine_with_a_monitor_has() -> None:
    refuse("push r, rip; push r, dr7; push r, tr; push r, gdtr; log kstack; log ustack; push 0x60; push io, u8")
    refuse("push 0; lin2phys; push phys, u64; log 1")


@pytest.mark.parametrize(
    ("handler", "lacks", "message"),
    [
        ("log kstack", "kernel", "'log kstack' needs a kernel that is known, which a machine as such has not"),
        ("log ustack", "programs", "'log ustack' needs a kernel whose processes are known, as those since Linux 6.1"),
        ("push 0x60; push io, u8", "monitor", "the stub fake has no monitor, which 'push io, u8' needs"),
        ("push 0; lin2phys", "physical", "the stub fake shows no physical memory, which 'lin2phys' needs"),
        ("push r, dr7", "monitor", "the stub fake has no register 'dr7'"),
        ("push r, tr", "monitor", "the stub fake has no register 'tr'"),
        ("push r, cr3", "", "the stub fake has no register 'cr3'"),
        ("exit 3", "", "'exit 3' writes the core of a process, but the stub fake serves a machine"),
    ],
)
def test_what_is_lacking_is_refused_at_its_place(handler: str, lacks: str, message: str) -> None:
    if lacks:
        refuse(handler)
    with pytest.raises(SourceError) as caught:
        refuse(handler, lacks)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message == message
    assert str(caught.value).startswith("p.rpn:4:")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ("push r, cr3", "'push r, cr3' needs"),
        ("push task", "'push task' needs"),
        ("push 0x60; push io, u8", "'push io, u8' needs"),
        ("log kstack", "'log kstack' needs"),
        ("push 0; push phys, u8", "'push phys, u8' needs physical memory"),
    ],
)
def test_what_processes_do_not_have(handler: str, message: str) -> None:
    program = parsed(handler, "name = x")
    with pytest.raises(SourceError, match=message) as caught:
        refuse_for_process(program, ARCHITECTURE)
    assert "which processes behind a stub do not have" in str(caught.value)


def test_processes_have_no_samplers() -> None:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p.rpn", "name = x\nsampler = 9hz\nexit\n"), diagnostics)
    with pytest.raises(SourceError, match="'sampler =' needs sampler probes, which processes behind a stub do not"):
        refuse_for_process(program, ARCHITECTURE)


def test_what_processes_have() -> None:
    refuse_for_process(parsed("push r, rip; log ustack; push tid; log 2; exit 3", "name = x"), ARCHITECTURE)
