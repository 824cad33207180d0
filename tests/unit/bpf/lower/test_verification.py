"""What the verifier does for handlers of every shape grows with their size, and no faster."""

from __future__ import annotations

import ctypes
import os
import re
from random import Random
from typing import TYPE_CHECKING

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import LoopForm
from dprobes.bpf.map_layouts import MapName
from dprobes.diagnostics import Diagnostics
from dprobes.engines.ebpf.kernel.bpf_objects import ArrayMap, loadable
from dprobes.errors import NotSupportedError
from dprobes.platform.linux.bpf_calls import LogLevel, ProgramFlag, ProgramType, load_program
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from support.ebpf_backend import EbpfRunner, obstacle

if TYPE_CHECKING:
    from dprobes.vm import Point

HEADER = "name = x; vars = 8; gvars = 8; jmpmax = 65535; logmax = 2000; autostacktrace = {trace}\noffset = 0\n"
OPERATIONS = ("push lv, 1", "push 3; add", "push r, eax", "dup 1", "inc gv, 1", "push lv, 0; push lv, 1; div", "xchg",
              "push tsp, 2", "shl", "mul", "log 1", "push mem, u32", "push lv; pop lv", "push 4; shr")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)


def dense_jumps(labels: int) -> str:
    """Return code that goes from any of its blocks to any other."""
    random, lines = Random(labels), []
    for n in range(labels):
        lines.append(f"l{n}: {random.choice(OPERATIONS)}; push lv, {n % 8}")
        lines.append(f"{random.choice(('jz', 'jnz', 'jlt', 'jge'))} l{random.randrange(labels)}; ros 1")
        if not n % 3:
            lines.append(f"loop l{random.randrange(labels)}")
    return "\n".join(lines)


def procedures(count: int) -> str:
    random = Random(count)
    lines = [f"call p{n}" for n in range(count)] + ["exit"]
    for n in range(count):
        first, second = random.randrange(count), random.randrange(count)
        lines.append(f"proc p{n}\npush lv, 1; jz a; call p{first}")
        lines.append(f"a: sx h; push lv, 2; push mem, u32; ux; call p{second}; h: ros 3; ret\nendproc")
    return "\n".join(lines)


SHAPES = {
    "dense jumps": dense_jumps(150),
    "procedures": procedures(50),
    "handlers before": "jmp s\n" + "\n".join(f"h{n}: ros 3; jmp e{n}" for n in range(80)) + "\ns: nop\n"
    + "\n".join(f"sx h{n}; push lv, 1; push lv, 2; div; ros 2; ux; e{n}: nop" for n in range(80)),
    "handlers behind": "\n".join(f"sx h{n}; push lv, 1; push mem, u64; ux; h{n}: nop" for n in range(80)),
    "straight": "\n".join(Random(n).choice(OPERATIONS) for n in range(1725)),
    "nested loops": "".join(f"push 9; a{n}: inc lv, 1\n" for n in range(30))
    + "".join(f"loop a{29 - n}; ros 1\n" for n in range(30)),
    "loops in instructions": "push 1; dup 255; log 256; dup 255; log w, 300; log b, 65535; dup 200\n"
    + "push 5; log lv; log mrf; log str; push 2; dup; push 3; log\n" * 20,
    "heap": "l: nop\n" + "push 16; malloc; dup 1; push 0; push h, u64, 2; dup 1; push 8; pop h, u8, 3; free\n" * 20
    + "loop l",
    "traces": "push 16; push 3; trace lv; log st; push 0; push 3; trace pv; call f\n" * 40
    + "exit\nproc f; log st; ret; endproc",
    "depth unknown": "push lv, 1; restore tsp\n"
    + "\n".join(f"push lv, {n % 8}; jz a{n}; push 1; a{n}: push 2" for n in range(300)),
}  # fmt: skip


def runner_of(text: str, name: str, loops: LoopForm, *, trace: bool = False) -> tuple[EbpfRunner, int, Point]:
    header = HEADER.format(trace="yes" if trace else "no")
    program = parse_source(SourceFile("x.rpn", header + text), Diagnostics(), CompileOptions())
    target = architecture(name)
    image, context = encode(program, target), FakeContext(name)
    point = prepare(program, 0, context)
    return EbpfRunner(image, target, context, loops), image.handlers[0], point


@pytest.mark.parametrize("loops", [LoopForm.MAY_GOTO, LoopForm.ITERATOR])
@pytest.mark.parametrize("name", ["i386", "x86_64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_instruction_is_verified_a_few_times_at_most(shape: str, name: str, loops: LoopForm) -> None:
    runner, start, point = runner_of(SHAPES[shape], name, loops, trace=name == "i386")
    log = ctypes.create_string_buffer(1 << 16)
    with runner:
        lowered = runner.compile(start, point)
        scratch = ArrayMap(lowered.state.size)
        maps = {each: map_.fd for each, map_ in runner._maps.items()} | {MapName.SCRATCH: scratch.fd}
        with loadable(lowered.assembled, maps, ProgramType.SYSCALL, flags=ProgramFlag.SLEEPABLE) as program:
            os.close(load_program(program, log, LogLevel.STATS))
        scratch.close()
    found = re.search(rb"processed (\d+) insns", log.value)
    assert found is not None
    assert int(found[1]) < 4 * len(lowered.assembled.code)


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (800, r"a jump over \d+ eBPF instructions is too long: 32767 is the most"),
        (1_500, "it has more than 65536 eBPF instructions"),
    ],
)
def test_a_handler_that_is_too_large_is_refused(count: int, reason: str) -> None:
    text = "l: nop\n" + "push lv, 1; push lv, 0; div; log 2\n" * count + "loop l"
    runner, start, point = runner_of(text, "x86_64", LoopForm.MAY_GOTO)
    with pytest.raises(NotSupportedError, match=rf"^the handler is too large for eBPF: {reason}$") as caught:
        runner.compile(start, point)
    assert caught.value.hint == "use --engine ptrace, or split the handler"


def test_a_handler_that_goes_on_beyond_all_budgets_is_ended() -> None:
    """``dup`` is a loop of its own: 65535 of these are more passes than an iterator takes."""
    text = "l: push 1; dup 255; ros 255; ros 1; jmp l"
    runner, start, point = runner_of(text, "x86_64", LoopForm.ITERATOR)
    with runner:
        outcome, _ = runner.run(start, point)
    assert outcome.unhandled == ExceptionCode.JMP_MAX


def test_an_error_says_which_instruction_is_too_much() -> None:
    text = "push lv, 1; push lv, 0; div; log 2\n" * 3000
    runner, start, point = runner_of(text, "x86_64", LoopForm.MAY_GOTO)
    with pytest.raises(NotSupportedError) as caught:
        runner.compile(start, point)
    assert caught.value.origin is not None
    assert 0 < caught.value.origin < 3000 * 20
