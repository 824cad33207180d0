"""Code and limits that no compiler of ours makes: handlers are refused by name, or do what the interpreter does."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.bpf.lower import Request, lower
from dprobes.errors import NotSupportedError
from dprobes.rpn.instruction_encoding import CodeImage, Relocation
from dprobes.rpn.instruction_set import rows_by_syntax
from dprobes.rpn.rpn_program import Point
from dprobes.testing import FakeContext
from dprobes.vm import Interpreter
from support.ebpf_backend import EbpfRunner, obstacle

TARGET = architecture("x86_64")


def code(*instructions: tuple[str, int] | tuple[str]) -> bytes:
    """Encode instructions with operands of 8 bytes."""
    rows = rows_by_syntax()
    parts = []
    for syntax, *operand in instructions:
        parts.append(bytes([rows[syntax].opcode]) + b"".join(n.to_bytes(8, "little", signed=True) for n in operand))
    return b"".join(parts)


def image_of(data: bytes, *relocations: Relocation) -> CodeImage:
    return CodeImage(data, 8, "little", (0,), {}, (), {}, relocations)


@pytest.mark.parametrize("syntax", ["sx <label>", "call <procname>"])
@pytest.mark.parametrize("target", [-1, 1 << 24, 1 << 40, -(1 << 62)])
def test_frames_that_lead_out_of_all_programs_are_refused(syntax: str, target: int) -> None:
    image = image_of(code((syntax, target - 9), ("exit",)))
    with pytest.raises(NotSupportedError) as caught:
        lower(image, TARGET, 0, Point(), Request())
    name = syntax.partition(" ")[0]
    assert caught.value.message == (
        f"'{name}' at byte 0 of the program leads to byte {target}, where no program has instructions"
    )


def test_a_symbol_without_an_address_is_refused() -> None:
    image = image_of(code(("push <value>", 0), ("exit",)), Relocation(1, "counter", 4))
    with pytest.raises(NotSupportedError) as caught:
        lower(image, TARGET, 0, Point(), Request())
    assert "'counter'" in caught.value.message
    lower(image, TARGET, 9, Point(), Request())  # it does not concern a handler that does not come by


def test_a_trace_that_no_offset_reaches_is_refused() -> None:
    point = Point(module="/" + "x" * 40_000, ex_logmax=65_535)
    with pytest.raises(
        NotSupportedError, match=r"^the handler is too large for eBPF: offset 327\d\d does not fit into 16"
    ):
        lower(image_of(code(("log st",), ("exit",))), TARGET, 0, point, Request())


@pytest.mark.parametrize(
    ("data", "relocations"),
    [
        (code(("jmp <label>", 1 << 40)), ()),
        (code(("push <value>", 1), ("jnz <label>", -(1 << 40))), ()),
        (code(("push <value>", 1)), ()),  # it runs off its end
        (b"\xff", ()),
        (code(("push <value>", 7)) + b"\x00", (Relocation(0, "data", 1), Relocation(2, "data", 1))),
        # A relocation where no value is pushed: the operand of a jump, and an instruction without one.
        (code(("jmp <label>", 0), ("push tid",), ("push <value>", 7)), (Relocation(1, "data", 0),)),
        (code(("push tid",), ("push <value>", 7), ("exit",)), (Relocation(1, "data", 0), Relocation(2, "data", 5))),
        (code(("push tid",), ("push <value>", 7), ("exit",)), (Relocation(2, "data", -5),)),
    ],
)
def test_damaged_code_does_the_same(data: bytes, relocations: tuple[Relocation, ...]) -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    image, point = image_of(data, *relocations), Point(autostacktrace=True)
    worlds = [FakeContext("x86_64", tid=9, symbols={"data": 0x1234}) for _ in range(2)]
    machine = Interpreter(image, TARGET).final_state(0, point, worlds[0])
    with EbpfRunner(image, TARGET, worlds[1]) as runner:
        outcome, state = runner.run(0, point)
    assert outcome == machine.outcome()
    assert state.peek() == machine.peek()
