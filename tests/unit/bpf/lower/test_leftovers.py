"""No hit sees what another one left in its state, and handlers that cannot look there pay nothing for that."""

from __future__ import annotations

import itertools

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_instructions import Helper
from dprobes.bpf.lower.handler_flow import analyse, may_read_unwritten
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from dprobes.vm import Interpreter, Outcome
from support.ebpf_backend import EbpfRunner, obstacle

NAMES = pytest.mark.parametrize("name", ["i386", "x86_64"])

LOOKS_AROUND = {
    "log buffer": "push 100; pop lp; push 7; log 1",
    "log buffer, back and forth": "push 7; push 8; push 9; log 3; push 0; pop lp; push 5; log b, 1; push 90; pop lp",
    "all of the log buffer": "push 1024; pop lp; push 0; pop lp; push 200; pop lp",
    "heap": "push 64; malloc; push 0; push h, u8, 64; log b, 64",
    "heap that was freed": "push 64; malloc; dup 1; push 0; push h, u16, 32; log w, 32; free; push 200; malloc; "
    "push 0; push h, u32, 40; log d, 40",
    "whole heap": "push 1000; malloc; push 900; push h, u8, 60; log b, 60",
    "cells below the top": "push 7; push tsp, -5; push tsp, 900; push 17; push tsp; push sbp, -300; log 5",
    "an empty stack": "log 3; push 2; add; log 1",
    "a moved stack pointer": "push 500; restore tsp; log 10",
    "more cells than there are": "push 900; log",
    "cells behind dropped ones": "push 3; ros 9; log 4",
    "a stack trace": "push 600; push 20; call f; exit\nproc f; push 600; push 20; trace pv; log st; ret; endproc\n",
    "trace buffer": "push 100; pop stp",
    "trace buffer, back and forth": "log st; push 200; pop stp; purge st; push 150; pop stp; log st; push 220; pop stp",
}
LOOKS_AT_ITS_OWN = {
    "cells": "push 7; push r, eax; push r, ecx; xchg; sub; push tsp, 1; push 1; push tsp; log 3",
    "a counted log": "push 4; push 5; push 2; log",
    "a loop": "push 3\nl: push r, eax; log 1; loop l; push 0; pop lv, 0",
    "ways that meet": "push lv, 0; jz l; push 1; jmp m\nl: push 2\nm: log 2",
    "an exception": "sx l; push 0; push mem, u32; log 1; exit\nl: log 3",
    "a raised exception": "sx l; push 1; push 2; push 0x8000; rx; exit\nl: log 3",
    "a procedure": "push 7; call f; log 1; call f; log 1; exit\nproc f; push 5; log 1; push 6; ret; endproc\n",
    "cells above the base": "push 7; push 8; push sbp, -1; push 9; pop sbp, -2; push -2; push sbp; copy sbp, -1; log 4",
    "cells above the base, on two ways": "push 7; push r, eax; jz l; push sbp, -1; pop lv, 0\nl: push sbp, -1; log 2",
    "memory": "push r, esp; push mem, u64; push r, esp; push 16; xchg; log mrf; push 9; push r, esp; log str",
}


def encoded(handler: str, name: str) -> tuple:  # type: ignore[type-arg]
    header = "name = x; vars = 1; ex_logmax = 300; heapmax = 1024"
    text = f"{header}\noffset = 0; ex_mask = 0x1fff; heap = 1024\n{handler}\n"
    program = parse_source(SourceFile("x.rpn", text), Diagnostics(), CompileOptions())
    return program, encode(program, architecture(name))


def outcomes(handler: str, name: str) -> tuple[Outcome, Outcome]:
    """Return what the interpreter makes of a handler, and the kernel in a state full of what others left."""
    program, image = encoded(handler, name)
    memory = {0x1000: b"name\0".ljust(64, b"x")}
    worlds = [FakeContext(name, memory=memory, registers={"esp": 0x1000}) for _ in range(2)]
    point, _ = (prepare(program, 0, world) for world in worlds)
    expected = Interpreter(image, architecture(name)).run(image.handlers[0], point, worlds[0])
    with EbpfRunner(image, architecture(name), worlds[1], keeps_stack=False) as runner:
        return expected, runner.run(image.handlers[0], point)[0]


