"""Keyed tables in eBPF: what becomes of a key that another CPU adds at the same time."""

from __future__ import annotations

import pytest

from dprobes.bpf.bpf_instructions import EXISTS, Class
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.rpn.instruction_encoding import encode
from dprobes.source_text import SourceFile
from dprobes.testing import FakeContext, prepare
from support.ebpf_backend import EbpfRunner, obstacle

TALLY = "name = x; table = seen, count, word; offset = 0; push 7; tally seen; exit"


def test_a_key_that_is_there_already_is_known_by_the_low_half_of_the_result() -> None:
    """Kernels before Linux 6.4 return 0x00000000ffffffef, not -17, for a key that was added meanwhile."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    context = FakeContext("x86_64")
    program = parse_source(SourceFile("x.rpn", TALLY), Diagnostics(), CompileOptions())
    image = encode(program, context.architecture)
    with EbpfRunner(image, context.architecture, context) as runner:
        code = runner.compile(image.handlers[0], prepare(program, 0, context)).assembled.code
    assert [insn.opcode & 7 for insn in code if insn.imm == EXISTS] == [Class.JMP32]
