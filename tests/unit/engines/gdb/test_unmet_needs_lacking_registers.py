"""What a stub lacks is an error at the instruction that names it."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.engines.gdb.stub_registers import Registers, processor_of, registers_of
from dprobes.engines.gdb.unmet_needs import refuse_lacking_registers
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile

ARCHITECTURE = architecture("ppc")


def refuse(handler: str, size: int = 412) -> None:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p.rpn", f"name = x\noffset = 1\n{handler}\n"), diagnostics)
    processor = processor_of(ARCHITECTURE)
    assert processor is not None
    description = processor.default_description()
    names = registers_of(ARCHITECTURE, processor, description)
    registers = Registers(description, bytes(size), "big", lambda number: bytes(4) if number == 68 else None)
    refuse_lacking_registers(program, ARCHITECTURE, names, registers, "fake")


def test_a_register_that_is_not_described() -> None:
    with pytest.raises(SourceError) as caught:
        refuse("push r, mq\npush r, arg0\npush u, dar")
    assert str(caught.value) == (
        "p.rpn:3:9: error: the stub fake has no register 'mq'\n"
        "    push r, mq\n"
        "            ^~\n"
        "p.rpn:5:9: error: the stub fake has no register 'dar'\n"
        "    push u, dar\n"
        "            ^~~"
    )


def test_a_register_that_is_described_and_not_told() -> None:
    refuse("push r, lnk\npush r, ctr")
    refuse("push r, ctr", size=400)  # it is told alone
    with pytest.raises(SourceError, match="has no register 'lnk'"):
        refuse("push r, lnk", size=396)