@pytest.fixture
def _kernel() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


@NAMES
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("handler", LOOKS_AROUND.values(), ids=list(LOOKS_AROUND))
def test_what_a_hit_has_not_written_is_zero(handler: str, name: str) -> None:
    expected, found = outcomes(handler, name)
    assert found == expected
    assert 0xA5 not in found.log + found.trace


@NAMES
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("handler", LOOKS_AT_ITS_OWN.values(), ids=list(LOOKS_AT_ITS_OWN))
def test_what_it_has_written_is_there(handler: str, name: str) -> None:
    expected, found = outcomes(handler, name)
    assert found == expected


def clearings(handler: str, name: str) -> int:
    """Return how often a handler as eBPF clears memory: where it asks for what is at the last address."""
    program, image = encoded(handler, name)
    context = FakeContext(name)
    point = prepare(program, 0, context)
    code = EbpfRunner(image, architecture(name), context, keeps_stack=False).compile(image.handlers[0], point)
    insns = code.assembled.code
    return sum(
        insn.imm == -1 and insn.dst == 3 and following.imm == Helper.PROBE_READ_USER
        for insn, following in itertools.pairwise(insns)
    )


@NAMES
@pytest.mark.usefixtures("_kernel")
def test_only_who_may_look_at_something_else_pays_for_it(name: str) -> None:
    assert {title: clearings(handler, name) for title, handler in LOOKS_AT_ITS_OWN.items()} == dict.fromkeys(
        LOOKS_AT_ITS_OWN, 0
    )
    assert all(clearings(handler, name) for handler in LOOKS_AROUND.values())


@pytest.mark.parametrize(
    ("handler", "answer"),
    [
        ("push 1; push 2; push 3; log", True),
        ("push 1; push 1; xchg; log", False),
        ("push lv, 0; log", True),
        ("push 1; push -1; log", True),
        ("push 1; dup 200; log 201", True),  # more than is followed
        ("push 1; dup 30; log 31", False),
        ("push 2; push 9; dup; log 1", False),
        ("push 1; push lv, 0; jz l; ros 1\nl: ros 1; log 1", True),
        ("push 1; ros 3; push 2; log 1", False),
        ("push 1; push 2; push tsp, 2", True),
        ("push 1; push 2; push tsp, 1", False),
        ("push 5; push 1; push tsp", True),
        ("push 5; push 0; push tsp; log 2", False),
        ("push 1; pop tsp, 3", False),
        ("push 1; push 2; push 1; pop tsp, 1; log", True),  # the count has been overwritten
        ("call f; log 1; exit\nproc f; push 1; ret; endproc\n", False),
        ("call f; log 1; exit\nproc f; push 1; ros 1; ret; endproc\n", True),
        ("call f; exit\nproc f; push 1; push lv, 0; jz l; call f\nl: ros 2; ret; endproc\n", False),
        ("sx l; exit\nl: log 4", True),
        ("sx l; push 1; push 2; rx; exit\nl: log 3", True),
        ("push r, cpuid", True),
        ("save tsp; restore tsp; push 1; log 1", False),
        ("save tsp; push 1; xchg; restore tsp; log 1", True),
        ("push 1; trace pv", True),
        ("push 1; push sbp, -1", False),
        ("push 1; push sbp, -2", True),
        ("push 1; push sbp, 0", True),
        ("push 1; push lv, 0; jz l; push 2\nl: push sbp, -1", True),  # nobody knows how many cells there are
        ("push 1; save tsp; restore sbp; push sbp, -1", True),
        ("push 0; push 0; push 1; push 5; dup; ros 1; push tsp", True),  # what was copied is the number
    ],
)
def test_what_may_read_a_cell_that_was_never_written(handler: str, answer: bool) -> None:
    program, image = encoded(handler, "x86_64")
    target = architecture("x86_64")
    flow = analyse(image, target, image.handlers[0], program.logmax)
    assert may_read_unwritten(image, target, flow) is answer
