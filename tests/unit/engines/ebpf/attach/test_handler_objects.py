"""What the verifier refuses is told by the line of the source that the code was made for."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Register
from dprobes.bpf.lower.lowering_request import Lowered, Placement
from dprobes.diagnostics import Diagnostics
from dprobes.dpc.compiler import compile_source
from dprobes.engines.ebpf.attach import handler_objects
from dprobes.engines.ebpf.attach.handler_objects import load_handler, rejection, source_place, span_in
from dprobes.errors import EngineError, InternalError
from dprobes.platform.linux.bpf_calls import AttachType
from dprobes.rpn.compilation_passes import CompileOptions
from dprobes.source_text import SourceFile, Span

if TYPE_CHECKING:
    from dprobes.platform.linux import bpf_calls

TEXT = 'static long n;\nlibc.so.6:abs(int x) {\n    n += x;\n    if (n > 5) printf("%d", n);\n}\n'
SOURCE = SourceFile("slow.dpc", TEXT)
PLACES = {4: Span(SOURCE, TEXT.index("n += x"), TEXT.index("n += x") + 6)}


def code_of(origins: list[int]) -> Lowered:
    """Return code of as many instructions, the last one of which reads a register that nothing is in."""
    asm = Assembler()
    for origin in origins[:-1]:
        asm.origin = origin
        asm.mov(Register.R0, 0)
    asm.origin = origins[-1]
    asm.mov(Register.R0, Register.R7)
    asm.exit()
    return Lowered(asm.assemble(), cast("Any", None), sleepable=False, word_size=8)


@pytest.mark.parametrize(
    ("log", "place"),
    [
        ("0: (b7) r0 = 0\n1: (bf) r0 = r7\nR7 !read_ok\n", PLACES[4]),
        ("0: (b7) r0 = 0\n", None),  # nothing was written for an instruction yet
        ("2: (95) exit\nwhat it says\n", PLACES[4]),  # of the instruction before it
        ("99: (95) exit\n", None),
        ("R1 type=ctx\n", None),
        ("", None),
    ],
)
def test_the_last_instruction_in_the_log_is_the_one(log: str, place: Span | None) -> None:
    assert source_place(log, code_of([-1, 4]), PLACES.get) == place


def test_a_limit_of_the_verifier_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "0: (b7) r0 = 0\n1: (bf) r0 = r7\nBPF program is too large. Processed 1000001 insn\n"
    monkeypatch.setattr(handler_objects, "verifier_log", lambda _program, _level: log)
    error = OSError(errno.E2BIG, os.strerror(errno.E2BIG))
    found = rejection(cast("bpf_calls.Program", None), code_of([-1, 4]), "0,3", error, PLACES.get)
    assert type(found) is EngineError
    said = "the handler of 0,3 is too complex for the kernel's verifier, which gave up after 1000000 instructions"
    assert found.message == f"{said} at slow.dpc:3"
    assert found.hint == "use --engine ptrace, or split the handler"


def test_places_are_those_of_the_encoded_program() -> None:
    (program,) = compile_source(SOURCE, Diagnostics(), CompileOptions()).programs
    lines = {}
    for size in (4, 8):
        found = [span_in(program, size, offset) for offset in range(200)]
        lines[size] = [span.line for span in found if span is not None and span.file.name == "slow.dpc"]
    assert set(lines[4]) == set(lines[8]) == {3, 4}
    assert span_in(program, 8, 10_000) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="root may load programs")
def test_the_kernel_refuses_a_handler_by_its_line() -> None:
    def load() -> None:
        load_handler(code_of([-1, 4]), Placement.BREAKPOINT, {}, AttachType.NONE, "0,3", None, PLACES.get)

    with pytest.raises(InternalError) as caught:
        load()
    pattern = r"the kernel refuses the handler of 0,3 at slow\.dpc:3; its log is in '(.*)'"
    found = re.fullmatch(pattern, caught.value.message)
    assert found is not None
    path = Path(found[1])
    try:
        assert "R7 !read_ok" in path.read_text()
        assert "\n1: 0x4\n" in path.read_text()
    finally:
        path.unlink()
