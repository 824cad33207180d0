"""Where a handler in a process says how it has ended."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.bpf.bpf_assembler import Assembler
from dprobes.bpf.bpf_instructions import Class, Mode, Register, Size
from dprobes.bpf.lower.hosts.handler_host import CONTEXT
from dprobes.bpf.lower.hosts.place_hosts import InlineHost
from dprobes.bpf.lower.lowered_handler import host_of
from dprobes.bpf.lower.lowering_request import Request
from dprobes.bpf.map_layouts import INLINE_ENDING, SKIPPED

WORD = Class.ST | Mode.MEM | Size.DW, Class.STX | Mode.MEM | Size.DW


def written(method: str) -> list[tuple[int, int, int]]:
    """Return (offset, register or 0, number) of what is written to the context."""
    asm = Assembler()
    host = InlineHost(asm, architecture("x86_64"), Request(diverts=True), uses_ip=False, uses_ids=False)
    getattr(host, method)()
    assert all(insn.dst == CONTEXT.value for insn in asm.code)
    assert {insn.opcode for insn in asm.code} <= set(WORD)
    return [(insn.off, insn.src, insn.imm) for insn in asm.code]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("begin", [(INLINE_ENDING, 0, 0)]),
        ("stop_process", [(INLINE_ENDING, Register.R8.value, 0)]),
        ("override_return", [(80, Register.R2.value, 0), (INLINE_ENDING, 0, SKIPPED)]),
    ],
)
def test_it_is_in_the_context(method: str, words: list[tuple[int, int, int]]) -> None:
    assert written(method) == words


def test_only_handlers_that_divert_have_it() -> None:
    assert host_of(Request(diverts=True)) is InlineHost
    assert host_of(Request()) is not InlineHost
    assert host_of(Request(diverts=True, in_kernel=True)) is not InlineHost
